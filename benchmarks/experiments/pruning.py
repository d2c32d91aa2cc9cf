"""Where pruning costs nothing, and where it does: a small model of bytes at 0, 50, 80 and 90 per cent.

Against the dense model at equal steps, and against a dense one with the bytes of state that 90 per cent leave. Magnitudes in
three steps and at once, a mask at random, an early-bird ticket; and, of a dense model that is pruned when it has been
trained, what retraining norms and head recovers, with low-rank factors under the mask or without (PERP).

Published (SAMO): GPT-3 XL and 2.7B at 90 per cent match their dense runs on Wikitext-103 and BookCorpus. Expected of a model
that is small for its data (one seed of a prototype): 0.14 nats lost in three steps, 0.19 at once, 0.20 at random, 0.17 by
a dense model of the same bytes.

Tokens are bytes, so that nearly all parameters are in the blocks, which are pruned. Both dense models and the pruned ones
have the best of three learning rates, of blocks and of the rest, each their own: with one for all a mask, or a narrow model,
seems to gain or to lose what the rate does.
"""

import statistics
import sysconfig
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

_STEPS, _RETRAINED = 600, 100
_RATES = ((2e-3, 1.0), (1e-2, 0.1), (1e-2, 0.3))  # of embedding, head and norms; of the matrices, as a share of it
_AT = (1 / 6, 2 / 6, 3 / 6)  # of the steps: when it is pruned
_DENSE, _PRUNED = 18, 4  # bytes of state per parameter in bf16, without and with nine tenths pruned
_BYTES, _ITERATIVE = "dense, bytes of 90 %", "90 %, in three steps"
_GAPS = (
    ("iterative_90_minus_dense", _ITERATIVE, "dense"),
    ("at_once_90_minus_dense", "90 %, at once", "dense"),
    ("dense_of_bytes_minus_dense", _BYTES, "dense"),
    ("iterative_90_minus_dense_of_bytes", _ITERATIVE, _BYTES),
    ("at_once_90_minus_dense_of_bytes", "90 %, at once", _BYTES),
)


