"""Where pruning costs nothing, and where it does: a model that is large for its data at 0, 50, 80 and 90 per cent.

Against the dense model at equal steps, and against a dense one with the bytes of state that 90 per cent leave. At 90 per
cent: magnitudes at once, in three steps, as an early-bird ticket, and a mask at random; and, of a dense model that is pruned
when it has been trained, what retraining norms and head alone recovers (PERP).

Published (SAMO): GPT-3 XL and 2.7B at 90 per cent match their dense runs on Wikitext-103 and BookCorpus. Measured before,
at this scale: 90 per cent cost 0.14 (in three steps) to 0.20 nats (at random) where data are plenty; a dense model of the
same bytes lies between.

Matrices of blocks have a tenth of the learning rate of embedding and head. With one rate for all of them, the best for a
dense model this small is too high for its blocks, and any mask, which makes their updates smaller, seems to gain 0.5 nats.
"""

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.experiments.harness import MODEL, STEP_TOKENS, Experiment, Trained, command, mean_rows
from benchmarks.harness import Result, Row
from optimus.model.architecture import ModelConfig
from optimus.model.count import count_parameters

_STEPS, _RETRAINED = 240, 40
_FEW, _MANY, _HELD_OUT = 75, 3000, 40  # pieces of 2,000 characters: some 58 k tokens, and more than are read once
_WIDE: Mapping[str, Any] = {"hidden": 128, "intermediate": 384}
_NARROW: Mapping[str, Any] = {"hidden": 88, "intermediate": 264}  # dense, with the bytes of 90 per cent
_GAPS = (
    ("50_minus_dense", "50 %, at once", "dense"),
    ("90_minus_dense", "90 %, at once", "dense"),
    ("90_iterative_minus_dense", "90 %, in three steps", "dense"),
    ("90_minus_dense_of_its_bytes", "90 %, at once", "dense, bytes of 90 %"),
    ("90_iterative_minus_dense_of_its_bytes", "90 %, in three steps", "dense, bytes of 90 %"),
    ("random_minus_magnitude", "90 %, at random", "90 %, at once"),
)
_DENSE, _PRUNED = 18, 4  # bytes of state per parameter, without and with nine tenths pruned


def run(experiment: Experiment) -> Result:
    """Books: a small part of it, eight times over, and more of it than is read once."""
    steps = experiment.steps(_STEPS * STEP_TOKENS)
    pieces = [text[at : at + 2000] for text in experiment.documents("books") for at in range(0, len(text), 2000)]
    rows: list[Row] = []
    ratios: dict[str, float | None] = {}
    for data, number in (("few", _FEW), ("many", _MANY)):
        number = min(60 if experiment.quick else number, len(pieces) - _HELD_OUT)
        prepared = experiment.prepared_texts({"books": (pieces[:number], pieces[number : number + _HELD_OUT])})
        common = {
            "data": {"path": str(prepared["books"].train)},
            "validation": experiment.validation(prepared),
            "lr_schedule": {"peak": 1e-2, "minimum": 1e-3},
            "optimizer": {"groups": [{"match": "matrix", "lr_scale": 0.1}]},
        }
        found = _trained(experiment, common, steps, every=data == "few")
        of_data = mean_rows(found, ["books"])
        rows += [{"data": data, **row, "minus dense": row["books"] - of_data[0]["books"]} for row in of_data]
        for key, name, other in _GAPS:
            pairs = zip(found[name], found[other])
            gap = statistics.fmean(one.loss("books") - two.loss("books") for one, two in pairs)
            ratios[f"pruning.{data}.{key}"] = gap
    return Result(rows, ratios, tables={"pruning": rows, "bytes of state": _bytes()})


def _trained(experiment: Experiment, common: Mapping[str, Any], steps: int, *, every: bool) -> dict[str, list[Trained]]:
    """All configurations on one amount of data; without `every` those that are compared."""

    def of(shape: Mapping[str, Any] = _WIDE, **sections: Any) -> dict[str, Any]:
        return {**common, "model": {**MODEL, **shape}, **sections}

    def pruned(sparsity: float, *at: float, **how: Any) -> dict[str, Any]:
        first = [round(share * steps) for share in at] if not experiment.quick else [*range(len(at))]
        return of(pruning={"sparsity": sparsity, "at": first, **how})

    configs = {
        "dense": of(),
        "dense, bytes of 90 %": of(_NARROW),
        "50 %, at once": pruned(0.5, 1 / 6),
        "90 %, at once": pruned(0.9, 1 / 6),
        "90 %, in three steps": pruned(0.9, 1 / 6, 2 / 6, 3 / 6),
        "90 %, at random": pruned(0.9, 0.0, method="random"),
    }
    if not every:
        return experiment.train_all(configs, steps)
    how = {"method": "early-bird", "every": 1 if experiment.quick else steps // 24, "distance": 0.2}
    configs |= {"80 %, at once": pruned(0.8, 1 / 6), "90 %, early-bird": pruned(0.9, 0.0, **how)}
    found = experiment.train_all(configs, steps)
    for seed, dense in zip(experiment.seeds, found["dense"]):
        for name, each in _after_training(experiment, seed, dense, min(_RETRAINED, steps), of).items():
            found.setdefault(name, []).append(each)
    return found


def _after_training(experiment: Experiment, seed: int, dense: Trained, steps: int, of: Any) -> dict[str, Trained]:
    """Half pruned when it has been trained: as it is then, with norms and head retrained, and with everything retrained."""
    still = {"lr_schedule": {"peak": 1e-12, "minimum": 1e-12}}
    pruning = {"sparsity": 0.5, "at": 0}
    as_it_is = experiment.train(
        "pruned after training", seed, of(checkpoint={"initial": str(dense.folder)}, pruning=pruning, **still), 1
    )
    gentle = {"lr_schedule": {"peak": 3e-3, "minimum": 3e-4}, "checkpoint": {"initial": str(as_it_is.folder)}}
    frozen = {"train": {"freeze": ["matrix", "embedding"]}}
    return {
        "50 % after training": as_it_is,
        "50 % after training, norms and head retrained": experiment.train("perp", seed, of(**gentle, **frozen), steps),
        "50 % after training, all retrained": experiment.train("retrained", seed, of(**gentle), steps),
    }


def _bytes() -> list[Row]:
    """What the state of the models takes, of which the matrices of the blocks are pruned."""
    rows: list[Row] = []
    for name, shape, each in (
        ("dense", _WIDE, _DENSE),
        ("90 %", _WIDE, _PRUNED),
        ("dense, bytes of 90 %", _NARROW, _DENSE),
    ):
        model = ModelConfig(**{**MODEL, **shape})
        total = count_parameters(model).total
        matrices = model.layers * (4 * model.hidden**2 + 3 * model.hidden * model.intermediate)
        size = each * matrices + _DENSE * (total - matrices)
        rows.append({"model": name, "parameters": total, "pruned": matrices * (each == _PRUNED), "MB": size / 1e6})
    return rows


if __name__ == "__main__":
    command("experiments.pruning", run)
