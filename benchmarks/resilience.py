"""The cost of watching a run, and the time from a fault until the run continues.

Cost: ranks train a small model, whose steps hide little, and count the CPU time of checking sent tensors and of
recording collectives. Recovery: runs in the lab (`lab.py`), each with one fault.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import yaml
from typer import Option

from benchmarks.harness import Result, Row
from benchmarks.training import Precision, configuration, decided, tree
from optimus.comm import Groups
from optimus.data.preparation import prepare
from optimus.launch.nodes import NodeJob
from optimus.plan.measure.ranks import run_fresh
from optimus.testing.faults import FaultPlan
from optimus.testing.lab import rehearse
from optimus.testing.steps import Steps

_FAULT_STEP, _STEPS, _HANG = 4, 8, 8.0
_FAULTS: dict[str, FaultPlan] = {
    "a worker is killed": FaultPlan().kill(1, _FAULT_STEP),
    "the first node is killed": FaultPlan().kill_agent(0, _FAULT_STEP),
    "another node is killed": FaultPlan().kill_agent(1, _FAULT_STEP),
    "a link is cut": FaultPlan().cut(2, _FAULT_STEP),
    "NaN on one node": FaultPlan().nan(1, _FAULT_STEP),
    "NaN on all nodes": FaultPlan().nan(0, _FAULT_STEP).nan(1, _FAULT_STEP).nan(2, _FAULT_STEP),
    f"a rank hangs (found after {_HANG:g} s)": FaultPlan().hang(2, _FAULT_STEP),
}
_LAYOUTS = (("data", ["state.shard=gradients"]), ("tensor", ["parallel.tensor=2"]), ("expert", ["parallel.expert=2"]))


def run(
    model: Annotated[str, Option(help="Preset to train.")] = "mula-tiny-moe",
    steps: Annotated[int, Option(help="Steps to measure.")] = 6,
    faults: Annotated[bool, Option(help="Also lose nodes in the lab.")] = True,
    precision: Precision = "auto",
) -> Result:
    """Returns rows of costs, and a table of recoveries; without `faults` no lab runs."""
    chosen = decided(precision)
    costs = [_cost(model, name, [f"train.precision={chosen}", *overrides], steps) for name, overrides in _LAYOUTS]
    recoveries = list(_recoveries()) if faults else []
    ratios = {f"watch.share_{row['layout']}": float(row["share"]) for row in costs}
    tables = {"optimus bench resilience": costs}
    if recoveries:
        ratios["recovery.longest_s"] = max(float(row["seconds"]) for row in recoveries)
        tables["from a fault to the end of the next step, 3 nodes and 2 spares, keep-alive 1x3"] = recoveries
    return Result(costs, ratios, {"recoveries": recoveries}, tables)


# ---- The cost of watching ----


def _cost(model: str, layout: str, overrides: list[str], steps: int) -> Row:
    config = configuration(model, 8, 512, overrides, micro_batch=4, steps=1000).model_dump(exclude_unset=True)
    measured = run_fresh(_watched_steps, 2, config, steps)
    watching, step, notes = max(measured)
    return {
        "layout": layout,
        "ranks": 2,
        "precision": config["train"]["precision"],
        "step_cpu_s": step,
        "watching_cpu_ms": 1e3 * watching,
        "numbers_looked_at": notes,
        "share": watching / step,
    }


def _watched_steps(config: dict[str, Any], steps: int) -> tuple[float, float, int]:
    """Returns the CPU seconds of watching, those of the step, and the checked elements, for a median step."""
    trained, found = Steps(config), []
    counted = _count(trained.groups)
    trained.groups.watch.enabled = True
    for number in range(steps + 2):
        counted |= {"seconds": 0.0, "elements": 0.0}
        began = time.process_time()
        trained.train()
        whole = time.process_time() - began
        if number >= 2:
            found.append((counted["seconds"], whole, int(counted["elements"])))
    return median(each[0] for each in found), median(each[1] for each in found), found[0][2]


def _count(groups: Groups) -> dict[str, float]:
    """Counts CPU seconds in the watch and the recorder of `groups` from now on, and the checked elements."""
    counted = {"seconds": 0.0, "elements": 0.0}

    def timed(function: Callable[..., Any], looks: bool = False) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.thread_time()
            result = function(*arguments)
            counted["seconds"] += time.thread_time() - began
            counted["elements"] += arguments[0].numel() if looks else 0
            return result

        return call

    watch, recorder = groups.watch, groups.recorder
    for each, method in ((watch, "record_sent"), (recorder, "begins")):
        setattr(each, method, timed(getattr(each, method), looks=each is watch))
    return counted


# ---- Time until a run continues ----


def _recoveries() -> Iterator[Row]:
    """Yields the seconds from each fault to the end of the next step, on three nodes of one rank and two spares."""
    with TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        prepare(sorted(Path(__file__).parent.glob("*.py")), data, train_tokenizer=300, context=32, workers=1)
        for number, (name, plan) in enumerate(_FAULTS.items()):
            home = Path(folder) / str(number)
            home.mkdir()
            plan.write(home / "plan.yaml")
            (home / "run.yaml").write_text(yaml.safe_dump(_tiny(data, home / "run")), encoding="utf-8")
            job = NodeJob(home / "run.yaml", nodes=3, spares=2, keep_alive=(1, 3), wait=30.0)
            result = rehearse(job, inject=home / "plan.yaml")
            happened = min(event["time"] for event in result["events"] if event["kind"] == "injected")
            again = [event["time"] for event in result["events"] if event["kind"] == "recovered"]
            yield {
                "fault": name,
                "nodes": "namespaces" if result["isolated"] else "processes",
                "seconds": again[0] - happened if again else float("inf"),
                "finished": result["finished"],
            }


def _tiny(data: Path, output: Path) -> dict[str, Any]:
    shape = {"hidden": 32, "layers": 2, "heads": 2, "intermediate": 16, "experts": 4, "experts_per_token": 2}
    return tree(
        {"family": "olmoe", "vocab": 320, **shape},
        12,
        32,
        micro_batch=2,
        data=data,
        output=output,
        steps=_STEPS,
        precision="float32",
        lr_schedule={"lr": 3e-3, "min_lr": 3e-4, "warmup_steps": 2},
        checkpoint={"every": 3, "keep": 3, "weights_every": 3},
        resilience={"hang": _HANG},
        observe={"tensorboard": False},
    )
