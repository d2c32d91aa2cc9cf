"""Costs of reports: the page of a long run, and the expert load in a step of `mula-tiny-moe`.

Counting and writing the load are timed within the step to which they belong.
"""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from typer import Option

from benchmarks.harness import Result, Row, cpu_threads
from benchmarks.training import Precision, Type, configuration, decided
from optimus.observe.metrics import MetricsWriter
from optimus.report.page import write_report
from optimus.testing.steps import Steps
from optimus.training.accounting import expert_load, imbalance

_METRICS = (
    "time", "loss", "balance_loss", "z_loss", "lr", "grad_norm", "tokens_per_second", "step_seconds", "data_seconds",
    "checkpoint_seconds", "model_flops_utilization",
)  # fmt: skip
_LAYERS, _EXPERTS, _EVERY = 16, 64, 10  # of the long run; the last is its `observe.log_every`


def run(
    records: Annotated[int, Option(help="Steps of the long run.")] = 100_000,
    steps: Annotated[int, Option(help="Steps of `mula-tiny-moe`.")] = 20,
    rounds: Annotated[int, Option(help="Number of pages to write.")] = 3,
    precision: Precision = "auto",
) -> Result:
    """Returns a row: the page, and the share of CPU time of the expert load in a step that writes it, and in one of
    ten."""
    chosen = decided(precision)
    with TemporaryDirectory() as folder, cpu_threads(1):
        page = _page(Path(folder), records, rounds)
        share = _experts(Path(folder), steps, chosen)
    row = {
        "steps": records,
        "precision": chosen,
        **page,
        "experts_percent": 100 * share,
        f"experts_percent_every_{_EVERY}": 100 * share / _EVERY,
    }
    return Result([row], {"report.seconds": page["seconds"], "report.experts_percent": row["experts_percent"]})


def _page(folder: Path, records: int, rounds: int) -> Row:
    """Returns the bytes and the CPU seconds of the page of a made-up run folder, in the best round."""
    draw = random.Random(0)
    long_run = folder / "long"
    long_run.mkdir()
    with (long_run / "metrics.jsonl").open("w") as metrics, (long_run / "experts.jsonl").open("w") as experts:
        for step in range(1, records + 1):
            record = {"step": step, "tokens": step * 4096, **{name: draw.random() for name in _METRICS}}
            if step % _EVERY == 0:
                layers = {layer: [round(2 * draw.random(), 3) for _ in range(_EXPERTS)] for layer in range(_LAYERS)}
                experts.write(json.dumps({"step": step, "load": layers}) + "\n")
                record |= imbalance(layers) | {"time/computation": 1.0, "memory/parameters": 1e9}
            metrics.write(json.dumps(record) + "\n")
    taken = []
    for _ in range(rounds):
        began = time.process_time()
        result = write_report([long_run], folder / "page.html")
        taken.append(time.process_time() - began)
    read = sum(file.stat().st_size for file in long_run.iterdir())
    return {"read_bytes": read, "page_bytes": result["bytes"], "seconds": min(taken)}


def _experts(folder: Path, steps: int, precision: Type) -> float:
    """Returns the median ratio of the CPU seconds of counting, adding and writing the expert load to those of the step."""
    config = configuration(
        "mula-tiny-moe", 16, 256, output=folder / "run", micro_batch=8, precision=precision,
        observe={"tensorboard": False},
    )  # fmt: skip
    trained: Any = Steps(config)
    (folder / "run").mkdir()
    writer, shares, spent = MetricsWriter(folder / "run", config, 0), [], 0.0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal spent
            began = time.process_time()
            result = function(*arguments)
            spent += time.process_time() - began
            return result

        return call

    context = trained.groups.step
    context.chose = timed(context.chose)
    load, write = timed(expert_load), timed(writer.write)
    for number in range(steps):
        began, spent = time.process_time(), 0.0
        with context.counting() as choices:
            trained.train()
        found = load(trained, choices)
        write({"step": number + 1}, found)
        shares.append(spent / (time.process_time() - began - spent))
    writer.close()
    return median(shares)
