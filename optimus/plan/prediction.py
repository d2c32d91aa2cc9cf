"""What a job takes: the seconds of its step and its memory, or the memory of one of its ranks."""

from dataclasses import dataclass

from optimus.errors import UserError
from optimus.model.count import flops_per_token
from optimus.plan.job import Job
from optimus.plan.memory import Memory
from optimus.plan.proposal import decided, memory_of_run, run_of
from optimus.plan.step import StepTime, step_time
from optimus.resolve.memory import memory


@dataclass(frozen=True)
class Plan:
    """A job, and what it would take."""

    job: Job
    step: StepTime
    memory: Memory

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.job.tokens / self.step.seconds

    @property
    def utilisation(self) -> float:
        """Model FLOPs to those that the ranks could do at their peak."""
        job = self.job
        flops = flops_per_token(job.model, job.train.sequence_length)
        return flops * self.tokens_per_second / job.mesh.size / job.machine.rates(job.precision).peak


def predict(job: Job) -> Plan:
    """What a step of `job` takes, and what its run holds: what the job leaves open is as its run decides it. Raises
    `UserError` where the run cannot be."""
    run = run_of(job)
    job = decided(job, run)
    return Plan(job, step_time(job), memory_of_run(job, run))


def dry_run(job: Job, rank: int) -> dict[str, int]:
    """Bytes of a rank when it holds most, by kind: parameters, gradients, master, moments, mask, activations (of all
    microbatches that the schedule keeps), working (what a backward pass holds besides), gathered (whole parameters and
    gradients in use), teacher and, where they lie in the same memory, copies for checkpoints.

    Raises `UserError` when there is no such rank, or the model cannot be divided as configured.
    """
    if not 0 <= rank < job.mesh.size:
        raise UserError(f"--dry-run {rank}: the ranks are 0 to {job.mesh.size - 1}")
    return memory(run_of(job), rank, job.imbalance).kinds(shared=job.machine.host.shared)
