"""The sparse block with its router against every implementation that users could take instead.

All contestants get the same weights, inputs and upstream gradient, and the same choice of experts (`moe_inputs`). Each
is first checked against float64, on few tokens on a CPU; an incorrect one is named and not timed. Then contestants take
turns together with large square products, which show the peak rate of the machine. A contestant's time is its best
round on the CPU, where every disturbance adds time, and the median on an accelerator.

Three kinds of passes are timed: the forward pass of training; forward and backward with accumulating gradients, as in
all but the first microbatch of a step and always in chunks; and forward and backward with new gradients.
"""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Annotated, Any

import torch
from typer import Option

from benchmarks import moe_output
from benchmarks.harness import DTYPES, Device, Plot, Result, Row, Stopwatch, cpu_threads, take_turns
from benchmarks.moe_inputs import LOADS, Inputs, Shape, Weights, make_inputs, make_weights, parse_shape
from benchmarks.moe_kernel_rivals import contestants
from benchmarks.moe_measure import KINDS, Errors, Expected, Memory, check, expected, memory, time_pass
from benchmarks.moe_rivals import Block, LeftOut, Make, Ours, Setting
from benchmarks.training import SHORT, decided
from optimus.errors import UserError, nearest
from optimus.observe.machine import find_device

_TOLERANCE = {"bf16": 2e-2, "fp32": 1e-4}
_CHECKED = 128  # tokens on a CPU, where float64 is slow; all tokens on an accelerator
_PRODUCT = 2048, 8192  # rows and columns of the product that shows the peak rate: on a CPU, on an accelerator
_HOPELESS = 10, 5.0  # times slower than ours, and seconds: on a CPU a contestant beyond both has one pass


@dataclass
class _Entry:
    """A contestant and its measurements. A contestant without a block is out of the race for the reason in `note`."""

    name: str
    ours: bool
    block: Block | None = None
    note: str = ""
    errors: Errors | None = None
    memory: Memory | None = None
    seconds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})


@dataclass
class _Case:
    """One table of the result."""

    shape: Shape
    dtype: str
    tokens: int
    load: str
    device: torch.device
    rounds: int
    watch: Stopwatch

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"


def run(
    shape: Annotated[
        list[str] | None,
        Option(help="olmoe, small, a preset with experts, or H/I/E/K. Repeat for more. Default: olmoe and small."),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        Option(help="Tokens of a pass. Repeat for more. Default: 1024; on an accelerator 8192 and 16384."),
    ] = None,
    load: Annotated[
        list[str] | None,
        Option(help="Spread of the tokens: learned, uniform, zipf, one-hot. Repeat for more. Default: learned."),
    ] = None,
    dtype: Annotated[
        list[str] | None, Option(help="bf16 or fp32. Repeat for more. Default: the type of a run on this machine.")
    ] = None,
    device: Device = "auto",
    threads: Annotated[int, Option(help="CPU threads. With one, times are process times.")] = 1,
    rounds: Annotated[
        int | None, Option(help="Rounds in which the contestants take turns. Default: 3; on an accelerator 30.")
    ] = None,
    plot: Plot = None,
) -> Result:
    """Returns a row for each case and contestant and for the large products, and ratios. Prints each case at its end.

    Raises `UserError` for an unknown shape, load, type or device, and for counts below 1.
    """
    target = find_device(device, "--device")
    on_cpu = target.type == "cpu"
    counts, loads = tokens or ((1024,) if on_cpu else (8192, 16384)), load or ["learned"]
    dtypes = dtype or [SHORT[decided("auto", device)]]
    for name, number in [("--threads", threads), ("--rounds", rounds), *(("--tokens", each) for each in counts)]:
        if number is not None and number < 1:
            raise UserError(f"{name} {number}: give at least 1")
    for option, given, valid in (("--dtype", dtypes, DTYPES), ("--load", loads, LOADS)):
        for word in given:
            if word not in valid:
                raise UserError(f"{option} {word}: {nearest(word, valid)}")
    shapes = [parse_shape(text) for text in shape or ("olmoe", "small")]
    rounds, watch = rounds or (3 if on_cpu else 30), Stopwatch(target, threads)
    rows: list[Row] = []
    with cpu_threads(threads), torch.random.fork_rng():
        torch.manual_seed(0)
        for block, kind in product(shapes, dtypes):
            weights = make_weights(block, DTYPES[kind], target)
            gradients = Weights(*(torch.zeros_like(weight) for weight in weights))
            for spread, count in product(loads, counts):
                found = _run_case(_Case(block, kind, count, spread, target, rounds, watch), weights, gradients)
                moe_output.print_case(found)
                rows += found
    moe_output.print_machine()
    if plot is not None:
        moe_output.draw(rows, plot)
    return Result(rows, ratios(rows), tables={})


