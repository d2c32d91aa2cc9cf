"""What a rank would hold, from the real parts of a run: the model on meta tensors, cut into stages, laid out on the real
mesh, planned in chunks, under the real schedule. It takes seconds where the planner's arithmetic takes microseconds, and is
what that arithmetic is checked with.
"""

from itertools import accumulate

from optimus.errors import UserError
from optimus.parallel.activations import activation_bytes
from optimus.parallel.recompute import Recomputation
from optimus.pipeline.schedule import live_changes
from optimus.pipeline.simulation import simulate
from optimus.plan.job import Job
from optimus.plan.memory import memory_of_ranks
from optimus.state.plan import bytes_by_kind
from optimus.train.collectives import with_dispatcher
from optimus.train.pipeline import partition_of, schedule_of
from optimus.train.precision import DTYPES
from optimus.train.recomputation import activation_shapes
from optimus.train.run import planned_chunks, unpruned_in_the_end
from optimus.train.teacher import teacher_bytes


def dry_run(job: Job, rank: int) -> dict[str, int]:
    """Bytes of a rank, by kind: parameters, gradients, master, moments, mask, teacher, activations (of all microbatches that
    the schedule keeps) and working (what a backward pass holds besides); whole parameters in use and copies for checkpoints
    as the planner counts them.

    Raises `UserError` when there is no such rank, or the model cannot be divided as configured.
    """
    mesh = job.mesh
    if not 0 <= rank < mesh.size:
        raise UserError(f"--dry-run {rank}: the ranks are 0 to {mesh.size - 1}")
    config = with_dispatcher(job.config, mesh)
    found = bytes_by_kind(planned_chunks(config, mesh, [rank], unpruned_in_the_end(config))[0])
    partition = partition_of(config, mesh, rank)
    stages = {
        stage: activation_bytes(
            config.model,
            Recomputation(tuple(config.recompute), config.recompute_every),
            layers=partition.blocks[stage],
            first=stage == 0,
            last=stage == len(partition.blocks) - 1,
            load=job.imbalance,
            **activation_shapes(config, mesh, DTYPES[config.train.precision].itemsize),
        )
        for stage in partition.here
    }
    pipeline_rank = mesh.coordinate(rank, "pp")
    computed = simulate(schedule_of(config, job.microbatches)).computations[pipeline_rank]
    changes = (change * stages[stage].saved for stage, change in live_changes(computed))
    parts = memory_of_ranks(job)[pipeline_rank].parts
    return {
        **found,
        **({"teacher": teacher_bytes(config)} if config.train.teacher and partition.has_last else {}),
        "activations": max(accumulate(changes)),
        "working": max(each.peak - each.saved for each in stages.values()),
        **{kind: int(parts[kind]) for kind in ("gathered", "copies") if parts[kind]},
    }
