"""The cost of pruning a model that is large for its data, at 0, 50, 80 and 90 per cent.

Pruned models compete with the dense model at equal steps, and with dense ones of equal bytes of state. Pruning is by
magnitude in ten steps (cubic) over the first half of the run, or at random before the first step; at 90 per cent also
in three steps, at once, and as an early-bird ticket. Dense models that are pruned after training show the gain of
retraining norms and embedding, with low-rank factors under the mask or without (PERP).

Published (SAMO): GPT-3 XL and 2.7B at 90 per cent match their dense runs on Wikitext-103 and BookCorpus. Expected from
the scaling laws of sparse models (Frantar et al., 2023), for models that see many tokens: 50 per cent sparse is worth a
dense model of 1.6 times the unpruned parameters, 75 per cent 2.2 times, 87.5 per cent 2.6 times. At equal bytes, all of
these are then ahead.

Tokens are bytes, and embedding and head are tied, so that most parameters are in the blocks, which are pruned. A
parameter has less than a token of text, which is read four times. Each model has the best of a few learning rates of
its matrices: one rate for all would favour some masks or widths. The rate is constant until pruning has ended, and
falls in the last two fifths.
"""

import random
import statistics
import sysconfig
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.experiments.harness import MODEL, STEP_TOKENS, Experiment, Trained, command, mean_rows
from benchmarks.harness import Result, Row
from optimus.data.preparation import SMALLEST_VOCABULARY
from optimus.errors import UserError
from optimus.model.architecture import ModelConfig
from optimus.model.count import count_parameters

_PIECES, _HELD_OUT = 100, 60  # pieces of 2,000 bytes for training and for validation
_EPOCHS, _RETRAINED = 4, 80  # passes over the text; steps of retraining
_BATCH, _CONTEXT = 16, 64
_HIDDEN, _LAYERS = 96, 2
_RATE = 6e-3  # of embedding and norms
_RATES = (1e-3, 2e-3, 4e-3)  # of matrices; at 1e-2 seeds differ by 0.09 nats
_SPARSITIES = (0.5, 0.8, 0.9)
# Shares of the steps at which pruning begins and ends, and the number of its events
_FIRST, _LAST, _EVENTS = 0.05, 0.5, 10
_COOLDOWN = 0.4
_DENSE = 18.0  # bytes of state per parameter in bf16


def bytes_left(sparsity: float) -> float:
    """Returns the bytes of state of a prunable parameter on one rank, with a bit mask."""
    return 2 + (1 - sparsity) * 16 + 1 / 8