def shape(hidden: int, at_least: float = 0) -> dict[str, Any]:
    """A model of four layers and so many columns; its feed-forward layers are so wide that a matrix of each is 8 / 3 as
    large, or that the state has so many bytes."""
    config = {**MODEL, "vocab": SMALLEST_VOCABULARY, "layers": 4, "hidden": hidden}
    sizes = (config | {"intermediate": width} for width in range(-(-hidden * 8 // 24) * 8, 16 * hidden, 8))
    return next(each for each in sizes if state_bytes(each) >= at_least)


def state_bytes(config: Mapping[str, Any], each: int = _DENSE) -> int:
    """Of a model, `each` of them for a parameter of the blocks' matrices."""
    model = ModelConfig(**config)
    matrices = model.layers * (4 * model.hidden**2 + 3 * model.hidden * model.intermediate)
    return each * matrices + _DENSE * (count_parameters(model).total - matrices)


def run(experiment: Experiment) -> Result:
    """Books, of which no model reads anything twice."""
    steps = experiment.steps(_STEPS * STEP_TOKENS)
    texts = _books(experiment)
    pieces = [text[at : at + 2000] for text in texts for at in range(0, len(text), 2000)]
    every = 40 if experiment.quick else 10
    parts = [each for i, each in enumerate(pieces) if i % every], pieces[::every]
    prepared = experiment.prepared_texts({"books": parts}, vocabulary=SMALLEST_VOCABULARY)
    common = {"data": {"path": str(prepared["books"].train)}, "validation": experiment.validation(prepared)}
    wide = shape(128)
    narrow = shape(64, at_least=state_bytes(wide, _PRUNED))

    def of(model: Mapping[str, Any], rate: tuple[float, float], **sections: Any) -> dict[str, Any]:
        peak, scale = rate
        schedule = {"peak": peak, "minimum": peak / 10}
        optimizer = {"groups": [{"match": "matrix", "lr_scale": scale}]}
        return {**common, "model": model, "lr_schedule": schedule, "optimizer": optimizer, **sections}

    def pruned(sparsity: float, at: Sequence[float], rate: tuple[float, float], **how: Any) -> dict[str, Any]:
        first = [round(share * steps) for share in at] if not experiment.quick else [*range(len(at))]
        return of(wide, rate, pruning={"sparsity": sparsity, "at": first, **how})

    rates, grid = dict[str, tuple[float, float]](), list[Row]()
    contestants: Mapping[str, Callable[[tuple[float, float]], dict[str, Any]]] = {
        "dense": partial(of, wide),
        _BYTES: partial(of, narrow),
        _ITERATIVE: partial(pruned, 0.9, _AT),
    }
    for name, config in contestants.items():
        tried = {rate: experiment.train(name, experiment.seeds[0], config(rate), steps) for rate in _RATES}
        rates[name] = min(tried, key=lambda rate: tried[rate].loss("books"))
        grid += [{"model": name, "peak": peak, "of matrices": peak * scale, "loss": each.loss("books")}
                 for (peak, scale), each in tried.items()]  # fmt: skip

    found = experiment.train_all(
        {
            **{name: config(rates[name]) for name, config in contestants.items()},
            "90 %, at once": pruned(0.9, _AT[:1], rates[_ITERATIVE]),
        },
        steps,
    )
    early = {"method": "early-bird", "every": 1 if experiment.quick else steps // 24, "distance": 0.2}
    beside = {
        "80 %, in three steps": pruned(0.8, _AT, rates[_ITERATIVE]),
        "50 %, in three steps": pruned(0.5, _AT, rates[_ITERATIVE]),
        "90 %, at random": pruned(0.9, (0.0,), rates[_ITERATIVE], method="random"),
        "90 %, early-bird": pruned(0.9, (1 / 24,), rates[_ITERATIVE], **early),
    }
    seed = experiment.seeds[0]
    found |= {name: [experiment.train(name, seed, config, steps)] for name, config in beside.items()}
    peak, scale = rates["dense"]
    retrained = _after_training(
        experiment,
        found["dense"][0],
        min(_RETRAINED, steps),
        lambda share, **sections: of(wide, (share * peak, scale), **sections),
    )
    rows: list[Row] = []
    for row in mean_rows(found | retrained, ["books"]):
        runs = (found | retrained)[row["configuration"]]
        gaps = [one.loss("books") - dense.loss("books") for one, dense in zip(runs, found["dense"])]
        rows.append({**row, "minus dense": statistics.fmean(gaps)})
    ratios = {
        f"pruning.{key}": statistics.fmean(
            one.loss("books") - two.loss("books") for one, two in zip(found[name], found[other])
        )
        for key, name, other in _GAPS
    }
    sizes: list[Row] = [
        {"model": name, "hidden": model["hidden"], "parameters": count_parameters(ModelConfig(**model)).total,
         "MB": state_bytes(model, each) / 1e6}
        for name, model, each in (("dense", wide, _DENSE), ("90 %", wide, _PRUNED), (_BYTES, narrow, _DENSE))
    ]  # fmt: skip
    return Result(rows, ratios, tables={"learning rates": grid, "bytes of state": sizes, "pruning": rows})


def _books(experiment: Experiment) -> list[str]:
    try:
        return experiment.documents("books")
    except UserError as error:
        library = Path(sysconfig.get_paths()["stdlib"])
        print(f"{error}. Instead: the text of Python's library, {library}")
        return [path.read_text(encoding="utf-8", errors="replace") for path in sorted(library.glob("*.py"))]


def _after_training(experiment: Experiment, dense: Trained, steps: int, of: Any) -> dict[str, list[Trained]]:
    """A trained model, pruned at once: as it is then, and with a few parameters or all of them retrained."""
    seed, found = experiment.seeds[0], dict[str, list[Trained]]()
    for sparsity in (0.5, 0.8):
        name, still = f"{100 * sparsity:.0f} % after training", {"lr_schedule": {"peak": 1e-12, "minimum": 1e-12}}
        pruning = {"pruning": {"sparsity": sparsity, "at": 0}}
        as_it_is = experiment.train(name, seed, of(1.0, checkpoint={"initial": str(dense.folder)}) | pruning | still, 1)
        frozen = {"freeze": ["matrix", "embedding"]}
        ways: dict[str, dict[str, Any]] = {
            "norms and head retrained": {"train": frozen},
            "norms, head and factors retrained": {"train": frozen | {"lora_rank": 4}},
            "all retrained": {},
        }
        found[name] = [as_it_is]
        for way, sections in ways.items():
            config = of(0.3, checkpoint={"initial": str(as_it_is.folder)}) | sections
            found[f"{name}, {way}"] = [experiment.train(way, seed, config, steps)]
    return found


if __name__ == "__main__":
    command("experiments.pruning", run)
