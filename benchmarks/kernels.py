"""Every operation of the training step against its plain implementation, and its share of the step.

Each operation is first checked against its float64 reference, on few tokens and at the layer's real widths; an
incorrect one is not timed. Then forward and backward passes are timed with accumulating gradients, as in training.
Contestants take turns, and the fastest round counts. Plain implementations several times slower than another are left
out. Times on a CPU are process seconds of one thread.

A kernel's share is its time, multiplied by its calls in a step, over the sum of all kernels: before, with every plain
implementation, and after, with ours. Shares exclude sums of tensors and copies between the operations.
"""

import gc
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from typer import Option

from benchmarks import tiles
from benchmarks.harness import (
    DTYPES,
    Device,
    Result,
    Rounds,
    Row,
    Stopwatch,
    cpu_threads,
    preset,
    relative_error,
    take_turns,
)  # fmt: skip
from benchmarks.kernel_cases import Case, Function, Sizes, cases
from benchmarks.training import SHORT, decided
from optimus.errors import UserError
from optimus.kernels.gradient_buffer import TensorBuffer
from optimus.observe.machine import find_device

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # relative, in the Frobenius norm
_CHECK_TOKENS, _CHECK_EXPERTS = 64, 16  # float64 is slow; these numbers suffice for the check
_SAMPLE = 0.02  # least seconds of a timed sample
_WARM_UP = 2  # passes of each contestant before the timed ones
_OUT_OF_THE_RACE = 3.0  # times the fastest plain implementation in the warm-up: some take minutes a pass


def run(
    model: Annotated[str, Option(help="Preset that gives the sizes of the layers.")] = "mula-7b-a1b",
    tokens: Annotated[int, Option(help="Tokens of a microbatch.")] = 1024,
    context: Annotated[int, Option(help="Tokens of a sequence.")] = 1024,
    microbatches: Annotated[int, Option(help="Microbatches of a training step.")] = 4,
    dtype: Annotated[
        Literal["auto", "bf16", "fp32"],
        Option(help="Type of activations and weights; auto takes that of a run on this machine."),
    ] = "auto",
    device: Device = "auto",
    rounds: Rounds = 5,
    tune: Annotated[
        bool, Option("--tune", help="Only find the fastest tiles of the experts' products on an accelerator.")
    ] = False,
) -> Result:
    """Returns a row for each kernel, and ratios. A step has `microbatches` and one update of the optimizer.

    Ratios begin with `cpu` or `gpu`: `cpu.<kernel>.vs_plain` is the time of the fastest plain implementation over ours,
    and `cpu.step.vs_plain` the ratio of the sums over a step. Raises `UserError` if the sequences do not divide the
    tokens, and for an unknown device or preset.
    """
    chosen = DTYPES[SHORT[decided("auto", device)] if dtype == "auto" else dtype]
    if tune:
        found = tiles.run(model=model, tokens=tokens, dtype=chosen, device=device)
        return Result(found, name="kernels --tune")
    if tokens % context:
        raise UserError(f"--tokens {tokens} is no multiple of --context {context}: change either")
    sizes = Sizes(preset(model), tokens, context, chosen, find_device(device, "--device"), {})
    with cpu_threads(1 if sizes.device.type == "cpu" else torch.get_num_threads()):
        errors = check(sizes)
        rows = []
        for make in cases(sizes):
            torch.manual_seed(0)
            case = make()
            rows.append(row_of(case, errors.get(case.kernel), sizes, rounds))
            del case
            gc.collect()
    for row in rows:
        row["calls_per_step"] *= 1 if row["kernel"] in ("gradient_norm", "adamw") else microbatches
    return Result(rows, _shares_and_ratios(rows, "cpu" if sizes.device.type == "cpu" else "gpu"))


def check(sizes: Sizes) -> dict[str, float]:
    """Returns each kernel's largest relative error of outputs and gradients against float64."""
    model = sizes.model
    if model.experts is not None and model.experts_per_token is not None:
        fewer = max(model.experts_per_token, min(model.experts, _CHECK_EXPERTS))
        model = model.model_copy(update={"experts": fewer})
    small = min(sizes.context, _CHECK_TOKENS)
    few = sizes._replace(model=model, tokens=small, context=small)
    errors = {}
    for make in cases(few):
        torch.manual_seed(0)
        case = make()
        if case.reference is not None:
            errors[case.kernel] = error(case.ours, case)
    return errors


def error(function: Function, case: Case) -> float:
    """Returns the largest relative error of an implementation of `case` over its outputs and gradients."""
    assert case.reference is not None
    found, expected = (
        _results(way, [_leaf(x, wide) for x in case.inputs], case.in_place)
        for way, wide in ((function, False), (case.reference, True))
    )
    return relative_error(found, expected)


def _leaf(x: Tensor, wide: bool) -> Tensor:
    copy = x.detach().to(torch.float64 if wide else x.dtype, copy=True)
    return nn.Parameter(copy) if isinstance(x, nn.Parameter) else copy.requires_grad_(x.requires_grad)


