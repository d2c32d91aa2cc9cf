"""The parts of `make gpu-check` that are no command of their own; `gpu_check.py` runs each as a program.

`python -m benchmarks.gpu_parts NAME --output FOLDER --work FOLDER [--rehearse]` prints the findings of a part and
writes them to NAME.json in the first folder; inputs of later parts go to the second. A rehearsal has tiny sizes.
"""

import argparse
import json
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

import optimus
from benchmarks.harness import Row, Stopwatch, apart, cpu_threads
from benchmarks.training import tree
from helpers.families import SIZES, needed
from optimus.config.load import resolve_model
from optimus.cores import usable_cores
from optimus.errors import UserError
from optimus.kernels import backend
from optimus.model.families import families
from optimus.observe.machine import find_device
from optimus.observe.metrics import read_metrics
from optimus.observe.report import print_table

_WARM_UP = 3  # steps before the timed ones
_TOLERANCE = 0.02  # of losses in bf16, relative
_CORES = 8  # threads of a small model on the CPU; a machine may report more cores than it gives
_LAYOUTS: dict[str, tuple[int, list[str]]] = {  # ranks and overrides of each layout
    "expert 2, all-to-all": (2, ["parallel.expert=2"]),
    "data 2, parameters sharded": (2, ["state.shard=parameters"]),
    "tensor 2": (2, ["parallel.tensor=2"]),
    "pipeline 2": (2, ["parallel.pipeline=2"]),
    "context 2": (2, ["parallel.context=2"]),
    "data 2, tensor 2": (4, ["parallel.tensor=2"]),
    "pipeline 2, expert 2": (4, ["parallel.pipeline=2", "parallel.expert=2"]),
}
_OPTIONS: dict[str, list[str]] = {  # options of one process that must not change its numbers
    "update on the device": ["state.offload=optimizer", "state.update_on=device"],
    "update on the host": ["state.offload=optimizer", "state.update_on=host"],
    "cache of three": ["state.offload=all", "state.cache=3"],
    "gradients to the host": ["state.offload=all", "state.accumulate_on=host"],
    "state on a disk": ["state.offload=disk"],
    "gradients in bf16": ["state.gradient_dtype=bfloat16"],
    "recomputed norms": ["recompute=[norm]"],
    "recomputed blocks": ["recompute=[block]"],
    "written in the background": ["checkpoint.asynchronous=true", "checkpoint.every=2"],
}


class Sizes(NamedTuple):
    """The device, folders and limits of a part."""

    device: torch.device
    output: Path
    work: Path
    rehearse: bool
    seconds: float

    def model(self, layers: int) -> dict[str, Any]:
        name = "mula-tiny-moe" if self.rehearse else "mula-7b-a1b"
        return {**resolve_model(name)["model"], "layers": 2 if self.rehearse else layers}

    def run(self, name: str, model: dict[str, Any], batch: int, context: int, **more: Any) -> dict[str, Any]:
        """Returns the configuration of a run in a folder of its own, on prepared text."""
        if self.rehearse:
            batch, context = 2, 64
        observe = {"tensorboard": False, "report": False, "log_every": 1} | more.pop("observe", {})
        sections: dict[str, Any] = {"checkpoint": {"every": 1_000_000}, "observe": observe, **more}
        return tree(model, batch, context, data=self.data(context), output=self.work / name, **sections)

    def data(self, context: int) -> Path:
        """Prepares Python's own sources with a tokenizer trained on them."""
        folder = self.work / f"data-{context}"
        if not folder.exists():
            sources = Path(sysconfig.get_paths()["stdlib"])
            texts = [sources / name for name in (["json"] if self.rehearse else ["email", "asyncio", "json"])]
            optimus.prepare(texts, folder, train_tokenizer=512 if self.rehearse else 4096, context=context)
        return folder


