"""Lists the candidate layouts, each with a lower bound of its step time.

The list leaves out dominated schedules (`ScheduleRow.dominated`), context-parallel parts of fewer than 512 tokens,
tensor- and expert-parallel groups that do not fit nodes evenly, and tensor-parallel groups of more than 8 nodes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from optimus.config import Architecture
from optimus.mesh import Mesh
from optimus.model.architecture import own_model
from optimus.pipeline.estimates import stages_of_ranks
from optimus.pipeline.schedules import DEFAULT, ScheduleRow, schedules
from optimus.plan.costs import costs_of
from optimus.plan.job import Job
from optimus.plan.rank_costs import Passes, RankCosts
from optimus.plan.step import stage_sizes

_SMALLEST_PART = 512  # tokens
_MICROBATCHES = (1, 2, 4, 8, 16)
_MOST_STAGES_PER_RANK = 4
_MOST_TENSOR_NODES = 8


class BlockTiming(NamedTuple):
    """Seconds of one microbatch in a block, in the output layer and in the embedding, for one sharding."""

    work: RankCosts  # costs of a job with one stage
    block: float  # forward and backward pass of the fastest block
    forward: float  # fastest forward pass of a block, without collectives
    head: float
    embedding: float

    @property
    def mesh(self) -> Mesh:
        """The mesh with one stage and the fewest data-parallel ranks."""
        return self.work.job.mesh

    @property
    def micro_batch(self) -> int:
        """Number of sequences in a microbatch."""
        return self.work.job.train.micro_batch


class Candidate(NamedTuple):
    """A sharding of blocks, with a pipeline and a number of data-parallel ranks.

    A step takes at least `bound` seconds.
    """

    bound: float
    timing: BlockTiming
    pp: int
    dp: int
    microbatches: int
    schedule: str
    stages_per_rank: int

    @property
    def job(self) -> Job:
        """The job with the mesh and the schedule of this candidate."""
        mesh = replace(self.timing.mesh, pp=self.pp, dp=self.dp)
        order = {"schedule": self.schedule, "stages_per_rank": self.stages_per_rank}
        return self.timing.work.job.changed(mesh, parallel=order)


def candidates(job: Job) -> Iterator[Candidate]:
    """Yields all candidate layouts of the job's ranks."""
    timings = list(_timings(job))
    longest = 1 if "pipeline" in job.model.limits else job.model.layers
    for pp in (n for n in divisors(job.mesh.size) if n <= longest):
        ranks, orders = job.mesh.size // pp, list(_orders(job, pp))
        for timing in timings:
            mesh = timing.mesh
            data, remainder = divmod(ranks, mesh.tp * mesh.cp)
            if remainder or not data or ranks % (mesh.ep * mesh.etp):
                continue
            together = data * timing.micro_batch
            if job.common_batch % together:
                continue
            microbatches = job.train.global_batch // together
            for order in orders:
                if not order.row.in_rounds or job.common_batch // together % pp == 0:
                    bound = order.bound(timing, microbatches)
                    yield Candidate(bound, timing, pp, data, microbatches, order.row.name, order.stages_per_rank)