def _run_case(case: _Case, weights: Weights, gradients: Weights) -> list[Row]:
    weights, inputs = make_inputs(case.shape, weights, case.tokens, case.load)
    checked = inputs.first(_CHECKED if case.on_cpu else case.tokens)
    want = expected(weights, checked, case.shape.experts_per_token)
    setting = Setting(case.shape, case.tokens, weights, gradients)
    entries = [_enter(name, make, setting, want, case) for name, make in contestants(case.device).items()]
    del want
    for gradient in gradients:
        gradient.zero_()
    _first_pass(entries, inputs, case)
    matmuls = _take_turns(entries, inputs, case)
    return [*(_row(entry, case) for entry in entries), *(_matmul_row(*one, case) for one in matmuls.items())]


def _enter(name: str, make: Make, setting: Setting, want: Expected, case: _Case) -> _Entry:
    """Makes a contestant and checks it."""
    entry = _Entry(name, ours=make is Ours)
    with _out_if_failed(entry):
        entry.block = make(setting)
        entry.errors = check(entry.block, want, setting.gradients)
        if max(entry.errors) > _TOLERANCE[case.dtype]:
            entry.block, entry.note = None, f"wrong: {max(entry.errors):.1e} from float64"
    return entry


@contextmanager
def _out_if_failed(entry: _Entry) -> Iterator[None]:
    """Takes a rival that fails out of the race; an error of our own block is raised."""
    try:
        yield
    except LeftOut as reason:
        entry.block, entry.note = None, f"left out: {reason}"
    except Exception as error:
        if entry.ours:
            raise
        first_line = (str(error).strip() or "no message").splitlines()[0]
        entry.block, entry.note = None, f"failed: {type(error).__name__}: {first_line[:100]}"


def _first_pass(entries: list[_Entry], inputs: Inputs, case: _Case) -> None:
    """Measures memory in one pass, which is also the time of a contestant that is too slow for rounds on a CPU."""
    ours = None
    for entry in entries:
        with _out_if_failed(entry):
            if entry.block is None:
                continue
            began = case.watch.read()
            entry.memory = memory(entry.block, inputs)
            seconds = case.watch.read() - began
            ours = ours or seconds
            times, least = _HOPELESS
            if case.on_cpu and not entry.ours and seconds > max(times * ours, least):
                entry.block, entry.note = None, "one pass only: too slow"
                entry.seconds["accumulating"].append(seconds)


def _take_turns(entries: list[_Entry], inputs: Inputs, case: _Case) -> dict[str, list[float]]:
    """Runs the rounds after a warm-up; returns the seconds of the large products."""
    size = _PRODUCT[not case.on_cpu]
    a, b, out = torch.randn(3, size, size, device=case.device).to(DTYPES[case.dtype])
    passes = {entry.name: partial(_time_passes, entry, inputs, case.watch) for entry in entries}
    products = {
        f"one product {size} {kind}": partial(case.watch.time, partial(torch.mm, a, right, out=out))
        for kind, right in (("NN", b), ("NT", b.T))
    }
    seen: dict[str, list[Any]] = take_turns(
        {**passes, **products}, case.rounds, warm_up=1 if case.on_cpu else min(25, case.rounds)
    )
    for entry in entries:
        if entry.block is not None:
            entry.seconds = {kind: [turn[kind] for turn in seen[entry.name]] for kind in KINDS}
    return {name: seen[name] for name in products}


def _time_passes(entry: _Entry, inputs: Inputs, watch: Stopwatch) -> dict[str, float]:
    """Returns the seconds of each kind of pass, or nothing for a contestant that is out or fails."""
    with _out_if_failed(entry):
        if entry.block is not None:
            return {kind: time_pass(watch, entry.block, inputs, kind) for kind in KINDS}
    return {}


