"""Trains one model on one text in different layouts, and plots their loss curves over each other.

`python -m benchmarks.layout_curves --text FOLDER --plot curves.png --output curves.json` (as in the sources' figures
3.8 and 7.7). Without --text, Python's own sources are the text. The first layout is one process; every other layout's
largest difference from the first is printed.
"""

import argparse
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import optimus
from optimus.disk import write_json
from optimus.observe.metrics import read_metrics
from optimus.observe.report import print_table

MODEL: dict[str, Any] = {
    "family": "olmoe",
    "hidden": 64,
    "layers": 2,
    "heads": 4,
    "intermediate": 64,
    "vocab": 2048,
    "experts": 8,
    "experts_per_token": 2,
}
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one process": (1, []),
    "data 2, ZeRO-2": (2, ["state.shard=gradients"]),
    "expert 4, EPSO": (4, ["parallel.expert=4", "state.shard=optimizer"]),
    "tensor 2, sequence": (2, ["parallel.tensor=2"]),
    "tensor 2 x 2, experts over 4": (4, ["parallel.tensor=[2,2]", "parallel.expert=4"]),
    "ring 2, ZeRO-3": (4, ["parallel.context=2", "state.shard=parameters"]),
    "Ulysses 2, tensor 2, expert tensor 2": (
        4,
        ["parallel.context=2", "parallel.context_method=ulysses", "parallel.tensor=2", "parallel.expert_tensor=2"],
    ),
    "pipeline 2, recomputation": (2, ["parallel.pipeline=2", "recompute=[norm,attention,moe]"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Loss curves of one model in several layouts.")
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_paths()["stdlib"]) / "asyncio")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--plot", type=Path, default=Path("layout-curves.png"))
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        optimus.prepare([arguments.text], Path(folder) / "data", train_tokenizer=MODEL["vocab"], context=128)
        curves = {
            name: curve(Path(folder), number, ranks, arguments.steps, overrides)
            for number, (name, (ranks, overrides)) in enumerate(LAYOUTS.items())
        }
    rows = compare(curves)
    print_table(rows, f"{arguments.steps} steps of one model in {len(curves)} layouts")
    draw(curves, arguments.plot)
    if arguments.output is not None:
        write_json(arguments.output, {"rows": rows, "curves": curves})


def curve(folder: Path, number: int, ranks: int, steps: int, overrides: list[str]) -> list[float]:
    """Trains a layout, and returns the loss of every step."""
    output = folder / f"run-{number}"
    config: dict[str, Any] = {
        "model": MODEL,
        "data": {"path": str(folder / "data")},
        "train": {
            "output": str(output),
            "steps": steps,
            "global_batch": 8,
            "micro_batch": 2,
            "sequence_length": 128,
            "precision": "float32",
        },
        "lr_schedule": {"lr": 3e-3, "min_lr": 3e-4, "warmup_steps": 20},
        "checkpoint": {"every": 1_000_000},
        "observe": {"tensorboard": False, "log_every": 1_000_000},
        "tuning": {"matmul": False},
    }
    optimus.train(config, overrides, ranks=ranks)
    return [record["loss"] for record in read_metrics(output)]


def compare(curves: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Returns a row for each layout, with the largest relative difference of a step's loss from that of one process."""
    right = next(iter(curves.values()))
    return [
        {
            "layout": name,
            "ranks": LAYOUTS[name][0],
            "first_loss": losses[0],
            "last_loss": losses[-1],
            "largest_difference": max(abs(a / b - 1) for a, b in zip(losses, right, strict=True)),
        }
        for name, losses in curves.items()
    ]


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Draws all curves in one panel, and their differences from the first in another."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (axes, below) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(3, 2))
    right = next(iter(curves.values()))
    for number, (name, losses) in enumerate(curves.items()):
        steps = range(1, len(losses) + 1)
        axes.plot(steps, losses, label=name, linewidth=8 - number * 0.9, alpha=0.7)
        if number:
            difference = [max(abs(a / b - 1), 1e-9) for a, b in zip(losses, right, strict=True)]
            below.plot(steps, difference, color=f"C{number}", linewidth=1)
    axes.set(ylabel="loss, nats per token", title="One model and its data in several layouts")
    axes.legend(fontsize=8)
    below.set(xlabel="step", ylabel=f"relative difference from {next(iter(curves))}", yscale="log")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
