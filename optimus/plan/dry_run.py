"""What one rank of a job's run would hold."""

from optimus.errors import UserError
from optimus.plan.job import Job
from optimus.plan.proposal import run_of
from optimus.resolve.memory import memory


def dry_run(job: Job, rank: int) -> dict[str, int]:
    """Bytes of a rank when it holds most, by kind: parameters, gradients, master, moments, mask, teacher, activations (of
    all microbatches that the schedule keeps), working (what a backward pass holds besides), gathered (whole parameters
    and gradients in use) and, where they lie in the same memory, copies for checkpoints.

    Raises `UserError` when there is no such rank, or the model cannot be divided as configured.
    """
    if not 0 <= rank < job.mesh.size:
        raise UserError(f"--dry-run {rank}: the ranks are 0 to {job.mesh.size - 1}")
    found = memory(run_of(job), rank, job.imbalance)
    beside = {"gathered": found.gathered, "copies": found.copies if job.machine.host.shared else 0}
    return {
        **found.device,
        **({"teacher": found.teacher} if found.teacher else {}),
        "activations": found.activations,
        "working": found.working,
        **{kind: size for kind, size in beside.items() if size},
    }