def _columns(name: str, role: str, case: _Case) -> Row:
    return {
        "case": f"{case.shape.name} {case.dtype} {case.tokens} {case.load}",
        "place": "cpu" if case.on_cpu else "gpu",
        "shape": case.shape.name,
        "dimensions": str(case.shape),
        "dtype": case.dtype,
        "tokens": case.tokens,
        "load": case.load,
        "role": role,
        "contestant": name,
    }


def _row(entry: _Entry, case: _Case) -> Row:
    row = _columns(entry.name, "ours" if entry.ours else "rival", case)
    best = min if case.on_cpu else statistics.median
    for kind, seconds in entry.seconds.items():
        row[f"{kind}_ms"] = 1000 * best(seconds) if seconds else None
        row[f"{kind}_median_ms"] = 1000 * statistics.median(seconds) if seconds else None
    together = row["accumulating_ms"]
    return row | {
        "tflops": case.shape.flops(case.tokens) / together / 1e9 if together else None,
        "peak_mib": entry.memory.peak / 2**20 if entry.memory else None,
        "saved_kib_per_token": entry.memory.saved / case.tokens / 2**10 if entry.memory else None,
        "output_error": entry.errors.output if entry.errors else None,
        "gradient_error": entry.errors.gradient if entry.errors else None,
        "error": max(entry.errors) if entry.errors else None,
        "note": entry.note,
    }


def _matmul_row(name: str, seconds: list[float], case: _Case) -> Row:
    size = int(name.split()[2])
    best = (min if case.on_cpu else statistics.median)(seconds)
    return _columns(name, "product", case) | {"forward_ms": 1000 * best, "tflops": 2 * size**3 / best / 1e12}


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Returns the ratios of our block, named `<place>.<shape>.<type>.`, each for the worst token count.

    - `vs_best_rival`: the time of the fastest rival over ours, forward and backward with accumulating gradients.
    - `fresh.vs_best_rival` and `forward.vs_best_rival`: the same for the other two kinds of passes.
    - `vs_module_list` and `vs_transformers`: against the module list alone, and against the fastest of `transformers` 5.
    - `tflops` and `share_of_matmul`: our rate, and its share of the faster large product's rate.
    - `<load>.vs_best_rival`: for every load. The other ratios are for the learned load, or else for the uniform one.
    """
    found: dict[str, float] = {}
    for place, shape, dtype in dict.fromkeys((row["place"], row["shape"], row["dtype"]) for row in rows):
        mine = [row for row in rows if (row["place"], row["shape"], row["dtype"]) == (place, shape, dtype)]
        by_load: dict[str, list[dict[str, float]]] = {}
        for case in dict.fromkeys(row["case"] for row in mine):
            table = [row for row in mine if row["case"] == case]
            by_load.setdefault(table[0]["load"], []).append(_ratios_of_case(table))
        headline = next((by_load[load] for load in ("learned", "uniform") if load in by_load), [])
        for name, value in _worst(headline).items():
            found[f"{place}.{shape}.{dtype}.{name}"] = value
        for load, cases in by_load.items():
            worst = _worst(cases)
            if "vs_best_rival" in worst:
                found[f"{place}.{shape}.{dtype}.{load}.vs_best_rival"] = worst["vs_best_rival"]
    return found


def _worst(cases: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the least of each ratio that all cases have."""
    names = [name for name in cases[0] if all(name in case for case in cases)] if cases else []
    return {name: min(case[name] for case in cases) for name in names}


def _ratios_of_case(table: Sequence[Row]) -> dict[str, float]:
    ours = next(row for row in table if row["role"] == "ours")
    if ours["accumulating_ms"] is None:
        return {}
    rivals = [row for row in table if row["role"] == "rival"]
    found: dict[str, float] = {}
    for kind, prefix in zip(("accumulating", "fresh", "forward"), ("", "fresh.", "forward.")):
        times = [row[f"{kind}_ms"] for row in rivals if row[f"{kind}_ms"] is not None]
        if times:
            found[f"{prefix}vs_best_rival"] = min(times) / ours[f"{kind}_ms"]
    for name, prefix in (("vs_module_list", "module list"), ("vs_transformers", "transformers ")):
        of = [row for row in rivals if row["contestant"].startswith(prefix)]
        times = [row["accumulating_ms"] for row in of if row["accumulating_ms"] is not None]
        if times:
            found[name] = min(times) / ours["accumulating_ms"]
    found["tflops"] = ours["tflops"]
    found["share_of_matmul"] = ours["tflops"] / max(row["tflops"] for row in table if row["role"] == "product")
    return found
