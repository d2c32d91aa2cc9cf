"""Predicts the seconds of a job's step and the memory of its ranks."""

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
    """A job, with the predicted times of a step and the predicted memory of the fullest rank."""

    job: Job
    step: StepTime
    memory: Memory

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks together."""
        return self.job.tokens / self.step.seconds

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilization: FLOP/s of the model over the peak of all ranks."""
        job = self.job
        flops = flops_per_token(job.model, job.train.sequence_length)
        return flops * self.tokens_per_second / job.mesh.size / job.machine.rates(job.precision).peak


def predict(job: Job) -> Plan:
    """Predicts the step time and the memory of `job`, with the layout that the job's run decides."""
    run = run_of(job)
    job = decided(job, run)
    return Plan(job, step_time(job), memory_of_run(job, run))


def dry_run(job: Job, rank: int) -> dict[str, int]:
    """Estimates a rank's peak bytes on the device, by kind. Raises `UserError` when the job has no rank `rank`."""
    if not 0 <= rank < job.mesh.size:
        raise UserError(f"--dry-run {rank}: the ranks are 0 to {job.mesh.size - 1}")
    return memory(run_of(job), rank, job.imbalance).kinds(shared=job.machine.host.shared)
