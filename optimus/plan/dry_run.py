"""What a rank would hold, from the real parts of a run: the model on meta tensors, cut into stages, laid out on the real
mesh, planned in chunks, under the real schedule. It takes seconds where the planner's arithmetic takes microseconds, and is
what that arithmetic is checked with.
"""

from optimus.errors import UserError
from optimus.plan.job import Job, resolved
from optimus.plan.memory import memory_of_ranks
from optimus.resolve.memory import memory
from optimus.resolve.parameters import targets_of, whole_model


def dry_run(job: Job, rank: int) -> dict[str, int]:
    """Bytes of a rank, by kind: parameters, gradients, master, moments, mask, teacher, activations (of all microbatches that
    the schedule keeps) and working (what a backward pass holds besides); whole parameters in use and copies for checkpoints
    as the planner counts them. What is pruned at some time counts as it is in the end.

    Raises `UserError` when there is no such rank, or the model cannot be divided as configured.
    """
    mesh, pruning = job.mesh, job.config.pruning
    if not 0 <= rank < mesh.size:
        raise UserError(f"--dry-run {rank}: the ranks are 0 to {mesh.size - 1}")
    targets = [] if pruning is None else targets_of(job.config, whole_model(job.config))
    found = memory(resolved(job, dict.fromkeys(targets, 1 - pruning.sparsity) if pruning else {}), rank, job.imbalance)
    parts = memory_of_ranks(job)[mesh.coordinate(rank, "pp")].parts
    return {
        **found.device,
        **({"teacher": found.teacher} if found.teacher else {}),
        "activations": found.activations,
        "working": found.working,
        **{kind: int(parts[kind]) for kind in ("gathered", "copies") if parts[kind]},
    }
