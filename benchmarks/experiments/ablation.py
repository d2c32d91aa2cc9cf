"""Averages of models of parts of the data as a proxy for models of mixtures (`optimus merge`).

Published: the perplexity of a model trained on a mixture correlates strongly with that of the average of models trained
on its parts, so that n trainings answer for 2^n mixtures (Na et al. 2024). Expected: Pearson's r of 0.9 or more.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import correlation

from benchmarks.experiments.harness import Experiment, Prepared, Trained, command, mean_and_deviation
from benchmarks.harness import Result, Row
from optimus.checkpoint.folder import find_checkpoint
from optimus.checkpoint.merging import merge

_PARTS = ("books", "wiki", "math", "speeches", "multilingual", "reviews")
_SETS = ("books", "math", "speeches", "reviews")  # validation sets
_TRUNK, _TOKENS = 300_000, 80_000


def run(experiment: Experiment) -> Result:
    """Train on six parts and their 15 pairs, from one trunk that has seen all parts, with every seed."""
    names = _PARTS[:3] if experiment.quick else _PARTS
    prepared = experiment.prepared(names)
    sets = [name for name in _SETS if name in names]
    rows = [row for seed in experiment.seeds for row in _of_seed(experiment, prepared, sets, seed)]
    correlations: list[Row] = []
    for name, chosen in {**{name: [name] for name in sets}, "all": sets}.items():
        found = []
        for seed in experiment.seeds:
            of_seed = [row for row in rows if row["seed"] == seed]
            pairs = [(row[each], row[f"{each} average"]) for row in of_seed for each in chosen]
            found.append(correlation(*map(list, zip(*pairs))))
        mean, deviation = mean_and_deviation(found)
        correlations.append({"held out": name, "pearson": mean, "pearson sd": deviation})
    ratios = {f"ablation.pearson.{row['held out']}": row["pearson"] for row in correlations}
    return Result(rows, ratios, tables={"ablation": rows, "correlations": correlations})


def _of_seed(experiment: Experiment, prepared: Mapping[str, Prepared], sets: Sequence[str], seed: int) -> list[Row]:
    """Returns a row for each pair: the loss of its model, and of the average of the models of its parts."""
    names = tuple(prepared)
    measured = experiment.validation({name: prepared[name] for name in sets}, tokens=1 << 14)
    trunk = experiment.train("trunk", seed, {"data": _sources(prepared, names)}, experiment.steps(_TRUNK))
    steps = experiment.steps(_TOKENS)

    def branch(chosen: tuple[str, ...]) -> Trained:
        config = {
            "data": _sources(prepared, chosen),
            "validation": measured,
            "checkpoint": {"every": 1_000_000, "keep": 1, "load_path": str(find_checkpoint(trunk.folder))},
            "lr_schedule": {"lr": 1e-3, "min_lr": 1e-4},
        }
        return experiment.train("+".join(chosen), seed, config, steps)

    parts = {name: branch((name,)) for name in names}
    rows: list[Row] = []
    for pair in combinations(names, 2):
        trained = branch(pair)
        average = experiment.folder / "averages" / f"{'+'.join(pair)}-{parts[pair[0]].folder.name[-10:]}-{steps}"
        if not average.exists():
            average.parent.mkdir(exist_ok=True)
            merge({str(parts[name].folder): 0.5 for name in pair}, average)
        still = {
            "data": _sources(prepared, pair),
            "validation": measured,
            "checkpoint": {"every": 1_000_000, "keep": 1, "load_path": str(average)},
            "lr_schedule": {"name": "constant", "lr": 1e-30, "warmup_steps": 0},  # validates without training
        }
        merged = experiment.train(f"average of {'+'.join(pair)}", seed, still, 1)
        row: Row = {"pair": "+".join(pair), "seed": seed}
        for name in sets:
            row |= {name: trained.loss(name), f"{name} average": merged.loss(name)}
        rows.append(row)
    return rows


def _sources(prepared: Mapping[str, Prepared], names: tuple[str, ...]) -> list[dict[str, object]]:
    return [{"path": str(prepared[name].train), "name": name, "weight": 1.0} for name in names]


if __name__ == "__main__":
    command("experiments.ablation", run)
