"""Trains one model on one text in float16, bfloat16 and float32, and compares the loss curves with those of other seeds.

`python -m benchmarks.precision_curves --text FOLDER --output curves.json`. Without --text, Python's own sources are the
text. The noise is the spread of the last losses of float32 runs that differ in the seed alone.
"""

import argparse
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import optimus
from optimus.disk import write_json
from optimus.observe.metrics import read_metrics
from optimus.observe.report import print_table

MODEL: dict[str, Any] = {
    "family": "olmoe",
    "hidden": 32,
    "layers": 2,
    "heads": 2,
    "intermediate": 32,
    "vocab": 512,
    "experts": 4,
    "experts_per_token": 2,
}
RUNS = {
    "float32": ["train.precision=float32"],
    "float16": ["train.precision=float16", "train.loss_scale.growth_interval=100"],
    "bfloat16": ["train.precision=bfloat16"],
    "float32, seed 1": ["train.precision=float32", "train.seed=1"],
    "float32, seed 2": ["train.precision=float32", "train.seed=2"],
    "float32, seed 3": ["train.precision=float32", "train.seed=3"],
}
SEQUENCE = 128  # tokens of a sequence
LAST = 20  # the last loss of a run is a mean over this share of its steps, as a divisor


def main() -> None:
    parser = argparse.ArgumentParser(description="Loss curves of one model in float16, bfloat16 and float32.")
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_paths()["stdlib"]) / "asyncio")
    parser.add_argument("--tokens", type=int, default=3_000_000)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--folder", type=Path, default=None, help="Folder for data and runs; default: a temporary one.")
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        if not (folder / "data").exists():
            optimus.prepare([arguments.text], folder / "data", train_tokenizer=MODEL["vocab"], context=SEQUENCE)
        found = {name: trained(folder, name, arguments.tokens) for name in arguments.runs}
    rows = compare(found)
    print_table(rows, f"{arguments.tokens:,} tokens of one model, by precision")
    if arguments.output is not None:
        write_json(arguments.output, {"rows": rows, "curves": {name: losses(each) for name, each in found.items()}})


def trained(folder: Path, name: str, tokens: int) -> list[dict[str, Any]]:
    """Trains a run, and returns the records of its steps."""
    output = folder / name.replace(", ", "-").replace(" ", "-")
    config: dict[str, Any] = {
        "model": MODEL,
        "data": {"path": str(folder / "data")},
        "train": {
            "output": str(output),
            "tokens": tokens,
            "global_batch": 32,
            "micro_batch": 16,
            "sequence_length": SEQUENCE,
        },
        "lr_schedule": {"lr": 3e-3, "min_lr": 3e-4, "warmup_steps": 50},
        "checkpoint": {"every": 1_000_000},
        "observe": {"tensorboard": False, "log_every": 50, "report": False},
    }
    began = time.perf_counter()
    optimus.train(config, RUNS[name])
    print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    return list(read_metrics(output))


def losses(records: list[dict[str, Any]]) -> list[float]:
    """Returns the loss of every step."""
    return [record["loss"] for record in records]


def last_loss(records: list[dict[str, Any]]) -> float:
    """Returns the mean loss over the last steps."""
    return statistics.mean(losses(records)[-max(1, len(records) // LAST) :])


def compare(found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Returns a row for each run, with the difference of the last loss from that of the first run."""
    right = last_loss(next(iter(found.values())))
    return [
        {
            "run": name,
            "last_loss": last_loss(records),
            "difference": last_loss(records) - right,
            "overflows": records[-1].get("overflow_steps", 0),
            "loss_scale": records[-1].get("loss_scale", 1.0),
        }
        for name, records in found.items()
    ]


if __name__ == "__main__":
    main()
