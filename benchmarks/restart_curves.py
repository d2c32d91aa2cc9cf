"""Measures the cost of restarting a run from its weights alone, with fresh moments.

`python -m benchmarks.restart_curves --text FOLDER --plot restart.png --output restart.json` (the Optimus paper, section
4: persistent model checkpoints). Without --text, Python's own sources are the text. The run continues to its end twice,
once undisturbed and once from the weights of its middle, and both losses of every step are compared.
"""

import argparse
import statistics
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import optimus
from benchmarks.layout_curves import MODEL  # beside this file
from optimus.checkpoint.rollback import rollback
from optimus.disk import write_json
from optimus.observe.metrics import read_metrics
from optimus.observe.report import report

WINDOW = 20  # steps over which losses are averaged


def main() -> None:
    parser = argparse.ArgumentParser(description="Loss of a run and of its restart from weights alone.")
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_paths()["stdlib"]) / "asyncio")
    parser.add_argument("--before", type=int, default=300, help="Steps before the restart.")
    parser.add_argument("--after", type=int, default=200, help="Steps after the restart.")
    parser.add_argument("--precision", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--plot", type=Path, default=Path("restart.png"))
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        optimus.prepare([arguments.text], Path(folder) / "data", train_tokenizer=MODEL["vocab"], context=128)
        config = config_of(Path(folder), arguments.before, arguments.after, arguments.precision)
        optimus.train(config)
        run = Path(config["train"]["output"])
        undisturbed = losses(run)
        rollback(run, arguments.before)
        optimus.train(config, resume=True)
        restarted = losses(run)
    rows = compare(undisturbed, restarted, arguments.before)
    last = rows[-1]["difference_percent"] / 100
    worst = max(row["difference_percent"] for row in rows) / 100
    ratios = {"restart.last": 1 + last, "restart.worst": 1 + worst}
    for row in rows:
        print(
            f"steps {row['steps']:>9}: {row['undisturbed']:.4f} {row['restarted']:.4f} {row['difference_percent']:+.2f} %"
        )
    print(f"after {arguments.after} steps the loss differs by {100 * last:+.2f} %")
    draw(undisturbed, restarted, arguments.before, arguments.plot)
    if arguments.output is not None:
        write_json(arguments.output, report("restart", rows, ratios))


def config_of(folder: Path, before: int, after: int, precision: str) -> dict[str, Any]:
    """Returns the configuration of a run of `before` + `after` steps that keeps the weights between."""
    return {
        "model": MODEL,
        "data": {"path": str(folder / "data")},
        "train": {
            "output": str(folder / "run"),
            "steps": before + after,
            "global_batch": 16,
            "micro_batch": 8,
            "sequence_length": 128,
            "precision": precision,
        },
        "lr_schedule": {"lr": 3e-3, "min_lr": 3e-4, "warmup_steps": 20},
        "checkpoint": {"weights_every": before},
        "observe": {"tensorboard": False},
    }


def losses(run: Path) -> list[float]:
    """Returns the loss of every step."""
    return [record["loss"] for record in read_metrics(run)]


def compare(undisturbed: list[float], restarted: list[float], before: int) -> list[dict[str, Any]]:
    """Returns the means over windows of steps after the restart."""
    rows = []
    for start in range(before, len(undisturbed), WINDOW):
        a, b = (statistics.mean(curve[start : start + WINDOW]) for curve in (undisturbed, restarted))
        steps = f"{start + 1}-{min(start + WINDOW, len(undisturbed))}"
        rows.append({"steps": steps, "undisturbed": a, "restarted": b, "difference_percent": 100 * (b / a - 1)})
    return rows


def draw(undisturbed: list[float], restarted: list[float], before: int, path: Path) -> None:
    """Draws both curves, as means over windows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, curve, style in (("undisturbed", undisturbed, "-"), ("from the weights alone", restarted, "--")):
        ends = range(WINDOW, len(curve) + 1, 5)
        axes.plot(list(ends), [statistics.mean(curve[end - WINDOW : end]) for end in ends], style, label=name)
    axes.axvline(before, color="grey", linewidth=0.8)
    axes.set(xlabel="step", ylabel=f"loss, mean of {WINDOW} steps", title="restart from weights with fresh moments")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
