"""The account of memory: what a rank holds, by what is planned of it. Checks, choices, plans and dry runs read it.

Not in it is what is on its way: buffers of collectives, messages, and tiles of updates that are brought to the device and
back, two at a time (`state.tile`; of a rule of matrices at least one matrix).
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
from optimus.state.plan import ChunkPlan, Recipe, bytes_by_kind

Table = npt.NDArray[np.int64]  # of shards and kinds

_LEAVING = 3  # whole gradients of chunks whose state is elsewhere: one that is filled, two on their way


class MemoryAccount(NamedTuple):
    """Bytes of a rank. State at rest by kind, on the device, the host and a disk; on the device besides: the teacher, whole
    parameters and gradients while they are used, the activations of all microbatches that the schedule keeps, and what a
    backward pass holds for a moment; copies for checkpoints are on the host."""

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
        """Whole parameters and gradients."""
        return self.parameters_in_use + self.gradients_in_use

    @property
    def total(self) -> int:
        """Of the device."""
        return sum(self.device.values()) + self.teacher + self.gathered + self.activations + self.working

    def kinds(self, *, shared: bool) -> dict[str, int]:
        """Of the device: the state's, and what there is besides. `shared`: copies for checkpoints lie in the same memory."""
        beside = {"gathered": self.gathered, "copies": self.copies if shared else 0, "teacher": self.teacher}
        there = {kind: size for kind, size in beside.items() if size}
        return {**self.device, "activations": self.activations, "working": self.working, **there}

    def taken(self, facts: Facts) -> int:
        """Of the memory that `facts.device_bytes` counts: on a processor what is on the host is there, too."""
        return self.total + (sum(self.host.values()) if facts.device == "cpu" else 0)


class LiveBytes(NamedTuple):
    """Bytes of activations of a rank: of all microbatches that its stages keep, and for a moment besides."""

    activations: int
    working: int


def memory(run: ResolvedRun, rank: int, load: float = 1.0, *, fullest: bool = False) -> MemoryAccount:
    """What `rank`, or the `fullest` of its stage, holds at most, its experts having `load` times the mean number of tokens:
    of phases, in the widest; of a run that prunes, when it takes most of the device."""
    plans = (run.chunk_plans(rank, recipe=recipe) for recipe in recipes_of(run))
    accounts = (account(run, rank, each, load, fullest=fullest) for each in plans)
    return max(accounts, key=lambda found: found.total)


def memories(run: ResolvedRun, load: float = 1.0) -> list[MemoryAccount]:
    """`memory` of the fullest rank of each rank of the pipeline. The state is planned once for those that hold parameters
    alike."""
    rules, unpruned = run.recipe.rules, run.recipe.unpruned
    known, found = dict[object, MemoryAccount](), list[MemoryAccount]()
    for rank in run.stage_ranks:
        partition = run.partition(rank)
        stages = -1, *partition.here
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
    """What `rank` holds when its chunks are `plans`; or the `fullest` rank of its stage, with the copies of the mean one, as
    ranks whose copies lie beside each other share the room for them."""
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


def recipes_of(run: ResolvedRun) -> list[Recipe]:
    """What the run keeps of its parameters from its beginning on, and after each pruning."""
    pruning, first = run.config.pruning, run.recipe
    if pruning is None:
        return [first]
    targets = targets_of(run.config, run.model)
    later = range(int(pruning.comes_first and run.inputs.begins), len(pruning.at))
    shares = (dict.fromkeys(targets, pruning.unpruned(event)) for event in later)
    return [first, *(first._replace(unpruned={**first.unpruned, **share}) for share in shares)]


def live(run: ResolvedRun, rank: int, load: float = 1.0, recomputation: Recomputation | None = None) -> LiveBytes:
    """The activations of `rank`, with `recomputation` in place of the run's own."""
    partition, place = run.partition(rank), run.mesh.coordinate(rank, "pp")
    last = len(partition.blocks) - 1
    stages = [
        run.activations(recomputation, layers=partition.blocks[stage], first=stage == 0, last=stage == last, load=load)
        for stage in partition.here
    ]
    saved, waiting = [stage.saved for stage in stages], [stage.waiting for stage in stages]
    kept = max(most.bytes(saved, waiting) for most in live_of(run.config, run.microbatches)[place])
    return LiveBytes(round(kept), max(stage.peak - stage.saved for stage in stages))


def parameters_in_use(config: RunConfig, plans: Sequence[ChunkPlan]) -> int:
    """Bytes of whole parameters that have memory while they are used."""
    state = config.state
    used = [alike for alike in _alike(plans) if alike[0].lifetime != "always"]
    sizes = sorted((plan.size for alike in used for plan in alike), reverse=True)
    if any(alike[0].lifetime == "step" for alike in used):
        several = len(sizes)
    elif isinstance(state.cache, int):
        several = state.cache
        sizes = [max(sizes, default=0)] * len(sizes)  # blocks are alike
    else:
        several = 1 + state.prefetch
    return sum(sizes[:several]) * DTYPES[config.train.precision].itemsize


