"""Describes machines (arithmetic, memory, links and disks), and estimates the seconds of matmuls and attention.

Units are bytes, seconds and floating point operations. A link's bandwidth counts one direction.
"""

import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from optimus.comm.algorithms import Measured
from optimus.config.load import read_section
from optimus.disk import user_path
from optimus.errors import UserError, nearest
from optimus.plugins import Table
from optimus.section import Section

_FOLDER = Path(__file__).parent / "machines"
_ATTENTION_BACKWARD = 2.5  # FLOPs of the backward pass of fused attention, relative to the forward pass
_RING = re.compile(r"[1-9][0-9]*x[1-9][0-9]*")  # a key of `Node.groups`
_STEP = 32  # attention kernels pad the columns of a head to a multiple of this number


class Arithmetic(Section):
    """Rates of matmuls in one precision."""

    peak: float = Field(gt=0, description="The vendor's figure, FLOP/s; utilisation is a share of this peak.")
    achieved: float = Field(gt=0, description="The best measured rate of matmuls of large matrices, FLOP/s.")
    sustained: float = Field(1.0, gt=0, le=1)
    """Share of `achieved` that consecutive matmuls sustain at the power limit."""

    @property
    def sustained_rate(self) -> float:
        """FLOP/s of large consecutive matmuls."""
        return self.achieved * self.sustained

    @model_validator(mode="after")
    def _order(self) -> "Arithmetic":
        if self.achieved > self.peak:
            raise ValueError(f"achieved {self.achieved:g} is above peak {self.peak:g}")
        return self


class Matmul(Section):
    """Efficiency of matmuls of small matrices."""

    tile: int = Field(gt=0, description="Rows and columns of the result that one core computes at a time.")
    depth: int = Field(ge=0, description="Beginning and ending a tile takes as long as this number of inner elements.")


class Pace(Section):
    """Measured costs of one kind of collective."""

    share: float = Field(1.0, gt=0, description="Share of a ring's bandwidth that the collective reaches.")
    start: float = Field(0.0, ge=0, description="Seconds in addition to the steps.")
    step: float = Field(ge=0, description="Seconds of each step, even with little data.")


@cache
def _pace(latency: float) -> Pace:
    return Pace(step=latency)