def machine(sizes: Sizes) -> dict[str, Any]:
    """Measures the planner's machine file, and the rates of one large product and one large copy."""
    from optimus.plan.measure.machine import measure, write
    from optimus.plan.measure.timing import Extent

    small = Extent(
        [(n, n, n) for n in (16, 64, 128, 256)], [(1, 64, 2, 32), (1, 128, 2, 32)], 1 << 20, (4096, 65536), 0.002, 1
    )
    found = measure(1, "here", small if sizes.rehearse else None)
    write(found, sizes.work / "machine.yaml")
    write(found, sizes.output / "machine.yaml")
    n, watch = 256 if sizes.rehearse else 8192, Stopwatch(sizes.device)
    a, b = torch.randn(2, n, n, device=sizes.device).bfloat16()
    torch.mm(a, b)
    product = min(watch.time(lambda: torch.mm(a, b), 10) for _ in range(5))
    x = torch.empty((1 << 20 if sizes.rehearse else 1 << 30) // 4, device=sizes.device)
    y = x.clone()
    copy = min(watch.time(lambda: y.copy_(x), 5) for _ in range(5))
    return {"matmul_tflops": 2e-12 * n**3 / product, "copy_gb_per_s": 2e-9 * x.nbytes / copy}


def step(sizes: Sizes) -> dict[str, Any]:
    """Measures speed and peak memory of 8 layers of the 7B shape with 16k tokens, beside the planner's predictions."""
    from optimus.config import load_config
    from optimus.plan.job_builder import as_configured, asked
    from optimus.plan.prediction import predict

    config = load_config(sizes.run("step", sizes.model(8), 8, 2048))
    with _timed_update(sizes.device) as seconds, _without_saving():
        optimus.train(config, ["train.stop_at=10"])
    records = read_metrics(sizes.work / "step")[_WARM_UP:]
    plan = predict(as_configured(asked(config, str(sizes.work / "machine.yaml"), 1, [])))
    last = records[-1]
    peak = max(sum(size for name, size in record.items() if name.startswith("memory/")) for record in records)
    found: dict[str, Any] = {
        "step_seconds": statistics.median(record["step_seconds"] for record in records),
        "predicted_step_seconds": plan.step.seconds,
        "tokens_per_second": statistics.median(record["tokens_per_second"] for record in records),
        "utilisation": last["model_flops_utilization"],
        "predicted_utilisation": plan.utilisation,
        "peak_gib": peak / 2**30,
        "predicted_peak_gib": plan.memory.total / 2**30,
        **{f"{name}_ms": 1e3 * statistics.median(times[_WARM_UP:]) for name, times in seconds.items()},
    }
    return found


def _without_saving() -> AbstractContextManager[Any]:
    """Returns a context in which runs write no final checkpoint, which would take 50 GB."""
    from optimus.training.trainer import Trainer

    return mock.patch.object(Trainer, "save")


@contextmanager
def _timed_update(device: torch.device) -> Iterator[dict[str, list[float]]]:
    """Yields the seconds of each step's gradient norm and update, with the device synchronized before and after."""
    from optimus.state.model_state import ModelState

    watch = Stopwatch(device)
    seconds: dict[str, list[float]] = {"norm": [], "update": []}
    usual: dict[str, Callable[..., Any]] = {"norm": ModelState.reduce_gradients, "update": ModelState.step}

    def timed(name: str) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            began = watch.read()
            found = usual[name](*given, **named)
            seconds[name].append(watch.read() - began)
            return found

        return run

    with (
        mock.patch.object(ModelState, "reduce_gradients", timed("norm")),
        mock.patch.object(ModelState, "step", timed("update")),
    ):
        yield seconds


def trace(sizes: Sizes) -> dict[str, Any]:
    """Traces one step; returns its longest kernels and the idle time of the device."""
    with _without_saving():
        optimus.train(sizes.run("trace", sizes.model(4), 8, 2048, observe={"profile_step": 3}), ["train.stop_at=3"])
    (path,) = (sizes.work / "trace").glob("**/trace-rank-0.json")
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    of_device = any(event.get("cat") == "kernel" for event in events)  # otherwise operators of the host
    kind = "kernel" if of_device else "cpu_op"
    spans = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e.get("cat") == kind)
    busy, until, totals = 0.0, 0.0, dict[str, list[float]]()
    for start, end, name in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
        totals.setdefault(name.split("(")[0], []).append(end - start)
    rows: list[Row] = [
        {"kernel": name[:80], "ms": sum(times) / 1e3, "calls": len(times)} for name, times in totals.items()
    ]
    rows.sort(key=lambda row: -row["ms"])
    print_table(rows[:15], "the longest kernels of a step")
    return {"idle_share": 1 - busy / (until - spans[0][0]), "kernels": len(spans), "longest": rows[0]["kernel"]}