def _results(way: Function, leaves: list[Tensor], in_place: bool) -> Sequence[Tensor]:
    outputs = way(*leaves)
    if in_place:
        return outputs
    return [*outputs, *torch.autograd.grad(outputs, leaves, [_output_gradient(y) for y in outputs])]


def _output_gradient(y: Tensor) -> Tensor:
    return torch.linspace(-1, 2, y.numel(), device=y.device, dtype=torch.float64).view_as(y).to(y.dtype)


def row_of(case: Case, relative_error: float | None, sizes: Sizes, rounds: int) -> Row:
    row: Row = {
        "kernel": case.kernel,
        "shape": case.shape,
        "dtype": str(sizes.dtype).removeprefix("torch."),
        "calls_per_step": case.calls,
        "relative_error": relative_error,
    }
    if relative_error is not None and not relative_error <= TOLERANCE[sizes.dtype]:
        return row | {"plain": "our result is wrong, so it is not timed"}
    sizes.buffers.clear()
    for parameter in case.inputs:
        if isinstance(parameter, nn.Parameter):
            sizes.buffers[parameter] = TensorBuffer(torch.zeros_like(parameter))
    ways = {"ours": case.ours, **case.plain}
    seconds = _seconds(case, ways, sizes.device, rounds)
    plain = min(seconds.keys() & case.plain.keys(), key=seconds.__getitem__, default="ours")
    ours = seconds["ours"]
    row |= {
        "plain": plain if plain != "ours" else "does not fit" if case.plain else "the same",
        "plain_ms": 1e3 * seconds[plain],
        "ours_ms": 1e3 * ours,
        "vs_plain": seconds[plain] / ours if plain != "ours" else None,
        "tflops": case.flops / ours / 1e12 or None,
        "gb_per_s": case.bytes / ours / 1e9 or None,
    }
    if not case.in_place:
        row |= {
            f"{name}_saved_mib": saved_bytes(ways[way], case) / 2**20
            for name, way in (("plain", plain), ("ours", "ours"))
        }
    return row


def _seconds(case: Case, ways: dict[str, Function], device: torch.device, rounds: int) -> dict[str, float]:
    """Returns the seconds of one forward and backward pass of each implementation, in the fastest round."""
    gradients = None
    if not case.in_place:
        gradients = [_output_gradient(y.detach()) for y in case.ours(*case.inputs)]
    passes = {name: _pass(case, way, gradients) for name, way in ways.items()}
    watch = Stopwatch(device)
    warm = {}
    for name, run in passes.items():
        try:
            warm[name] = min(watch.time(run) for _ in range(_WARM_UP))
        except RuntimeError as error:  # too little memory, or an unsupported type, as float32 for grouped_mm
            if name == "ours":
                raise
            first = str(error).partition("\n")[0] or type(error).__name__
            print(f"{case.kernel}: {name} is left out: {first}", file=sys.stderr)
    fastest = min((warm[name] for name in warm.keys() & case.plain.keys()), default=0.0)
    turns = {
        name: partial(watch.time, passes[name], 1 + int(_SAMPLE / max(seconds, 1e-6)))
        for name, seconds in warm.items()
        if name == "ours" or seconds <= _OUT_OF_THE_RACE * fastest
    }
    return {name: min(times) for name, times in take_turns(turns, rounds).items()}


def _pass(case: Case, way: Function, gradients: list[Tensor] | None) -> Callable[[], None]:
    """Returns a forward and backward pass that keeps the parameters' gradients and drops those of activations."""

    def run() -> None:
        outputs = way(*case.inputs)
        if gradients is None:
            return
        torch.autograd.backward(outputs, gradients)
        for x in case.inputs:
            if not isinstance(x, nn.Parameter):
                x.grad = None

    return run


def saved_bytes(way: Function, case: Case) -> int:
    """Returns the bytes that the forward pass saves for the backward pass, with its inputs and without parameters."""
    parameters = {x.untyped_storage().data_ptr() for x in case.inputs if isinstance(x, nn.Parameter)}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = way(*case.inputs)
    del outputs
    return sum(kept.values())


def _shares_and_ratios(rows: list[Row], device: str) -> dict[str, float]:
    """Adds every kernel's share of the step to the rows, and returns the ratios."""
    timed = [row for row in rows if "ours_ms" in row]
    totals = {}
    for way, when in (("plain", "before"), ("ours", "after")):
        totals[way] = sum(row["calls_per_step"] * row[f"{way}_ms"] for row in timed)
        for row in timed:
            row[f"percent_{when}"] = 100 * row["calls_per_step"] * row[f"{way}_ms"] / totals[way]
    ratios = {f"{device}.{row['kernel']}.vs_plain": row["vs_plain"] for row in timed if row["vs_plain"] is not None}
    return ratios | {f"{device}.step.vs_plain": totals["plain"] / totals["ours"]}


def shares(rows: list[Row]) -> list[Row]:
    """Returns the columns of `rows` with the shares of a step, the largest share first."""
    columns = ("kernel", "calls_per_step", "percent_before", "percent_after", "vs_plain")
    timed = sorted((row for row in rows if "ours_ms" in row), key=lambda row: -row["percent_before"])
    return [{column: row[column] for column in columns} for row in timed]
