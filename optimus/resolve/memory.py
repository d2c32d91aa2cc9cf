"""The memory account of a rank.

The account leaves out the buffers of collectives and messages, and the tiles of offloaded updates.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from optimus.checkpoint.writers import bytes_copied
from optimus.config import RunConfig
from optimus.parallel.recompute import Recomputation
from optimus.resolve.facts import Facts
from optimus.resolve.parameters import targets_of
from optimus.resolve.precision import DTYPES
from optimus.resolve.run import ResolvedRun
from optimus.resolve.stages import live_of
from optimus.state.buffers import KINDS, Buffer, Residency
from optimus.state.plan import ChunkPlan, StateSpec, bytes_by_kind, shard_sizes

Table = npt.NDArray[np.int64]  # shape [shards, kinds]

_BESIDE = "host", "disk"  # locations of state other than the device
_IN_FLIGHT = 3  # chunks whose gradients have memory at a time, if parameters are offloaded: one in use, two in flight


class MemoryAccount(NamedTuple):
    """The bytes that a rank needs.

    `device`, `host` and `disk` list the state at rest by kind. Copies for checkpoints are on the host.
    """

    device: Mapping[str, int]
    host: Mapping[str, int]
    disk: Mapping[str, int]
    teacher: int
    parameters_in_use: int
    gradients_in_use: int
    activations: int
    working: int
    copies: int

    @property
    def gathered(self) -> int:
        """Bytes of parameters and gradients in use."""
        return self.parameters_in_use + self.gradients_in_use

    @property
    def total(self) -> int:
        """All bytes on the device."""
        return sum(self.device.values()) + self.teacher + self.gathered + self.activations + self.working

    def kinds(self, *, shared: bool) -> dict[str, int]:
        """Returns the bytes on the device by kind, and the copies if device and host share one memory (`shared`)."""
        beside = {"gathered": self.gathered, "copies": self.copies if shared else 0, "teacher": self.teacher}
        there = {kind: size for kind, size in beside.items() if size}
        return {**self.device, "activations": self.activations, "working": self.working, **there}

    def taken(self, facts: Facts) -> int:
        """Returns the bytes of the account that must fit into `facts.device_bytes`."""
        return self.total + (sum(self.host.values()) + self.copies if facts.device == "cpu" else 0)


class LiveBytes(NamedTuple):
    """Bytes on a rank: saved activations of live microbatches, and the workspace of a backward pass."""

    activations: int
    working: int


def memory(run: ResolvedRun, rank: int, load: float = 1.0, *, fullest: bool = False) -> MemoryAccount:
    """Returns the account of `rank` in the phase whose microbatches have the most tokens.

    Takes the maximum over the prunings, separately for the device, the host and the disk. With `fullest`, counts the
    state of the fullest rank of the stage. The experts on the rank get `load` times the mean number of tokens.
    """
    plans = (run.chunk_plans(rank, state_spec=spec) for spec in state_specs_of(run))
    accounts = [account(run, rank, each, load, fullest=fullest) for each in plans]
    host, disk = (
        max((getattr(each, at) for each in accounts), key=lambda kinds: sum(kinds.values())) for at in _BESIDE
    )
    return max(accounts, key=lambda found: found.total)._replace(host=host, disk=disk)


def memories(run: ResolvedRun, load: float = 1.0) -> list[MemoryAccount]:
    """Returns `memory` with `fullest` for each pipeline rank."""
    rules, unpruned = run.state_spec.rules, run.state_spec.unpruned
    known, found = dict[object, MemoryAccount](), list[MemoryAccount]()
    for rank in run.stage_ranks:
        partition = run.partition(rank)
        stages = -1, *partition.local_stages
        alike = (
            partition.has_last,
            *(
                (stages.index(stage), run.layouts[name], rules[name], unpruned.get(name, 1.0))
                for name, stage in run.held(rank).items()
            ),
        )
        if alike not in known:
            known[alike] = memory(run, rank, load, fullest=True)
        found.append(known[alike]._replace(**live(run, rank, load)._asdict()))
    return found


def account(
    run: ResolvedRun, rank: int, plans: Sequence[ChunkPlan], load: float = 1.0, *, fullest: bool = False
) -> MemoryAccount:
    """Returns the account of `rank` with the chunks `plans`.

    With `fullest`, counts the state of the fullest rank of the stage, and the stage's mean for copies.
    """
    config, copies, state = run.config, 0, fullest_shards if fullest else bytes_by_kind
    if config.checkpoint.asynchronous:
        copied = bytes_copied(plans, run.mesh, rank, config.state, scattered=config.checkpoint.scattered)
        copies = copied.total() // run.mesh.stage if fullest else copied[rank]
    return MemoryAccount(
        state(plans, "device"),
        state(plans, "host"),
        state(plans, "disk"),
        run.teacher_bytes(rank),
        parameters_in_use(config, plans),
        gradients_in_use(config, plans, run.microbatches),
        *live(run, rank, load),
        copies,
    )


def state_specs_of(run: ResolvedRun) -> list[StateSpec]:
    """Returns the `StateSpec`s of the run: at the start, then after each later pruning."""
    pruning, first = run.config.pruning, run.state_spec
    if pruning is None:
        return [first]
    targets = targets_of(run.config, run.model)
    _, *later = pruning.shares(begins=run.inputs.begins)
    shares = (dict.fromkeys(targets, share) for share in later)
    return [first, *(first._replace(unpruned={**first.unpruned, **share}) for share in shares)]


def live(run: ResolvedRun, rank: int, load: float = 1.0, recomputation: Recomputation | None = None) -> LiveBytes:
    """Returns the activation and workspace bytes of `rank`. `recomputation` replaces the configured recomputation."""
    partition, pipeline_rank = run.partition(rank), run.mesh.coordinate(rank, "pp")
    last = len(partition.blocks) - 1
    stages = [
        run.activations(recomputation, layers=partition.blocks[stage], first=stage == 0, last=stage == last, load=load)
        for stage in partition.local_stages
    ]
    saved, waiting = [stage.saved for stage in stages], [stage.waiting for stage in stages]
    saved_bytes = max(most.bytes(saved, waiting) for most in live_of(run.config, run.microbatches)[pipeline_rank])
    return LiveBytes(round(saved_bytes), max(stage.peak - stage.saved for stage in stages))


def parameters_in_use(config: RunConfig, plans: Sequence[ChunkPlan]) -> int:
    """Returns the maximum number of bytes of gathered parameters on the device."""
    state = config.state
    used = [alike for alike in _alike(plans) if alike[0].lifetime != "always"]
    sizes = sorted((plan.size for alike in used for plan in alike), reverse=True)
    if any(alike[0].lifetime == "step" for alike in used):
        several = len(sizes)
    elif isinstance(state.cache, int):
        several = state.cache
        sizes = [max(sizes, default=0)] * len(sizes)  # every block has the size of the largest chunk
    else:
        several = 1 + state.prefetch
    return sum(sizes[:several]) * DTYPES[config.train.precision].itemsize


def gradients_in_use(config: RunConfig, plans: Sequence[ChunkPlan], microbatches: int) -> int:
    """Returns the maximum bytes of the gradient buffers that have memory only during a part of a step."""
    state, staying, passing = config.state, 0, list[int]()
    for alike in _alike(plans):
        for buffer in alike[0].buffers:
            if buffer.reported == "gradients" and buffer.lifetime != "always":
                elements = [plan.elements(buffer) for plan in alike]
                if buffer.lifetime == "step" and microbatches > 1:
                    staying += sum(elements)
                else:
                    passing += elements
    several = _IN_FLIGHT if state.offload in ("all", "disk") else 1
    return (staying + sum(sorted(passing, reverse=True)[:several])) * DTYPES[state.gradient_dtype].itemsize


# ---- State at rest on all ranks ----


class AtRest(NamedTuple):
    """Bytes of the state at rest on the fullest device, and of state and checkpoint copies in the fullest node's host
    memory."""

    device: float
    node: float
    copies: int
    teacher: int
    """Bytes of the teacher on the fullest rank; on the fullest node where devices and host share one memory."""


def at_rest(run: ResolvedRun, *, shared: bool) -> AtRest:
    """Returns the maximum of each number over the states before and after each pruning.

    `shared` is True if devices and host share one memory.
    """
    return AtRest(*map(max, zip(*(_at_rest(run, spec, shared=shared) for spec in state_specs_of(run)))))


def _at_rest(run: ResolvedRun, spec: StateSpec, *, shared: bool) -> AtRest:
    config, mesh = run.config, run.mesh
    stages = {rank: run.chunk_plans(rank, state_spec=spec) for rank in run.stage_ranks}
    copied = Counter[int]()  # bytes that each rank copies for checkpoints
    for rank, plans in stages.items() if config.checkpoint.asynchronous else ():
        copied += bytes_copied(plans, mesh, rank, config.state, scattered=config.checkpoint.scattered)
    on_host: tuple[Residency, ...] = ("device", "host") if shared else ("host",)
    means = [mean_shards(plans, on_host) for plans in stages.values()]
    teachers = [run.teacher_bytes(rank) for rank in stages]
    node, copies, beside = max(_node_bytes(run, means, copied, teachers if shared else [0] * mesh.pp), key=sum)
    device = max(sum(fullest_shards(plans).values()) for plans in stages.values())
    return AtRest(device, node, copies, beside if shared else max(teachers))


def fullest_shards(plans: Sequence[ChunkPlan], residency: Residency = "device") -> dict[str, int]:
    """Sums the bytes at rest, by kind, of the largest shard of each sharding."""
    found = [of_shards[of_shards.sum(1).argmax()] for of_shards in _by_shards(plans, (residency,))]
    return {kind: sum(int(sizes[number]) for sizes in found) for number, kind in enumerate(KINDS)}


def mean_shards(plans: Sequence[ChunkPlan], residencies: tuple[Residency, ...]) -> float:
    """Returns the mean bytes at rest in `residencies` over the ranks that share the chunks."""
    return sum(float(of_shards.sum(1).mean()) for of_shards in _by_shards(plans, residencies))


def _by_shards(plans: Sequence[ChunkPlan], residencies: tuple[Residency, ...]) -> list[Table]:
    """Returns tables of bytes by shard and kind, one for each sharding."""
    found: dict[tuple[object, ...], Table] = {}
    for alike in _alike(plans):
        first = alike[0]
        shards = 1 if first.tiling.equal else first.shard_count
        key = first.partial_axes, first.shard_steps, shards
        if key not in found:
            found[key] = np.zeros((shards, len(KINDS)), np.int64)
        for buffer in first.buffers:
            if buffer.residency in residencies and buffer.lifetime == "always":
                elements = _buffer_elements(alike, buffer)
                found[key][:, KINDS.index(buffer.reported)] += elements * buffer.dtype.itemsize
    return [*found.values()]


def _buffer_elements(alike: Sequence[ChunkPlan], buffer: Buffer) -> "int | Table":
    """Sums the elements of `buffer` over the chunks `alike`; one number, or an array by shard if shards differ."""
    first = alike[0]
    if first.mask is not None and buffer.extent != "compressed":
        return sum(plan.elements(buffer) for plan in alike)
    sizes = shard_sizes(alike, buffer.depth)
    return sizes if isinstance(sizes, int) else sizes.repeat(first.shard_count // len(sizes))


def _alike(plans: Sequence[ChunkPlan]) -> Iterator[list[ChunkPlan]]:
    """Groups neighbouring chunks with the same buffers and the same sharding."""
    return (list(same) for _, same in groupby(plans, key=attrgetter("buffers", "partial_axes", "shard_steps")))


def _node_bytes(
    run: ResolvedRun, held: Sequence[float], copied: Mapping[int, int], teachers: Sequence[int]
) -> Iterator[tuple[float, int, int]]:
    """Yields, for each node, the bytes of the ranks' state, copies and teachers.

    `held` and `teachers` have the bytes by pipeline rank, and `copied` the bytes by rank.
    """
    mesh = run.mesh
    node = mesh.ranks_per_node or mesh.size
    for first in range(0, mesh.size, node):
        ranks = range(first, min(first + node, mesh.size))
        stages = [mesh.coordinate(rank, "pp") for rank in ranks]
        yield (
            sum(held[stage] for stage in stages),
            sum(copied.get(rank, 0) for rank in ranks),
            sum(teachers[stage] for stage in stages),
        )
