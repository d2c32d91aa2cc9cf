"""Costs of data: padding of best-fit rows, attention within documents, batches of a mixture, and the search for a
place.

Every input is a corpus, prepared separately with one tokenizer. Attention runs on rows of the concatenated documents:
forward and backward passes over whole rows and within documents take turns. Times are those of the processor.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from torch import Tensor
from typer import Argument, Option

from benchmarks.harness import Result, Rounds, Row, take_turns
from optimus.data.loader import TokenLoader
from optimus.data.mixture import Mixture
from optimus.data.packing import documents_BS
from optimus.data.preparation import prepare
from optimus.data.shards import Shards
from optimus.data.training import DataPhase, MixedSource
from optimus.disk import user_path
from optimus.kernels.attention import causal_attention
from optimus.kernels.documents import document_attention
from optimus.model import Batch

_ROWS, _HEADS, _HEAD = 4, 4, 64  # of the measured attention
_TOKENS = 1 << 13  # tokens of a loader's batch
_PLACES, _SOURCES = 10**9, 50  # places of the searched mixture, and its sources


def run(
    inputs: Annotated[list[Path], Argument(metavar="INPUT...", help="Corpora, each a file, folder or glob.")],
    tokenizer: Annotated[Path, Option(help="A tokenizer.json.")],
    context: Annotated[int, Option(help="Tokens of a row.")] = 2048,
    rounds: Rounds = 3,
) -> Result:
    """Returns a row for each input, and ratios.

    - `data.most_padding`: the largest share of padding.
    - `data.least_attention`: the smallest ratio of the times within documents and over whole rows.
    - `data.batch_ms`: the median time of a batch of 8,192 tokens of all inputs, with borders of documents.
    - `data.seek_ms`: the median time of finding a place among 10^9 of 50 sources.
    """
    rows, loaded = list[Row](), list[Shards]()
    with tempfile.TemporaryDirectory() as temporary:
        for path in map(user_path, inputs):
            name, prepared = path.name.split(".")[0], partial(prepare, tokenizer=user_path(tokenizer), context=context)
            packed = prepared([path], Path(temporary) / f"{name}-packed", pack="best-fit")
            prepared([path], Path(temporary) / name)
            loaded.append(Shards(Path(temporary) / name))
            row: Row = {"corpus": name, "documents": packed["documents"], "longer_than_a_row": packed["cut_documents"]}
            row |= {"rows": packed["instances"], "padding": packed["padding_tokens"] / packed["tokens"]}
            rows.append(row | _attention(loaded[-1], rounds))
        batch_ms = _batch_ms(loaded)
    ratios = {
        "data.most_padding": max(row["padding"] for row in rows),
        "data.least_attention": min(row["attention"] for row in rows),
        "data.batch_ms": batch_ms,
        "data.seek_ms": _seek_ms(),
    }
    return Result(rows, ratios)


def _attention(shards: Shards, rounds: int) -> Row:
    """Returns the seconds over whole rows and within documents, and their ratio."""
    tokens_BS = shards.rows(0, min(_ROWS, shards.instances)).astype(np.int64)
    documents = Batch(torch.from_numpy(tokens_BS), document_BS=torch.from_numpy(documents_BS(tokens_BS, shards.eos_id)))
    borders = documents.documents()
    assert borders is not None
    draws = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(*tokens_BS.shape, _HEADS, _HEAD, generator=draws) for _ in range(4))

    def passes(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> float:
        leaves, began = [each.clone().requires_grad_() for each in (q, k, v)], time.process_time()
        attend(*leaves).backward(grad)
        return time.process_time() - began

    def within(*leaves: Tensor) -> Tensor:
        q, k, v = (each.flatten(0, 1)[None] for each in leaves)
        return document_attention(q, k, v, borders).unflatten(1, tokens_BS.shape)[0]

    turns = {"whole": lambda: passes(causal_attention), "within": lambda: passes(within)}
    whole, inside = (min(seconds) for seconds in take_turns(turns, rounds, warm_up=1).values())
    return {"whole_s": whole, "within_s": inside, "attention": inside / whole}


def _batch_ms(loaded: Sequence[Shards], batches: int = 100) -> float:
    """Returns the median time of a batch of a mixture of all sources."""
    sources, batch = [MixedSource(each.folder.name, each) for each in loaded], max(1, _TOKENS // loaded[0].context)
    phase = DataPhase(0, batch, sources, Mixture([*range(1, len(sources) + 1)]), documents=True)
    with TokenLoader([phase]) as loader:
        return _median_ms(loader._read, range(batches))


def _seek_ms(times: int = 100) -> float:
    """Returns the median time of finding one place in a mixture of many sources."""
    draws = np.random.default_rng(1)
    mixture = Mixture(draws.integers(1, 10**7, _SOURCES).tolist())
    places = [np.array([place]) for place in draws.integers(0, _PLACES, times).tolist()]
    return _median_ms(mixture.locate, places)


def _median_ms(function: Callable[..., object], arguments: Sequence[object]) -> float:
    seconds = []
    for argument in arguments:
        began = time.process_time()
        function(argument)
        seconds.append(time.process_time() - began)
    return 1000 * statistics.median(seconds)
