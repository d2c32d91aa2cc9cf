"""Early signals of tasks: bits per byte of the right answer against accuracy, at 20 checkpoints of 3 sizes.

Published: below 200 billion tokens, accuracies of models of 0.5 to 3 billion parameters are flat or noisy, and
likelihoods of answers give a signal (E2LM). Expected: Spearman's correlation with the step of 0.9 or more for bits per
byte, of 0.5 or less for accuracy.
"""

import statistics
from typing import Any

from benchmarks.experiments.harness import MODEL, Experiment, command, mean_and_deviation
from benchmarks.harness import Result, Row
from optimus.errors import UserError
from optimus.evaluation.signals import read_curves, signals

_TOKENS, _CHECKPOINTS, _LIMIT = 400_000, 20, 25
_SIZES = {"small": (32, 1), "middle": (64, 2), "large": (96, 3)}
_TASKS = ["sciq", "arc_easy"]


def run(experiment: Experiment) -> Result:
    """Train on books and wiki, and evaluate the tasks of the folder `eval` beside the corpora."""
    tasks = experiment.corpus.parent / "eval"
    if not tasks.is_dir():
        raise UserError(
            f"{tasks} does not exist: put the tasks of this experiment into a folder eval beside the corpora"
        )
    prepared = experiment.prepared(["books", "wiki"])
    steps = experiment.steps(_TOKENS)
    every = 1 if experiment.quick else steps // _CHECKPOINTS
    evaluate = {
        "tasks": _TASKS,
        "task_data": str(tasks),
        "tasks_every": every,
        "tasks_limit": 2 if experiment.quick else _LIMIT,
    }
    data = [{"path": str(each.train), "name": corpus} for corpus, each in prepared.items()]
    configs: dict[str, dict[str, Any]] = {
        name: {
            "model": {**MODEL, "hidden": hidden, "layers": layers, "intermediate": 3 * hidden},
            "data": data,
            "evaluate": evaluate,
        }
        for name, (hidden, layers) in _SIZES.items()
    }
    trained = experiment.train_all(configs, steps)
    # Sizes are ranked within a seed.
    of_seeds = [signals(read_curves([run.folder for run in runs])) for runs in zip(*trained.values())]
    rows: list[Row] = []
    for same in zip(*of_seeds):
        row: Row = {"task": same[0]["task"], "metric": same[0]["metric"]}
        for name in ("spearman", "noise", "kendall"):
            row[name], row[f"{name} sd"] = mean_and_deviation([each[name] for each in same])
        rows.append(row)
    ratios = {
        f"early_signal.spearman.{metric}": statistics.fmean(row["spearman"] for row in rows if row["metric"] == metric)
        for metric in ("acc", "acc_norm", "bits_per_byte", "margin")
    }
    return Result(rows, ratios, tables={"early signal": rows})


if __name__ == "__main__":
    command("experiments.early-signal", run)
