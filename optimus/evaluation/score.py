"""Computes log-likelihoods of token sequences, in batches of similar lengths.

Legend: B rows, S positions, H hidden, N predicted tokens of a batch, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from optimus.config import Architecture

TOKENS_PER_BATCH = 8192
_LOGITS_AT_ONCE = 1 << 24  # elements: 64 MiB in fp32


class Scored(Protocol):
    """A model that `score` accepts."""

    training: bool

    @property
    def config(self) -> Architecture: ...
    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """Output layer, from unsharded hidden states [N, H] to unsharded logits [N, V]."""

    def at_tokens(self, tokens_BS: Tensor, at_N: Tensor, find: Callable[[Tensor], Tensor]) -> Tensor:
        """Applies `find`, which may call `head`, to the unsharded hidden states [N, H] at the flat positions `at_N` of
        `tokens_BS`. Returns the result of `find`, fp32 [N, 2]."""

    def parameters(self) -> Iterator[nn.Parameter]: ...
    def eval(self) -> Any: ...
    def train(self, mode: bool) -> Any: ...


class Window(NamedTuple):
    """The tokens to score, and at least one token of context."""

    context: Sequence[int]
    continuation: Sequence[int]


class Score(NamedTuple):
    """A window's score. `log_likelihood` is in nats. `greedy` is True if greedy decoding gives the continuation."""

    log_likelihood: float
    greedy: bool


@contextmanager
def evaluating(model: Scored) -> Iterator[None]:
    """Disables gradients and sets evaluation mode inside the `with` block."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def split_long(context: Sequence[int], continuation: Sequence[int], limit: int) -> list[Window]:
    """Splits a request into windows of at most `limit` input tokens.

    A long context loses its beginning, as in lm-eval. Each later window has the last token of the previous window as
    context.
    """
    windows = []
    for start in range(0, len(continuation), limit):
        part = continuation[start : start + limit]
        before = continuation[start - 1 : start] if start else context
        windows.append(Window(before[-(limit + 1 - len(part)) :], part))
    return windows


def score(model: Scored, windows: Sequence[Window], tokens_per_batch: int = TOKENS_PER_BATCH) -> list[Score]:
    """Returns the score of each window, in order.

    Computes log-probabilities in fp32, and sums them in fp64. Raises `ValueError` for a window without context.
    """
    rows: dict[tuple[int, ...], list[int]] = {}  # the indices of the windows with the same input
    for index, (context, continuation) in enumerate(windows):
        if not context:
            raise ValueError(f"window {index} has no context, so nothing predicts its first token")
        rows.setdefault((*context, *continuation[:-1]), []).append(index)
    # The longest inputs come first, so that a lack of memory shows early.
    inputs = sorted(rows, key=len, reverse=True)
    scores: dict[int, Score] = {}
    with evaluating(model):
        start = 0
        while start < len(inputs):
            end = start + max(1, tokens_per_batch // len(inputs[start]))
            batch = inputs[start:end]
            members = [(row, index) for row, tokens in enumerate(batch) for index in rows[tokens]]
            asked = [(row, windows[index]) for row, index in members]
            scores.update(zip((index for _, index in members), _score_batch(model, batch, asked)))
            start = end
    return [scores[index] for index in range(len(windows))]


def _score_batch(model: Scored, inputs: list[tuple[int, ...]], asked: list[tuple[int, Window]]) -> Iterator[Score]:
    """Yields the score of each window of `asked`, a list of (index in `inputs`, window).

    The first of `inputs` must be the longest.
    """
    device = next(model.parameters()).device
    # Padding is at the end of a row, so a causal model's predictions for the tokens do not depend on the padding.
    tokens_BS = torch.zeros(len(inputs), len(inputs[0]), dtype=torch.long)
    for row, tokens in enumerate(inputs):
        tokens_BS[row, : len(tokens)] = torch.tensor(tokens)
    at, targets = list[int](), list[int]()
    for row, (context, continuation) in asked:
        first = row * tokens_BS.shape[1] + len(context) - 1
        at += range(first, first + len(continuation))
        targets += continuation
    target_N = torch.tensor(targets, dtype=torch.long, device=device)
    find = partial(_predictions, model, target_N)
    at_N = torch.tensor(at, dtype=torch.long, device=device)
    found_N2 = model.at_tokens(tokens_BS.to(device), at_N, find).cpu()
    log_p_N, greedy_N = found_N2[:, 0].double(), found_N2[:, 1].bool()
    lengths = [len(continuation) for _, (_, continuation) in asked]
    for log_p, greedy in zip(log_p_N.split(lengths), greedy_N.split(lengths)):
        yield Score(log_p.sum().item(), bool(greedy.all()))


def _predictions(model: Scored, target_N: Tensor, hidden_NH: Tensor) -> Tensor:
    """Returns fp32 [N, 2]: the log-probability of each target, and 1 if the target is the most probable token."""
    found = []
    block = max(1, _LOGITS_AT_ONCE // model.config.vocab)
    for hidden, target in zip(hidden_NH.split(block), target_N.split(block)):
        logits_NV = model.head(hidden).float()
        log_p_N = torch.log_softmax(logits_NV, -1).gather(1, target[:, None])[:, 0]
        found.append(torch.stack([log_p_N, (logits_NV.argmax(-1) == target).float()], 1))
    return torch.cat(found)
