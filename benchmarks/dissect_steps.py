"""Measures where a rank spends the time of training steps, from `torch.profiler` on the CPU.

Forward hooks mark the kinds of modules, and regions of the program mark work on the state, collectives and messages. An
operation of the backward pass belongs to the module whose forward pass made its autograd node, which has the sequence
number of that operation. The rank's main thread is always in exactly one row: what other threads do beside it counts
where the main thread waits for it.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, record_function

from optimus.comm import Groups
from optimus.comm.groups import groups_of_mesh
from optimus.config import RunConfig
from optimus.model.units import units_of
from optimus.pipeline.schedule import Kind
from optimus.pipeline.staged import PipelineStages
from optimus.resolve.ranks import mesh_of
from optimus.step_context import (
    CLEARING,
    FETCHING,
    GATHERING,
    NORM,
    OFFLOADING,
    PASSES,
    REDUCTION,
    UPDATE,
    UPDATING,
)
from optimus.testing.steps import build, random_batch
from optimus.training.loss_scale import first_loss_scale
from optimus.training.malloc_trim import keep_freed_memory
from optimus.training.step import training_step

_STEP, _PART = "dissect: step", "dissect: part "
_NODE, _NO_NODE = "autograd::engine::evaluate_function: ", "torch::autograd::AccumulateGrad"


class Key(NamedTuple):
    """A part of a step, as in `optimus.plan.step.PartTime`."""

    part: str
    pass_: str
    work: str


REGIONS = {
    REDUCTION: Key("gradients", "step", "reduction"),
    NORM: Key("gradients", "step", "norm"),
    CLEARING: Key("gradients", "step", "clearing"),
    OFFLOADING: Key("gradients", "step", "copy to the host"),
    GATHERING: Key("parameters", "step", "gathering"),
    FETCHING: Key("parameters", "step", "fetching"),
    UPDATE: Key("optimizer", "step", "update"),
    UPDATING: Key("optimizer", "step", "update"),
    PASSES: Key("other", "step", "compute"),
}
WAITING = Key("pipeline", "step", "waiting")
OTHER = Key("other", "step", "compute")
_ACCUMULATION = Key("gradients", "step", "accumulation")
_ACTIONS = {str(kind) for kind in Kind}
_VOCABULARY = {  # passes with a shard of the vocabulary, outside modules
    Kind.EMBED: Key("embedding", "forward", "compute"),
    Kind.LOGITS: Key("head", "forward", "compute"),
    Kind.LOSS: Key("head", "forward", "compute"),
    Kind.EMBED_BACKWARD: Key("embedding", "backward", "compute"),
}


class Slice(NamedTuple):
    """An operation or a region of the profile. Times are in microseconds."""

    name: str
    start: float
    end: float
    thread: int
    number: int = -1  # sequence number of the autograd node that the operation makes or runs, or -1
    forward_thread: int = 0  # of a node: the thread that made it
    is_region: bool = False
    is_backward: bool = False


class Work(NamedTuple):
    """A row of a step, and the kind and mesh axes of the collective in which the rank waits, if any."""

    key: Key
    kind: str = ""
    axes: str = ""


class Step(NamedTuple):
    """A step of a rank: for each work the seconds of its pieces in order, and how often collectives begin or end."""

    pieces: Mapping[Work, Sequence[float]]
    calls: Mapping[Work, int]

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return sum(map(sum, self.pieces.values()))


class Measured(NamedTuple):
    """The measurements of one rank."""

    steps: Sequence[Step]
    plain_seconds: float  # of the fastest step without the profiler
    peak: int  # bytes by which the resident set grew
    kinds: Sequence[str]  # kinds of collectives of these steps, as the rank's recorder has them
    parts: Sequence[str]  # kinds of modules on this rank


def measure(config: RunConfig, steps: int, warm_up: int = 2, profiled: bool = True) -> Measured:
    """Trains on this rank, and measures `steps` steps without and, if `profiled`, as many with the profiler."""
    before = psutil.Process().memory_info().rss
    keep_freed_memory()
    groups = Groups(mesh_of(config, dist.get_world_size()))
    model, state = build(config, groups)
    state.initialize(config.train.seed, config.model.init_std)
    data, scale = groups.along("dp"), first_loss_scale(config)
    batch_BS = random_batch(config, 1)
    tokens_BS = batch_BS.chunk(data.size)[data.rank]
    of_building = groups.recorder.by_kind

    def step() -> float:
        dist.barrier()
        began = perf_counter()
        with record_function(_STEP):
            training_step(model, state, tokens_BS, config, state.steps + 1, loss_scale=scale)
        return perf_counter() - began

    for _ in range(warm_up):
        step()
    seconds = min(step() for _ in range(steps))
    found: Sequence[Step] = ()
    parts: list[str] = []
    if profiled:
        parts = mark(model)
        with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profile:
            for _ in range(steps):
                step()
            state.finish()  # otherwise pending updates would report to a stopped profiler
        found = steps_of(slices_of(profile), axes_of(groups))
    state.finish()
    peak = _peak() - before
    kinds = [kind for kind, waited in groups.recorder.by_kind.items() if waited > of_building.get(kind, 0.0)]
    return Measured(found, seconds, peak, sorted(kinds), parts)


def _peak() -> int:
    import resource
    import sys

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def mark(model: PipelineStages) -> list[str]:
    """Marks the modules of a rank's stages for the profiler. Returns the kinds of the marked modules."""
    blocks = [block for stage in model.stages.values() for block in stage.row]
    outside = [step for unit in model.model.units() for step in unit.steps]
    if model.config.is_adapted:  # the planner knows only whole blocks
        marked = [*(("block", block) for block in blocks), *outside]
    else:  # what a block does itself is the addition to the residual stream, which the planner counts with the norms
        inside = [step for block in blocks for unit in units_of(block) for step in unit.steps]
        marked = [*(("norm", block) for block in blocks), *inside, *outside]
    present = [(kind, module) for kind, module in marked if any(True for _ in module.parameters())]
    for kind, module in present:
        _mark(module, f"{_PART}{kind}")
    return sorted({kind for kind, _ in present})


