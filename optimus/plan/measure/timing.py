"""Times matmuls, memory, attention, links, disks and collectives on one of the ranks that measure a machine.

Legend: matmuls [M, K] x [K, N].
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from optimus.comm import Group, Groups, PlannedGroups
from optimus.comm.algorithms import CollectiveKind
from optimus.kernels.attention import causal_attention
from optimus.kernels.matmul import Form, in_form, matmul
from optimus.mesh import Mesh, RankPartition
from optimus.mesh.strided import StridedGroup
from optimus.observe.machine import device_name, use_device
from optimus.plan.collectives import collective_seconds, transfer_seconds
from optimus.plan.machine import Machine
from optimus.plan.profile import Profile
from optimus.state.disk import PAGE, StateFile
from optimus.state.transfers import Transfers

Talk = CollectiveKind | Literal["shift"]
"""Kinds of measured collectives. In a `shift`, every rank sends to the next rank of the group."""

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FORMS: tuple[Form, ...] = (
    "NT",
    "NN",
    "TN",
)  # forward, gradients of input and weight
_LONG = 1.0  # seconds; after a longer first round, at most one more round runs
_COLD = {"cpu": 1 << 25}  # target bytes of the operands that calls use in turn
_COLD_ACCELERATOR = 1 << 28
_SETS = 64
_MIDDLE = 512  # rows, columns and inner size of a matmul of medium size
_WORD = 4  # bytes of an fp32 element, the type in collectives


@dataclass(frozen=True)
class Extent:
    """Shapes, sizes and durations of the measurements."""

    shapes: Sequence[tuple[int, int, int]]  # rows, columns and inner size of matmuls
    attention: Sequence[tuple[int, int, int, int]]  # sequences, tokens of a sequence, heads, size of a head
    memory: int  # bytes of a tensor in memory kernels and of a file; a copy between host and device has a quarter
    sizes: Sequence[int] = tuple(4096 * 4**i for i in range(8))  # bytes of collectives: 4 KiB to 64 MiB
    window: float = 0.05  # minimum seconds of the first round; a round times repeated calls
    rounds: int = 3  # maximum number of rounds per measurement

    @classmethod
    def for_device(cls, device: str) -> "Extent":
        """Returns smaller shapes and sizes for `cpu` than for accelerators."""
        shapes = [(n, n, n) for n in (16, 64, 128, 256, 512, 1024)]
        shapes += [(2048, 256, 256), (2048, 1024, 256), (2048, 256, 1024), (256, 1024, 2048)]
        shapes += [(8, 1024, 1024), (1024, 8, 1024), (1024, 1024, 8), (64, 512, 512), (512, 64, 512)]
        if device == "cpu":
            attention = [(4, 256, 8, 64), (2, 512, 8, 64), (1, 1024, 8, 64), (1, 1024, 4, 128), (1, 2048, 4, 64)]
            return cls(shapes, attention, memory=1 << 26)
        attention = [(8, 1024, 16, 64), (4, 2048, 16, 64), (4, 2048, 16, 128), (1, 8192, 16, 128)]
        return cls([(8 * m, 8 * n, 8 * k) for m, n, k in shapes], attention, memory=1 << 30)


class MatmulTime(NamedTuple):
    """A matmul [rows, inner] x [inner, columns], and its mean seconds over `_FORMS`."""

    rows: int
    columns: int
    inner: int
    precision: str
    seconds: float

    @property
    def what(self) -> tuple[str, str]:
        """Kind and size, in words."""
        return f"matmul {self.precision}", f"{self.rows}x{self.columns}x{self.inner}"

    def predicted(self, machine: Machine) -> float:
        """Returns the seconds that `machine` predicts."""
        return machine.matmul_seconds(self.rows, self.columns, self.inner, self.precision)


class Moved(NamedTuple):
    """A kernel that reads and writes `bytes` bytes in total. `bytes` is 0 for the tiny kernel."""

    name: str
    bytes: int
    seconds: float

    @property
    def what(self) -> tuple[str, str]:
        return ("memory", f"{self.name}, {self.bytes:,} bytes") if self.bytes else ("tiny kernel", self.name)

    def predicted(self, machine: Machine) -> float:
        return machine.memory_seconds(self.bytes)


class Attended(NamedTuple):
    """Causal attention in bf16, forward and backward."""

    sequences: int
    context: int
    heads: int
    head: int
    seconds: float

    @property
    def what(self) -> tuple[str, str]:
        return "attention", f"{self.sequences} x {self.context}, {self.heads} heads of {self.head}"

    def predicted(self, machine: Machine) -> float:
        tokens, sizes = self.sequences * self.context, (self.head, self.head)
        return sum(
            machine.attention_seconds(tokens, self.context, self.heads, sizes, "bf16", speed=Profile().attention)
        )


class Talked(NamedTuple):
    """A collective in all groups of one size and stride at once.

    `nbytes` is the argument of `collective_seconds`; for a shift, `nbytes` is the size of a message.
    """

    kind: Talk
    nbytes: int
    group: StridedGroup
    seconds: float

    @property
    def what(self) -> tuple[str, str]:
        return f"{self.kind} {self.group.stride}x{self.group.size}", f"{self.nbytes:,} bytes"

    def predicted(self, machine: Machine) -> float:
        if self.kind == "shift":
            return transfer_seconds(self.nbytes, self.group, machine)
        return collective_seconds(self.kind, self.nbytes, self.group, machine)


Observed = MatmulTime | Moved | Attended | Talked


@dataclass
class Observations:
    """Measurements, and the properties that the device reports. Sizes are in bytes, times in seconds."""

    ranks_per_node: int
    nodes: int
    device: str
    backend: str
    threads: int | None  # threads of a rank on a CPU; None on an accelerator
    cores: int  # cores of a rank; threads on a CPU
    memory: float  # memory of a rank
    host_memory: float  # host memory of a node
    products: list[MatmulTime] = field(default_factory=list)
    tiny: float = 0.0  # time of a kernel on 16 elements
    moved: list[Moved] = field(default_factory=list)
    link: float | None = None  # bytes/s between host and device; None on a CPU
    host_bandwidth: float | None = None  # bytes/s of a node's host memory; None on a CPU
    read: float | None = None  # bytes/s that a node reads from a disk; None on a CPU
    write: float | None = None  # bytes/s that a node writes to a disk; None on a CPU
    attended: list[Attended] = field(default_factory=list)
    alone: float = 1.0  # speedup of a rank while the other ranks wait
    overlap: float = 1.0  # time that an all-reduce and matmuls save together, relative to the shorter of the two
    talked: list[Talked] = field(default_factory=list)

    @property
    def kernels(self) -> list[Observed]:
        """The matmuls and the tiny kernel."""
        return [*self.products, Moved("16", 0, self.tiny)]


def observe_rank(ranks_per_node: int, extent: Extent | None) -> Observations:
    """Runs the measurements on this rank. All ranks must call this function, and get the same times."""
    device = use_device("auto", "the device", dist.get_rank() % ranks_per_node)
    if device.type == "cpu" and (threads := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        torch.set_num_threads(int(threads))
    extent = extent or Extent.for_device(device.type)
    clock, seen = Clock(device, extent), _itself(device, ranks_per_node)
    extent = replace(
        extent, memory=_fitting(extent.memory, seen), sizes=[_fitting(size, seen) for size in extent.sizes]
    )
    with torch.inference_mode():
        seen.products = list(_products(clock, extent, device))
        seen.tiny = _tiny(clock, device)
        seen.moved = list(_moved(clock, extent, device))
        seen.link = _link(clock, extent, device)
        if device.type != "cpu":
            seen.host_bandwidth = ranks_per_node * host_bandwidth(clock, extent.memory)
            seen.read, seen.write = (ranks_per_node * each for each in disk_rates(clock, extent.memory, Path.cwd()))
    seen.attended = list(_attended(clock, extent, device))
    if device.type == "cpu":
        seen.alone = _alone(clock, device)
    if dist.get_world_size() > 1:
        seen.overlap = _overlap(clock, device)
    seen.talked = list(_talked(clock, extent, device))
    return seen


class Clock:
    """Times calls that all ranks make at once."""

    def __init__(self, device: torch.device, extent: Extent) -> None:
        self._device, self._window, self._rounds = device, extent.window, extent.rounds

    def seconds(self, call: Callable[[], Any]) -> float:
        """Returns the mean seconds of a call in the fastest round; the slowest rank counts."""
        self._run(call, 1)
        repeats, took = 1, self._run(call, 1)
        while took < self._window:
            repeats = math.ceil(repeats * min(20.0, 1.2 * self._window / took))
            took = self._run(call, repeats)
        more = min(1, self._rounds - 1) if took > _LONG else self._rounds - 1
        return min([took, *(self._run(call, repeats) for _ in range(more))]) / repeats

    def _run(self, call: Callable[[], Any], repeats: int) -> float:
        dist.barrier()
        self._finish()
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        self._finish()
        slowest = torch.tensor(time.perf_counter() - began, device=self._device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    def _finish(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()


def group_forms(ranks: int) -> list[StridedGroup]:
    """Returns every size and stride of groups that divide all ranks evenly."""
    return [
        StridedGroup(size, stride)
        for size in range(2, ranks + 1)
        for stride in range(1, ranks // size + 1)
        if ranks % (size * stride) == 0
    ]


def groups_of(form: StridedGroup, ranks: int) -> list[range]:
    """Returns the ranks of each group with the size and stride of `form`."""
    block = form.size * form.stride
    return [
        range(first + inner, first + block, form.stride)
        for first in range(0, ranks, block)
        for inner in range(form.stride)
    ]


# ---- The device itself ----


def _itself(device: torch.device, ranks_per_node: int) -> Observations:
    host = float(psutil.virtual_memory().total)
    threads = torch.get_num_threads() if device.type == "cpu" else None
    if threads is not None:
        memory, cores = host / ranks_per_node, threads
    else:
        module = torch.get_device_module(device)
        properties = module.get_device_properties(device)
        memory = float(module.mem_get_info(device)[1])
        cores = int(getattr(properties, "multi_processor_count", 0) or getattr(properties, "max_compute_units", 64))
    nodes = dist.get_world_size() // ranks_per_node
    return Observations(ranks_per_node, nodes, device_name(device), dist.get_backend(), threads, cores, memory, host)


def _fitting(size: int, seen: Observations) -> int:
    return min(size, int(min(seen.memory, seen.host_memory / seen.ranks_per_node) / 16))


# ---- Matmuls, memory, links, disks and attention ----


def _products(clock: Clock, extent: Extent, device: torch.device) -> Iterator[MatmulTime]:
    for precision in _precisions(clock, device):
        for m, n, k in extent.shapes:
            seconds = clock.seconds(_product(m, n, k, _TYPES[precision], device))
            yield MatmulTime(m, n, k, precision, seconds / len(_FORMS))


def _precisions(clock: Clock, device: torch.device) -> list[str]:
    n, names = 256, ["fp32", "bf16"]
    wide, half = (clock.seconds(_product(n, n, n, _TYPES[name], device)) for name in ("fp32", "fp16"))
    return [*names, "fp16"] if half <= wide else names


def _product(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    held = _COLD.get(device.type, _COLD_ACCELERATOR)
    number = min(_SETS, max(1, held // ((m * k + k * n) * dtype.itemsize)))
    pairs = [
        (torch.randn(m, k, device=device).to(dtype), torch.randn(k, n, device=device).to(dtype)) for _ in range(number)
    ]
    turns = cycle([[in_form(form, a_MK, b_KN) for form in _FORMS] for a_MK, b_KN in pairs])

    def call() -> None:
        for a_MK, b_KN in next(turns):
            matmul(a_MK, b_KN)

    return call


def _tiny(clock: Clock, device: torch.device) -> float:
    x = torch.ones(16, device=device)
    return clock.seconds(lambda: x.add_(x))


def _moved(clock: Clock, extent: Extent, device: torch.device) -> Iterator[Moved]:
    for dtype in (torch.float32, torch.bfloat16):
        n = extent.memory // dtype.itemsize
        x, y, z = (torch.ones(n, dtype=dtype, device=device) for _ in range(3))
        name = str(dtype).removeprefix("torch.")
        yield Moved(f"copy {name}", 2 * x.nbytes, clock.seconds(lambda y=y, x=x: y.copy_(x)))  # type: ignore[misc]
        seconds = clock.seconds(lambda x=x, y=y, z=z: torch.add(x, y, out=z))  # type: ignore[misc]
        yield Moved(f"add {name}", 3 * x.nbytes, seconds)


def _link(clock: Clock, extent: Extent, device: torch.device) -> float | None:
    if device.type == "cpu":
        return None
    x = torch.ones(extent.memory // 4, dtype=torch.uint8, device=device)
    host = torch.empty(x.shape, dtype=torch.uint8, pin_memory=True)
    ways = [clock.seconds(lambda: host.copy_(x, non_blocking=True)), clock.seconds(lambda: x.copy_(host))]
    return 2 * x.nbytes / sum(ways)


def host_bandwidth(clock: Clock, size: int) -> float:
    """Returns a rank's share of the host memory bandwidth, in bytes/s."""
    x, y, z = (torch.ones(size // 4) for _ in range(3))
    return 3 * x.nbytes / clock.seconds(lambda: torch.add(x, y, out=z))


def disk_rates(clock: Clock, size: int, folder: Path) -> tuple[float, float]:
    """Returns (read rate, write rate) of one rank for a file in `folder`, in bytes/s."""
    file = StateFile(folder, Transfers(torch.device("cpu")))
    size = -(-size // PAGE) * PAGE
    file.assign(size)
    file.reserve()
    buffer = file.take()
    write = size / clock.seconds(lambda: file.write_async(buffer, 0).wait())
    return size / clock.seconds(lambda: file.read_async(buffer, 0).wait()), write


def _attended(clock: Clock, extent: Extent, device: torch.device) -> Iterator[Attended]:
    for shape in extent.attention:
        leaves = [torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
        out_grad = torch.randn(shape, device=device, dtype=torch.bfloat16)

        def call(leaves: list[Tensor] = leaves, out_grad: Tensor = out_grad) -> None:
            q, k, v = leaves
            torch.autograd.grad(causal_attention(q, k, v), leaves, out_grad)

        yield Attended(*shape, clock.seconds(call))


# ---- Shared cores and overlap ----


def _alone(clock: Clock, device: torch.device) -> float:
    call = _product(_MIDDLE, _MIDDLE, _MIDDLE, torch.float32, device)
    together, alone = clock.seconds(call), clock.seconds(call if dist.get_rank() == 0 else lambda: None)
    return max(1.0, together / alone)


def _overlap(clock: Clock, device: torch.device) -> float:
    """Times an all-reduce and matmuls that take at least as long, alone and together.

    Returns the time that they save together, relative to the shorter of the two.
    """
    group, x = Groups(Mesh(dp=dist.get_world_size())).world, torch.ones(_MIDDLE * _MIDDLE * 4, device=device)
    call = _product(_MIDDLE, _MIDDLE, _MIDDLE, torch.float32, device)
    moving, once = clock.seconds(lambda: group.all_reduce(x)), clock.seconds(call)
    times = math.ceil(moving / once)

    def compute() -> None:
        for _ in range(times):
            call()

    def both() -> None:
        handle = group.all_reduce_async(x)
        compute()
        handle.wait()

    computing = clock.seconds(compute)
    return min(1.0, max(0.0, (moving + computing - clock.seconds(both)) / min(moving, computing)))


# ---- Collectives ----


def _talked(clock: Clock, extent: Extent, device: torch.device) -> Iterator[Talked]:
    ranks = dist.get_world_size()
    planned = {
        form: PlannedGroups("rings", RankPartition.from_groups(groups_of(form, ranks))) for form in group_forms(ranks)
    }
    groups = Groups(Mesh(dp=ranks), planned=planned.values())
    kinds: list[Talk] = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
    for form, groups_of_form in planned.items():
        group = groups.group_of(groups_of_form.partition)
        for kind in [*kinds, "shift"] if form.size == 2 else kinds:
            for size in extent.sizes:
                elements = -(-size // (_WORD * form.size)) * form.size
                x = torch.ones(elements, device=device)
                seconds = clock.seconds(collective_call(kind, x, group))
                yield Talked(kind, elements * _WORD, form, seconds)


def collective_call(kind: Talk, x: Tensor, group: Group) -> Callable[[], Any]:
    """Returns a function that runs the collective on `x`. For an all-gather, `x` is the output."""
    if kind == "all_reduce":
        return lambda: group.all_reduce(x)
    if kind == "all_to_all":
        rows, each = x.view(group.size, -1), [1] * group.size
        return lambda: group.all_to_all(rows, each, each)
    if kind == "shift":
        out = torch.empty_like(x)
        return lambda: group.shift_async(x, out).wait()
    part = x.new_ones(x.numel() // group.size)
    return partial(group.all_gather if kind == "all_gather" else group.reduce_scatter, x, part)