def curve(sizes: Sizes) -> dict[str, Any]:
    """Compares losses on the device in bf16 with those on the CPU in fp32, and a resumed run with an unbroken one.

    Raises `RuntimeError` if they differ by more than rounding.
    """
    model, steps = resolve_model("mula-tiny-moe")["model"], 8 if sizes.rehearse else 40

    def losses(name: str, *overrides: str, resume: bool = False) -> list[float]:
        config = sizes.run(
            name, model, 8, 256, checkpoint={"every": steps // 2}, steps=steps, lr_schedule={"warmup_steps": 2}
        )
        optimus.train(config, list(overrides), resume=resume)
        return [record["loss"] for record in read_metrics(sizes.work / name)]

    whole = losses("whole")
    losses("resumed", f"train.stop_at={steps // 2}")
    resumed = losses("resumed", resume=True)
    with cpu_threads(min(_CORES, usable_cores())):
        exact = losses("exact", "train.device=cpu", "train.precision=float32", f"train.stop_at={steps // 4}")
    off = {"from_cpu_fp32": apart(whole[: len(exact)], exact), "after_resume": apart(resumed, whole)}
    if off["from_cpu_fp32"] > _TOLERANCE or off["after_resume"] > 0.005:
        raise RuntimeError(f"losses differ by {off}")
    return {"last_loss": whole[-1], **off}


def options(sizes: Sizes) -> dict[str, Any]:
    """Checks that losses do not depend on options of state and recomputation, nor on the kernels of any family.

    The part tests as many families as the time allows, with small models.
    """
    model, steps = resolve_model("mula-tiny-moe")["model"], 3 if sizes.rehearse else 6
    end = time.monotonic() + sizes.seconds

    def losses(name: str, model: dict[str, Any], overrides: list[str], micro_batch: int) -> list[float]:
        config = sizes.run(f"{name}-{micro_batch}", model, 8, 256, steps=steps, micro_batch=micro_batch)
        config["train"]["global_batch"] = 8
        optimus.train(config, [f"train.device={sizes.device.type}", "state.chunk=500000", *overrides])
        return [record["loss"] for record in read_metrics(sizes.work / f"{name}-{micro_batch}")]

    expected = losses("plain", model, [], 2)
    rows = [_compared(name, partial(losses, name, model, more, 2), expected) for name, more in _OPTIONS.items()]
    left = list(families())
    while left and time.monotonic() < end and not (sizes.rehearse and len(rows) > len(_OPTIONS)):
        name = left.pop(0)
        small = {"family": name, **SIZES, "hidden": 64, "intermediate": 64, "vocab": 4096, **needed(name)}
        small |= {"learned_positions": 256} if "learned_positions" in small else {}
        with mock.patch.object(backend, "_runs_triton", return_value=False):
            expected = losses(f"{name}-plain", small, [], 8)
        rows.append(_compared(name, partial(losses, name, small, [], 8), expected))
    print_table(rows, "losses with and without an option; losses of a family with and without kernels")
    _all_equal(rows)
    return {"equal": len(rows), "not reached": len(left)}


def _compared(name: str, losses: Callable[[], list[float]], expected: list[float]) -> Row:
    """Returns the difference from the expected losses, or the error that prevented a comparison."""
    began = time.monotonic()
    try:
        off: float | str = apart(losses(), expected)
    except Exception as error:  # the other rows are still of use
        off = f"{type(error).__name__}: {error}".splitlines()[0]
    equal = isinstance(off, float) and off <= _TOLERANCE
    return {"what": name, "off": off, "equal": equal, "seconds": time.monotonic() - began}


def _all_equal(rows: list[Row]) -> None:
    if wrong := [str(row["what"]) for row in rows if not row["equal"]]:
        raise RuntimeError(f"not the same losses: {', '.join(wrong)}")


def layouts(sizes: Sizes) -> dict[str, Any]:
    """Checks that layouts of 2 to 4 ranks on one device have the losses of one process, as many as the time allows."""
    model, steps = resolve_model("mula-tiny-moe")["model"], 3 if sizes.rehearse else 6
    device = "cpu" if sizes.device.type == "cpu" else f"{sizes.device.type}:0"
    rows: list[Row] = []
    end = time.monotonic() + sizes.seconds

    def losses(name: str, ranks: int, more: list[str]) -> list[float]:
        config = sizes.run(name.replace(" ", "-"), model, 8, 256, steps=steps, micro_batch=2)
        config["train"]["global_batch"] = 8
        optimus.train(config, [f"train.device={device}", *more], ranks=ranks)
        return [record["loss"] for record in read_metrics(sizes.work / name.replace(" ", "-"))]

    expected, left = losses("one", 1, []), dict(_LAYOUTS)
    for name, (ranks, overrides) in _LAYOUTS.items():
        longest = max((row["seconds"] for row in rows), default=0.0)
        if time.monotonic() + longest > end or (sizes.rehearse and rows):
            break
        del left[name]
        rows.append(_compared(name, partial(losses, name, ranks, overrides), expected))
    print_table(rows, "losses of several ranks on one device against one process")
    _all_equal(rows)
    return {"equal": len(rows), "not reached": len(left)}


def tiles(sizes: Sizes) -> dict[str, Any]:
    """Searches the fastest tiles of the experts' products, and compares them with the present ones."""
    from benchmarks import tiles
    from optimus.model.architecture import ModelConfig

    layer = tiles.Layer(
        ModelConfig.model_validate(sizes.model(1)), 32 if sizes.rehearse else 16384, torch.bfloat16, sizes.device
    )
    rows = tiles.search(layer, sizes.seconds, 0 if sizes.rehearse else tiles.compilers())
    print_table(rows, "the fastest tiles found")
    return {f"{row['kernel']}.{row['rows']}": row["tflops"] / row["present_tflops"] for row in rows if "tflops" in row}


def trainer(sizes: Sizes) -> dict[str, Any]:
    """Runs a few steps against the Trainer of transformers."""
    from benchmarks import train

    few: dict[str, Any] = {"steps": 1, "batch": 1} if sizes.rehearse else {"steps": 8}
    found = train.run(model="mula-tiny-moe", rounds=1, share=False, **few)
    found.publish("train")
    return dict(found.ratios)


PARTS = {function.__name__: function for function in (machine, step, trace, curve, options, layouts, tiles, trainer)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of the part, if it can be shortened")
    parser.add_argument("--rehearse", action="store_true")
    asked = parser.parse_args()
    sizes = Sizes(find_device("auto", "the device"), asked.output, asked.work, asked.rehearse, asked.seconds)
    try:
        found = PARTS[asked.name](sizes)
    except UserError as error:
        print(f"{asked.name}: {error}")
        return 1
    for name, value in found.items():
        print(f"{name}: {value:.6g}" if isinstance(value, float) else f"{name}: {value}")
    (sizes.output / f"{asked.name}.json").write_text(json.dumps({"ratios": found}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