class Node(Section):
    """Links between the ranks of a node."""

    bandwidth: float = Field(gt=0, description="Bandwidth of a rank to its neighbours in a ring, bytes/s.")
    latency: float = Field(ge=0, description="Latency of a message, seconds.")
    groups: dict[str, float] = Field({})
    """Measured bandwidth of simultaneous rings by 'G0xG1': G1 ranks, each G0 after the previous rank (the dissertation
    on AxoNN, section 5.1.2, case 1). Any other ring has `bandwidth`."""
    paces: dict[Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift"], Pace] = Field({})
    """Measured costs of kinds of collectives. A shift is a message to the next rank."""

    def nearest(self, stride: int) -> list[int]:
        """Returns the sizes of groups with `stride` whose rings are faster than `bandwidth`, in ascending order."""
        keys = (key.split("x") for key, bandwidth in self.groups.items() if bandwidth > self.bandwidth)
        return sorted(int(size) for apart, size in keys if int(apart) == stride)

    def pace(self, kind: str) -> Pace:
        """Returns the costs of a kind of collective; the default is the node's latency for each step."""
        return self.paces.get(kind) or _pace(self.latency)  # type: ignore[call-overload]

    @model_validator(mode="after")
    def _keys(self) -> "Node":
        for key in self.groups:
            if not _RING.fullmatch(key):
                raise ValueError(f"groups has the key '{key}': write 'G0xG1' with two numbers, such as '1x4'")
        return self


class Protocol(Section):
    """Measured costs of steps in which all ranks of a node send to other nodes at once."""

    step: float = Field(ge=0, description="Seconds of a step, even with little data.")
    bandwidth: float = Field(gt=0, description="Bandwidth of a node, bytes/s.")


class Library(Section):
    """Measured rings of a vendor's library (NCCL, RCCL) over all ranks of several nodes."""

    protocols: list[Protocol] = Field(min_length=1)
    """Protocols from which the library chooses the fastest, such as NCCL's LL and Simple."""
    crowded: list[Protocol] = Field([])
    """Protocols on more than `few_nodes` nodes (PCCL, arXiv 2504.18658 v2)."""
    few_nodes: int | None = Field(None, gt=0, description="None: all nodes use `protocols`.")

    def on(self, nodes: int) -> list[Protocol]:
        """Returns the protocols on `nodes` nodes."""
        return self.protocols if self.few_nodes is None or nodes <= self.few_nodes else self.crowded

    @model_validator(mode="after")
    def _both(self) -> "Library":
        if bool(self.crowded) != (self.few_nodes is not None):
            raise ValueError(
                "crowded (the protocols on more than few_nodes nodes) and few_nodes need each other: give both or neither"
            )
        return self


class Network(Section):
    """Links between nodes."""

    rings: int = Field(1, gt=0, description="Number of concurrent rings that use all adapters of a node.")
    bandwidth: float = Field(gt=0)
    """Bandwidth that collectives reach between a node and other nodes, over all adapters, bytes/s."""
    latency: float = Field(ge=0, description="Latency of a message, seconds.")
    group_nodes: int | None = Field(None, gt=0, description="Number of neighbouring nodes with the full bandwidth.")
    taper: float = Field(1.0, gt=0, le=1, description="Share of the bandwidth between more distant nodes.")
    library: Library | None = None
    """Rings of the vendor's library (`profile.collectives: library`)."""
    doubling: Protocol | None = None
    """Rounds of recursive doubling between nodes (`profile.collectives: pccl`)."""
    links: list[list[float]] | None = None
    """Matrix of the bandwidth between each pair of nodes, over all adapters, bytes/s. The matrix replaces bandwidth,
    group_nodes and taper."""

    @model_validator(mode="after")
    def _matrix(self) -> "Network":
        for number, row in enumerate(self.links or ()):
            others = [value for other, value in enumerate(row) if other != number]
            if len(row) != len(self.links or ()) or not all(0 < value < math.inf for value in others):
                raise ValueError(
                    f"links, row {number + 1}: give as many columns as rows, and a number above 0 off the diagonal"
                )
        return self


class Communicator(Section):
    """Memory that a communicator takes on each rank, modelled on NCCL.

    Each channel has a buffer for each protocol and each connected peer of a ring (NVIDIA's answers in NCCL's issues
    864, 986 and 1450).
    """

    buffer: float = Field(2.0**22, ge=0, description="Bytes of a buffer (NCCL_BUFFSIZE).")
    channels: int = Field(16, gt=0, description="Number of channels, which NCCL logs; 16 on two nodes of 8 GPUs.")
    protocols: int = Field(3, gt=0, description="Number of protocols with separate buffers: LL, LL128, Simple.")

    def memory(self, ranks: int) -> float:
        """Returns the bytes that a connected communicator of `ranks` ranks takes on each rank."""
        return min(2, ranks - 1) * self.channels * self.protocols * self.buffer


class Host(Section):
    """Memory, links and disks of a node besides its accelerators."""

    memory: float = Field(gt=0, description="Host memory of a node, bytes.")
    shared: bool = False
    """True if ranks compute on the host's CPUs, in the host's memory."""
    link: float = Field(
        gt=0, description="Link between a rank and its host while all ranks of the node use theirs, bytes/s each way."
    )
    bandwidth: float | None = Field(None, gt=0)
    """Bandwidth of a node's host memory, bytes/s. None: unknown, and the planner proposes no offloading."""
    read: float | None = Field(None, gt=0, description="Read rate of a node's own disks, bytes/s; None: no disks.")
    write: float | None = Field(None, gt=0, description="Write rate of these disks, bytes/s.")
    storage: float = Field(1e9, gt=0)
    """Rate at which each node writes to the file system while all nodes write, bytes/s; the default is a guess."""


class Machine(Section):
    """Nodes of one kind, and the network between the nodes."""

    name: str = Field(description="Name of the machine in tables.")
    source: str = Field(description="Source of the figures.")
    ranks_per_node: int = Field(
        gt=0, description="Ranks of a node: one for each accelerator, or for each part of one that works by itself."
    )
    memory: float = Field(gt=0, description="Memory of a rank, bytes.")
    memory_bandwidth: float = Field(gt=0, description="Memory bandwidth of a rank that plain kernels reach, bytes/s.")
    cores: int = Field(gt=0, description="Units of a rank that compute tiles in parallel.")
    arithmetic: dict[str, Arithmetic] = Field(description="Rates by precision: bf16, fp16, fp32, tf32, fp8, fp4.")
    matmul: Matmul
    attention: float = Field(gt=0, le=1)
    """Share of the peak in 16 bits that the best fused attention approaches with long sequences."""
    attention_before: float | None = Field(None, gt=0, le=1)
    """Share of the peak in 16 bits for kernels of the previous generation; None: the same as `attention`."""
    attention_half: float = Field(
        480, ge=0, description="Length of a sequence with which attention reaches half of that share, tokens."
    )
    kernel_latency: float = Field(ge=0, description="Time from one kernel to the next, seconds.")
    alone: float = Field(1.0, ge=1)
    """Speedup of a rank while the other ranks of its node are idle, for ranks that share cores."""
    overlap: float = Field(1.0, ge=0, le=1)
    """Share of computation that transfers can overlap; 0 if the same cores compute and move data."""
    node: Node
    network: Network
    host: Host
    communicator: Communicator = Communicator()
    collectives: Measured | None = None
    """Measured seconds of each algorithm for collectives (`optimus bench collectives --write`)."""

    @field_validator("arithmetic")
    @classmethod
    def _precisions(cls, arithmetic: dict[str, Arithmetic]) -> dict[str, Arithmetic]:
        if unknown := [name for name in arithmetic if name not in _BYTES]:
            raise ValueError(f"the precision '{unknown[0]}' is not known; {nearest(unknown[0], _BYTES)}")
        return arithmetic

    def rates(self, precision: str) -> Arithmetic:
        """Returns the rates of a precision; a missing 16-bit type has the rates of the other 16-bit type.

        Raises `UserError` for a precision without rates.
        """
        for name in (precision, {"bf16": "fp16", "fp16": "bf16"}.get(precision, "")):
            if name in self.arithmetic:
                return self.arithmetic[name]
        raise UserError(f"machine {self.name} has no {precision} arithmetic; it has {', '.join(self.arithmetic)}")

    def matmul_seconds(
        self, rows: float, columns: float, inner: float, precision: str, count: float = 1, *, units: float = 1.0
    ) -> float:
        """Returns the seconds of a batch of `count` matmuls [rows, inner] x [inner, columns].

        `units` is the share of the matrix units' rate that the alignment of the matrices allows.
        """
        rate, tile = self.rates(precision).sustained_rate, self.matmul.tile
        without = self.rates("fp32").achieved if "fp32" in self.arithmetic else rate
        rate = max(units * rate, min(rate, without))
        tiles = count * max(1.0, rows / tile) * max(1.0, columns / tile)
        waves = tiles / self.cores + 0.5
        compute = waves * self.cores * tile * tile * 2 * (inner + self.matmul.depth) / rate
        moved = count * (rows * inner + inner * columns + rows * columns) * _BYTES[precision]
        return max(compute, moved / self.memory_bandwidth) + self.kernel_latency

    def attention_seconds(
        self,
        tokens: float,
        context: int,
        heads: float,
        sizes: tuple[int, int],
        precision: str,
        *,
        window: int | None = None,
        ranks: int = 1,
        speed: float = 1.0,
    ) -> tuple[float, float]:
        """Returns (seconds of the forward pass, seconds of the backward pass) of fused causal attention.

        A rank has `tokens` tokens, and `ranks` ranks divide each sequence of `context` tokens. `sizes` are the columns
        of a head's queries and values. `speed` is the kernel's speed relative to the machine's best. With `window`, a
        token attends to at most `window` tokens.
        """
        query, value = sizes
        flops = 2 * tokens * context * heads * (query + value)
        seen = min(window or context, context) / context
        half = seen - seen * seen / 2  # share of the square of scores that is not masked
        share = self.attention * context / ranks / (context / ranks + self.attention_half)
        head = value / (-(-value // _STEP) * _STEP)  # share of the best rate that padding leaves
        rate = self.rates(precision).peak * share * speed * head
        passes = half * flops / rate, _ATTENTION_BACKWARD * half * flops / rate
        return passes[0] + self.kernel_latency, passes[1] + self.kernel_latency

    def memory_seconds(self, moved: float, kernels: float = 1) -> float:
        """Returns the seconds of `kernels` kernels that together read and write `moved` bytes."""
        return moved / self.memory_bandwidth + kernels * self.kernel_latency


_BYTES = {"fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp4": 0.5}


@dataclass(frozen=True)
class MachineRow:
    """The name of a machine and the path of its file."""

    name: str
    path: Path


MACHINES = Table(
    "machine", MachineRow, lambda: {path.stem: MachineRow(path.stem, path) for path in sorted(_FOLDER.glob("*.yaml"))}
)


def machine_names() -> list[str]:
    """Returns the names of the machines that come with the library and with plugins."""
    return sorted(MACHINES)


def load_machine(name: str) -> Machine:
    """Loads a machine by its name, or by the path of a .yaml or .yml file.

    Raises `UserError` for an unknown name or an invalid file.
    """
    path = user_path(name)
    if path.suffix in (".yaml", ".yml"):
        return _read(path)
    if name not in MACHINES:
        raise UserError(
            f"machine '{name}' is not known; {nearest(name, machine_names())} Or name a machine file, which "
            "`optimus bench machine` writes"
        )
    return _known(MACHINES[name].path)


def _read(path: Path) -> Machine:
    machine = read_section(path, Machine, "machine file")
    _check_units(machine, path)
    return machine


_known = cache(_read)


def _check_units(machine: Machine, path: Path) -> None:
    rates = {f"arithmetic.{kind}.peak": each.peak for kind, each in machine.arithmetic.items()}
    host, network = machine.host, machine.network
    moved = {
        "memory_bandwidth": machine.memory_bandwidth,
        "node.bandwidth": machine.node.bandwidth,
        "network.bandwidth": network.bandwidth,
        "host.link": host.link,
        **{f"host.{name}": getattr(host, name) for name in ("bandwidth", "read", "write", "storage")},
    }
    held = {"memory": machine.memory, "host.memory": host.memory}
    waited = {
        "kernel_latency": machine.kernel_latency,
        "node.latency": machine.node.latency,
        "network.latency": network.latency,
    }
    wrong = [(key, value, "FLOP/s: 989 TFLOP/s are 989e12") for key, value in rates.items() if value < 1e7]
    wrong += [(key, value, "bytes/s: 400 GB/s are 400e9") for key, value in moved.items() if (value or 1e9) < 1e5]
    wrong += [(key, value, "bytes: 80 GB are 80e9") for key, value in held.items() if value < 1e6]
    wrong += [(key, value, "seconds: 5 microseconds are 5e-6") for key, value in waited.items() if value > 2]
    if wrong:
        said = "; ".join(f"{key} is {value:g}, but its unit is {unit}" for key, value, unit in wrong)
        raise UserError(f"{path}: {said}")