def gradients_in_use(config: RunConfig, plans: Sequence[ChunkPlan], microbatches: int) -> int:
    """Bytes of gradients that have memory from a backward pass until they have left; of several microbatches, from the first
    one on."""
    state, staying, passing = config.state, 0, list[int]()
    for alike in _alike(plans):
        for buffer in alike[0].buffers:
            if buffer.reported == "gradients" and buffer.lifetime != "always":
                elements = [plan.elements(buffer) for plan in alike]
                if buffer.lifetime == "step" and microbatches > 1:
                    staying += sum(elements)
                else:
                    passing += elements
    several = _LEAVING if state.offload in ("all", "disk") else 1
    return (staying + sum(sorted(passing, reverse=True)[:several])) * DTYPES[state.gradient_dtype].itemsize


# ---- At rest, of all ranks ----


class AtRest(NamedTuple):
    """Bytes of the state when nothing is computed: on the fullest device; and in the memory of the fullest node, in the mean
    of the ranks of a stage, with what these copy for checkpoints."""

    device: float
    node: float
    copies: int
    teacher: int
    """Of a rank."""


def at_rest(run: ResolvedRun, *, shared: bool) -> AtRest:
    """The most at any time of the run. `shared`: devices have no memory of their own, as processors."""
    return AtRest(*map(max, zip(*(_at_rest(run, recipe, shared=shared) for recipe in recipes_of(run)))))


def _at_rest(run: ResolvedRun, recipe: Recipe, *, shared: bool) -> AtRest:
    config, mesh = run.config, run.mesh
    stages = {rank: run.chunk_plans(rank, recipe=recipe) for rank in run.stage_ranks}
    copied = Counter[int]()  # bytes that each rank copies, as each part has one writer
    for rank, plans in stages.items() if config.checkpoint.asynchronous else ():
        copied += bytes_copied(plans, mesh, rank, config.state, scattered=config.checkpoint.scattered)
    on_host: tuple[Residency, ...] = ("device", "host") if shared else ("host",)
    means = [mean_shards(plans, on_host) for plans in stages.values()]
    node, copies = max(_of_nodes(run, means, copied), key=sum)
    device = max(sum(fullest_shards(plans).values()) for plans in stages.values())
    return AtRest(device, node, copies, max(map(run.teacher_bytes, stages)))


def fullest_shards(plans: Sequence[ChunkPlan], residency: Residency = "device") -> dict[str, int]:
    """As `bytes_by_kind`, of the rank that has most of such chunks: shards of a rule of matrices are of unlike length."""
    found = [of_shards[of_shards.sum(1).argmax()] for of_shards in _by_shards(plans, (residency,))]
    return {kind: sum(int(sizes[number]) for sizes in found) for number, kind in enumerate(KINDS)}


def mean_shards(plans: Sequence[ChunkPlan], residencies: tuple[Residency, ...]) -> float:
    """Bytes at rest, in such places, in the mean of the ranks that share such chunks out."""
    return sum(float(of_shards.sum(1).mean()) for of_shards in _by_shards(plans, residencies))


def _by_shards(plans: Sequence[ChunkPlan], residencies: tuple[Residency, ...]) -> list[Table]:
    """Of the chunks that are shared out alike: bytes of each shard, or of the one that equals all, by kind."""
    found: dict[tuple[object, ...], Table] = {}
    for alike in _alike(plans):
        first = alike[0]
        shards = 1 if first.tiling.equal else first.shard_count
        key = first.partial_axes, first.shard_steps, shards
        if key not in found:
            found[key] = np.zeros((shards, len(KINDS)), np.int64)
        for buffer in first.buffers:
            if buffer.residency in residencies and buffer.lifetime == "always":
                elements = _of_shards(alike, buffer)
                found[key][:, KINDS.index(buffer.reported)] += elements * buffer.dtype.itemsize
    return [*found.values()]


def _of_shards(alike: Sequence[ChunkPlan], buffer: Buffer) -> "int | Table":
    """Elements of a buffer of such chunks on each of the ranks that share them out; one number where all have as many."""
    first = alike[0]
    if first.mask is not None and buffer.extent != "compressed":
        return sum(plan.elements(buffer) for plan in alike)
    _, together = first.shards(buffer.depth)  # shards in its extent
    if first.tiling.equal:
        return sum([plan.borders[-1] for plan in alike]) * together // first.shard_count
    return sum(np.diff(plan.borders[::together]).repeat(together) for plan in alike)


def _alike(plans: Sequence[ChunkPlan]) -> Iterator[list[ChunkPlan]]:
    """Neighbours with the same buffers that are shared out alike."""
    return (list(same) for _, same in groupby(plans, key=attrgetter("buffers", "partial_axes", "shard_steps")))


def _of_nodes(run: ResolvedRun, held: Sequence[float], copied: Mapping[int, int]) -> Iterator[tuple[float, int]]:
    """Of each node: bytes of the state of its ranks, of which those of a stage hold the same, and of its copies."""
    mesh = run.mesh
    node = mesh.ranks_per_node or mesh.size
    for first in range(0, mesh.size, node):
        ranks = range(first, min(first + node, mesh.size))
        yield sum(held[mesh.coordinate(rank, "pp")] for rank in ranks), sum(copied.get(rank, 0) for rank in ranks)