def shape(hidden: int, width: int | None = None) -> dict[str, Any]:
    """Returns a model with so many columns. By default its feed-forward layers are 8 / 3 as wide."""
    width = width or -(-hidden * 8 // 24) * 8
    sizes = {"hidden": hidden, "layers": _LAYERS, "heads": 2, "intermediate": width}
    return {**MODEL, **sizes, "vocab": SMALLEST_VOCABULARY, "tie_embeddings": True}


def state_bytes(config: Mapping[str, Any], each: float = _DENSE) -> float:
    """Returns the bytes of state of a model; `each` is for a parameter of the blocks' matrices."""
    model = ModelConfig(**config)
    matrices = model.layers * (4 * model.hidden**2 + 3 * model.hidden * model.intermediate)
    return each * matrices + _DENSE * (count_parameters(model).total - matrices)


def with_bytes(most: float) -> dict[str, Any]:
    """Returns a model of at most `most` bytes of state, with the ratio of feed-forward width nearest to 8 / 3."""

    def fits(hidden: int, width: int) -> bool:
        return state_bytes(shape(hidden, width)) <= most

    fitting = []
    for hidden in range(4, _HIDDEN + 1, 4):
        widths = range(8 * hidden, hidden, -1)
        widest = bisect_left(widths, True, key=partial(fits, hidden))
        fitting += [shape(hidden, width) for width in widths[widest : widest + 1]]
    return min(fitting, key=lambda each: abs(each["intermediate"] / each["hidden"] - 8 / 3))


def run(experiment: Experiment) -> Result:
    """Train on pieces of books, drawn at random."""
    pieces = [text[at : at + 2000] for text in _books(experiment) for at in range(0, len(text), 2000)]
    random.Random(0).shuffle(pieces)
    steps = experiment.steps(_EPOCHS * sum(map(len, pieces[:_PIECES])) * STEP_TOKENS / (_BATCH * _CONTEXT))
    parts = pieces[:_PIECES], pieces[-_HELD_OUT:]
    prepared = experiment.prepared_texts({"books": parts}, vocabulary=SMALLEST_VOCABULARY, context=_CONTEXT)
    common = {"data": {"path": str(prepared["books"].train)}, "validation": experiment.validation(prepared, 1 << 16)}
    batch = {"global_batch": _BATCH, "micro_batch": _BATCH, "sequence_length": _CONTEXT}
    wide = shape(_HIDDEN)

    def of(
        model: Mapping[str, Any], rate: float, share: float = 1.0, length: int = steps, **sections: Any
    ) -> dict[str, Any]:
        peak = share * _RATE
        cooldown = {"cooldown": "linear", "cooldown_steps": max(1, round(_COOLDOWN * length))}
        schedule = {"name": "wsd", "lr": peak, "min_lr": peak / 50, **cooldown}
        optimizer = {"groups": [{"match": "matrix", "lr_scale": rate / _RATE}]}
        train = batch | sections.pop("train", {})
        return {**common, "model": model, "lr_schedule": schedule, "optimizer": optimizer, "train": train, **sections}

    def pruned(sparsity: float, at: Sequence[float], rate: float, **how: Any) -> dict[str, Any]:
        first = [round(share * steps) for share in at] if not experiment.quick else [*range(min(2, len(at)))]
        return of(wide, rate, pruning={"sparsity": sparsity, "at": first, "indices": "bits", **how})

    gradually = [_FIRST + (_LAST - _FIRST) * event / (_EVENTS - 1) for event in range(_EVENTS)]
    contestants: dict[str, Callable[[float], dict[str, Any]]] = {"dense": partial(of, wide)}
    sizes: list[Row] = [_size("dense", wide, _DENSE)]
    for sparsity in _SPARSITIES:
        narrow = with_bytes(state_bytes(wide, bytes_left(sparsity)))
        contestants[_pruned(sparsity)] = partial(pruned, sparsity, gradually, schedule="cubic")
        contestants[_random(sparsity)] = partial(pruned, sparsity, (0.0,), method="random")
        contestants[_equal(sparsity)] = partial(of, narrow)
        sizes += [_size(_pruned(sparsity), wide, bytes_left(sparsity)), _size(_equal(sparsity), narrow, _DENSE)]

    seed, rates, grid = experiment.seeds[0], dict[str, float](), list[Row]()
    for name, config in contestants.items():
        tries = _RATES[:1] if experiment.quick else _RATES
        tried = {rate: experiment.train(name, seed, config(rate), steps).loss("books") for rate in tries}
        rates[name] = min(tried, key=lambda rate: tried[rate])
        grid.append({"model": name, **{f"{rate:g}": loss for rate, loss in tried.items()}})
    found = experiment.train_all({name: config(rates[name]) for name, config in contestants.items()}, steps)

    rate = rates[_pruned(0.9)]
    early = {
        "method": "early-bird",
        "every": 1 if experiment.quick else steps // 60,
        "distance": 0.2,
        "indices": "bits",
    }
    beside = {
        "90 %, in three steps": pruned(0.9, (1 / 6, 2 / 6, 3 / 6), rate),
        "90 %, at once": pruned(0.9, (1 / 6,), rate),
        "90 %, early-bird": pruned(0.9, (_FIRST,), rate, **early),
    }
    found |= {name: [experiment.train(name, seed, config, steps)] for name, config in beside.items()}
    found |= _after_training(experiment, found["dense"][0], min(_RETRAINED, steps), partial(of, wide, rates["dense"]))

    rows: list[Row] = []
    for row in mean_rows(found, ["books"]):
        equal = str(row["configuration"]).split(",")[0]
        row["minus dense"] = _gap(found, row["configuration"], "dense")
        row["minus dense of its bytes"] = _gap(found, row["configuration"], f"dense, bytes of {equal}")
        rows.append(row)
    ratios = {}
    for sparsity in _SPARSITIES:
        for how, name in (("", _pruned(sparsity)), ("_at_random", _random(sparsity))):
            for key, other in (("dense", "dense"), ("dense_of_its_bytes", _equal(sparsity))):
                ratios[f"pruning.{100 * sparsity:.0f}{how}_minus_{key}"] = _gap(found, name, other)
    return Result(rows, ratios, tables={"learning rates": grid, "bytes of state": sizes, "pruning": rows})


def _pruned(sparsity: float) -> str:
    return f"{100 * sparsity:.0f} %, in ten steps"


def _random(sparsity: float) -> str:
    return f"{100 * sparsity:.0f} %, at random"


def _equal(sparsity: float) -> str:
    return f"dense, bytes of {100 * sparsity:.0f} %"


def _size(name: str, model: Mapping[str, Any], each: float) -> Row:
    parameters = count_parameters(ModelConfig(**model)).total
    return {"model": name, "hidden": model["hidden"], "parameters": parameters, "kB": state_bytes(model, each) / 1e3}


def _gap(found: Mapping[str, Sequence[Trained]], name: str, other: str) -> float | None:
    """Returns the difference of two configurations' losses, averaged over the seeds."""
    pairs = zip(found[name], found.get(other, ()))
    gaps = [one.loss("books") - two.loss("books") for one, two in pairs]
    return statistics.fmean(gaps) if gaps else None


def _books(experiment: Experiment) -> list[str]:
    try:
        return experiment.documents("books")
    except UserError as error:
        library = Path(sysconfig.get_paths()["stdlib"])
        print(f"{error}. The experiment reads Python's library instead, {library}")
        return [path.read_text(encoding="utf-8", errors="replace") for path in sorted(library.glob("*.py"))]


def _after_training(
    experiment: Experiment, dense: Trained, steps: int, of: Callable[..., dict[str, Any]]
) -> dict[str, list[Trained]]:
    """Prunes a trained model at once; evaluates it, and retrains few parameters or all."""
    seed, found = experiment.seeds[0], dict[str, list[Trained]]()
    for sparsity in (0.5, 0.8):
        name, still = f"{100 * sparsity:.0f} % after training", {"lr_schedule": {"lr": 1e-12, "min_lr": 1e-12}}
        pruning = {"pruning": {"sparsity": sparsity, "at": 0}}
        as_it_is = experiment.train(name, seed, of(checkpoint={"load_path": str(dense.folder)}) | pruning | still, 1)
        frozen = {"freeze": ["matrix"]}
        ways: dict[str, dict[str, Any]] = {
            "norms and embedding retrained": {"train": frozen},
            "norms, embedding and factors retrained": {"train": frozen | {"lora_rank": 4}},
            "all retrained": {},
        }
        found[name] = [as_it_is]
        for way, sections in ways.items():
            config = of(0.3, steps, checkpoint={"load_path": str(as_it_is.folder)}, **sections)
            found[f"{name}, {way}"] = [experiment.train(way, seed, config, steps)]
    return found


if __name__ == "__main__":
    command("experiments.pruning", run)