def _mark(module: nn.Module, name: str) -> None:
    entered: list[Any] = []

    def before(*_: Any) -> None:
        entered.append(record_function(name).__enter__())

    def after(*_: Any) -> None:
        entered.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)  # a recomputation may end early, by an exception


def axes_of(groups: Groups) -> dict[str, str]:
    """Maps the ranks of each group of this rank, as in names of regions, to the group's mesh axes."""
    found: dict[str, str] = {}
    for planned in groups_of_mesh(groups.mesh):
        with suppress(RuntimeError):  # a group that the run has not made
            found.setdefault(groups.group_of(planned.partition).observer.name, planned.what)
    return found


def slices_of(profile: torch.profiler.profile) -> list[Slice]:
    """Returns the operations and regions of the host, by thread and time."""
    return [
        Slice(
            event.name,
            event.time_range.start,
            event.time_range.end,
            event.thread,
            event.sequence_nr,
            event.fwd_thread or 0,
            event.is_user_annotation,
            event.scope == 1,
        )
        for event in profile.events() or ()
        if event.device_type == torch.autograd.DeviceType.CPU
    ]


def steps_of(slices: Iterable[Slice], axes: Mapping[str, str]) -> list[Step]:
    """Returns the steps in a profile. Each moment of the main thread counts in the innermost slice that has a row.

    `axes` maps names of groups to mesh axes.
    """
    every = sorted(slices, key=lambda each: (each.start, -each.end))
    main = next((each.thread for each in every if each.name == _STEP), None)
    made: dict[tuple[int, int], str] = {}  # by thread and number of an autograd node: the part of the model
    # By name of an `autograd.Function`, some of whose nodes have no number: parts of the calls without a backward pass.
    functions = defaultdict[str, list[str]](list)
    found: list[Step] = []
    pieces, calls = defaultdict[Work, list[float]](list), Counter[Work]()
    stack: list[tuple[Slice, Work, str, str]] = []  # with the part of the model and the pass
    clock = 0.0

    def spend(until: float) -> None:
        nonlocal clock
        if stack:  # a piece of no length too, so that equal steps have equally many pieces
            pieces[stack[-1][1]].append(max(0.0, until - clock) / 1e6)
        clock = max(clock, until)

    def leave(until: float) -> None:
        while stack and stack[-1][0].end <= until:
            spend(stack[-1][0].end)
            if stack.pop()[0].name == _STEP:
                found.append(Step(dict(pieces), dict(calls)))
                pieces.clear()
                calls.clear()

    for each in every:
        if each.thread != main:
            continue
        leave(each.start)
        if each.name == _STEP:
            clock = each.start
        elif not stack:
            continue
        spend(each.start)
        work, part, pass_ = stack[-1][1:] if stack else (Work(OTHER), "other", "step")
        if each.name.startswith(_PART):
            part = each.name.removeprefix(_PART)
            pass_ = {"step": "forward", "backward": "recompute"}.get(pass_, pass_)
            work = Work(Key(part, pass_, "compute"))
        elif each.name.startswith(_NODE):
            name = each.name.removeprefix(_NODE).removesuffix("Backward")
            last = functions[name].pop() if functions[name] else "other"
            part, pass_ = made.get((each.forward_thread, each.number), last), "backward"
            work = Work(_ACCUMULATION if each.name.endswith(_NO_NODE) else Key(part, pass_, "compute"))
        elif each.is_region and each.name in REGIONS:
            work = Work(REGIONS[each.name])
        elif each.is_region and ", ranks " in each.name:
            kind, axis = _collective(each.name, axes)
            work = Work(_key_of(work.key, part, pass_, kind, axis), kind, axis)
            calls[work] += 1
        elif each.is_region and (action := each.name.partition(" of stage ")[0]) in _ACTIONS:
            kind_ = Kind(action)
            pass_ = "forward" if kind_ is Kind.FORWARD else "backward"
            part = "deferred" if kind_ is Kind.BACKWARD_WEIGHTS else "other"
            work = Work(_VOCABULARY.get(kind_, Key(part, pass_, "compute")))
        elif not each.is_region and not each.is_backward:
            if each.number >= 0:
                made[each.thread, each.number] = part
            if pass_ == "forward":
                functions[each.name].append(part)
        stack.append((each, work, part, pass_))
    leave(math.inf)
    return found


def _collective(name: str, axes: Mapping[str, str]) -> tuple[str, str]:
    what, _, ranks = name.rpartition(", ranks ")
    if " to " in ranks or "of a message" in what:
        return "message", "pp"
    return what, axes.get(ranks, f"ranks {ranks}")


def _key_of(around: Key, part: str, pass_: str, kind: str, axes: str) -> Key:
    """Returns the row of a collective: that of the work on the state, or of the module, in which the rank waits."""
    if kind == "message" or "pp" in axes.split(" x "):
        return around if around.part in ("gradients", "parameters") and around.work != "norm" else WAITING
    if around.pass_ == "step" and around != OTHER:
        return around
    if part == "other":
        return Key("losses", "step", "sums")
    axis = axes.split(" x ")[0]
    work = "tensor" if axis.startswith("tp") else "context" if axis == "cp" else "expert"
    return Key(part, pass_, work)