def _timings(job: Job) -> Iterator[BlockTiming]:
    """Yields a timing for each micro-batch size and sharding that the model, the batch and the node allow."""
    model, ranks = job.model, job.mesh.size
    known = dict[Any, Any]()
    for out, inner in (pair for pair in _tensor_grids(job) if _divides(model, *pair)):
        for cp in [1] if "context" in model.limits else divisors(ranks // (out * inner)):
            if not _parts(job, out, cp):
                continue
            for micro_batch in (size for size in _MICROBATCHES if job.common_batch % size == 0):
                if micro_batch * job.common_length // cp % (out * inner) == 0:
                    yield from _timed(job, out, inner, cp, micro_batch, known)


def _tensor_grids(job: Job) -> list[tuple[int, int]]:
    """Returns pairs (`tp_out`, `tp_in`) whose product divides a node or fills at most `_MOST_TENSOR_NODES` whole nodes.

    These are AxoNN's X- and Y-tensor-parallel groups (dissertation, section 5.1.2, cases 1 and 2).
    """
    ranks, node = job.mesh.size, min(job.mesh.size, job.machine.ranks_per_node)
    sizes = [*divisors(node), *(node * nodes for nodes in range(2, _MOST_TENSOR_NODES + 1))]
    if job.teachers:  # distillation compares whole logits, which tensor parallelism would divide
        sizes = [1]
    fitting = (size for size in sizes if ranks % size == 0)
    return sorted((out, size // out) for size in fitting for out in divisors(size) if _even(out, node))


def _even(size: int, node: int) -> bool:
    """True if groups of `size` consecutive ranks divide a node or fill whole nodes."""
    return node % size == 0 or size % node == 0


def _parts(job: Job, out: int, cp: int) -> bool:
    """True if `cp` ranks can divide the sequences, and with Ulysses also the heads, evenly.

    With several ranks, a rank must get at least `_SMALLEST_PART` tokens of the longest sequences.
    """
    length, ulysses = job.common_length, job.parallel.context_method == "ulysses"
    pieces = cp if ulysses or cp == 1 else 2 * cp
    heads = job.model.kv_heads // out % cp == 0 or not ulysses
    return heads and length % pieces == 0 and (cp == 1 or job.train.sequence_length // cp >= _SMALLEST_PART)


def _divides(model: Architecture, out: int, inner: int) -> bool:
    if ("tensor" in model.limits and out * inner > 1) or ("inputs" in model.limits and inner > 1):
        return False
    sizes = all(size % (out, inner)[side] == 0 for _, size, side in model.sharded_sizes())
    return sizes and out <= model.vocab and model.refuse_ways(out) is None


def _expert_groups(job: Job, tp: int) -> list[tuple[int, int]]:
    """Returns pairs (expert-parallel size, expert-tensor-parallel size) whose product divides a node or fills whole
    nodes."""
    if job.model.experts is None:
        return [(1, job.model.expert_tensor(1, tp))]
    model, ranks = own_model(job.model, "expert parallelism"), job.mesh.size
    node = min(ranks, job.machine.ranks_per_node)
    return [
        (ep, etp)
        for ep in divisors(math.gcd(*model.expert_counts))
        for etp in divisors(tp)
        if ranks % (ep * etp) == 0
        and _even(etp, node)
        and _even(ep * etp, node)
        and model.expert_intermediate % etp == 0
    ]


class _RankBlocks(NamedTuple):
    """The blocks of a pipeline rank."""

    blocks: int
    first: bool  # True if the rank has the first stage
    last: bool  # True if the rank has the last stage
    before: int  # number of blocks in the stages before the rank's first stage


class _Order(NamedTuple):
    """A pipeline schedule.

    If ranks share cores, `lent` is true and `ranks` has all ranks. Otherwise, `ranks` has the ranks that can be the
    slowest.
    """

    row: ScheduleRow
    pp: int
    stages_per_rank: int
    ranks: Sequence[_RankBlocks]
    lent: bool

    def bound(self, timing: BlockTiming, microbatches: int) -> float:
        """Returns a lower bound of the step's seconds."""
        block, ends = timing.block, (timing.embedding, timing.head)
        if self.lent:
            blocks = sum(rank.blocks for rank in self.ranks)
            return microbatches * (blocks * block + sum(ends)) / self.pp
        idle = self.row.idle(timing.forward, block)
        return max(
            microbatches * (blocks * block + first * ends[0] + last * ends[1]) + before * idle
            for blocks, first, last, before in self.ranks
        )


def _orders(job: Job, pp: int) -> Iterator[_Order]:
    rows = [row for row in schedules().values() if row.name == DEFAULT or (pp > 1 and not row.dominated)]
    layers, lent = job.model.layers, job.machine.alone > 1
    for row in sorted(rows, key=lambda row: (row.name != DEFAULT, row.any_stages)):
        for per_rank in range(row.stages, (_MOST_STAGES_PER_RANK if row.any_stages else row.stages) + 1):
            if per_rank * pp <= layers:
                ranks = _blocks_of_ranks(row, pp, stage_sizes(job.model, pp * per_rank))
                slowest = {rank[:3]: rank for rank in ranks}  # the last of equal ranks waits longest
                yield _Order(row, pp, per_rank, ranks if lent else [*slowest.values()], lent)


def _blocks_of_ranks(row: ScheduleRow, pp: int, sizes: Sequence[int]) -> list[_RankBlocks]:
    owned = stages_of_ranks(row.name, pp, len(sizes) // pp)
    return [
        _RankBlocks(sum(sizes[stage] for stage in own), 0 in own, len(sizes) - 1 in own, sum(sizes[:rank]))
        for rank, own in enumerate(owned)
    ]


def _timed(job: Job, out: int, inner: int, cp: int, micro_batch: int, known: dict[Any, Any]) -> Iterator[BlockTiming]:
    tp, rest = out * inner, None
    for ep, etp in _expert_groups(job, tp):
        data = math.lcm(ep * etp, tp * cp) // (tp * cp)  # fewest data-parallel ranks of a valid mesh
        mesh = Mesh(dp=data, cp=cp, tp=tp, ep=ep, etp=etp, tp_in=inner, ranks_per_node=job.machine.ranks_per_node)
        divided = job.changed(mesh, train={"micro_batch": micro_batch})
        if rest is None:
            rest = costs_of(divided, known)
            ends = _seconds(rest.head), _seconds(rest.embedding)
        work = rest.with_job(divided)
        kinds = [each.values() for each in work.modules.values()]
        block = min(sum(times * _seconds(passes) for passes, times in modules) for modules in kinds)
        forward = min(sum(times * passes.forward.compute for passes, times in modules) for modules in kinds)
        yield BlockTiming(work, block, forward, *ends)


def _seconds(passes: Passes) -> float:
    return sum(terms.seconds for terms in passes)


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, in ascending order."""
    return [n for n in range(1, number + 1) if number % n == 0]
