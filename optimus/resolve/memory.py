"""The account of memory: all that a rank holds, by what is planned of it."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from optimus.checkpoint.writers import bytes_copied
from optimus.pipeline.schedule import live_changes
from optimus.pipeline.simulation import simulate
from optimus.resolve.precision import DTYPES
from optimus.resolve.run import ResolvedRun
from optimus.resolve.stages import schedule_of
from optimus.state.plan import ChunkPlan, bytes_by_kind

_LEAVING = 3  # whole gradients of chunks whose state is elsewhere: one that is filled, two on their way


class MemoryAccount(NamedTuple):
    """Bytes of a rank. State at rest by kind, on the device, the host and a disk; on the device besides: the teacher, whole
    parameters and gradients while they are used, the activations of all microbatches that the schedule keeps, and what a
    backward pass holds for a moment; copies for checkpoints are on the host."""

    device: Mapping[str, int]
    host: Mapping[str, int]
    disk: Mapping[str, int]
    teacher: int
    gathered: int
    activations: int
    working: int
    copies: int

    @property
    def total(self) -> int:
        """Of the device."""
        return sum(self.device.values()) + self.teacher + self.gathered + self.activations + self.working


def memory(run: ResolvedRun, rank: int, load: float = 1.0) -> MemoryAccount:
    """What `rank` holds at most, its experts having `load` times the mean number of tokens; of phases, in the widest."""
    config, plans, partition = run.config, run.chunk_plans(rank), run.partition(rank)
    stages = {
        stage: run.activations(
            layers=partition.blocks[stage], first=stage == 0, last=stage == len(partition.blocks) - 1, load=load
        )
        for stage in partition.here
    }
    computed = simulate(schedule_of(config, run.microbatches)).computations[run.mesh.coordinate(rank, "pp")]
    changes = (change * stages[stage].saved for stage, change in live_changes(computed))
    copies = 0
    if config.checkpoint.asynchronous:
        copied = bytes_copied(plans, run.mesh, rank, config.state, scattered=config.checkpoint.scattered)
        copies = copied.get(rank, 0)
    return MemoryAccount(
        bytes_by_kind(plans),
        bytes_by_kind(plans, "host"),
        bytes_by_kind(plans, "disk"),
        run.teacher_bytes(rank),
        _gathered(run, plans),
        max(accumulate(changes)),
        max(each.peak - each.saved for each in stages.values()),
        copies,
    )


def _gathered(run: ResolvedRun, plans: Sequence[ChunkPlan]) -> int:
    """Bytes of whole parameters and gradients that have memory while they are used."""
    state, itemsize = run.config.state, DTYPES[run.config.train.precision].itemsize
    sizes = sorted((plan.size for plan in plans if plan.lifetime != "always"), reverse=True)
    if any(plan.lifetime == "step" for plan in plans):
        parameters = sum(sizes)
    elif isinstance(state.cache, int):
        parameters = state.cache * max(sizes, default=0)
    else:
        parameters = sum(sizes[: 1 + state.prefetch])
    passing = [plan.size for plan in plans if not plan.stays("gradients") and plan.rule.trains]
    several = _LEAVING if state.residency in ("all", "disk") else 1
    gradients = sum(sorted(passing, reverse=True)[:several])
    if several > 1 and run.microbatches > 1 and state.accumulate_on != "host":
        gradients = sum(passing)
    return min(parameters, sum(sizes)) * itemsize + gradients * DTYPES[state.gradient_dtype].itemsize
