"""What a job takes: the seconds of its step and its memory."""

from dataclasses import dataclass

from optimus.model.count import flops_per_token
from optimus.plan.job import Job
from optimus.plan.memory import Memory, memory_of
from optimus.plan.rank_costs import RankCosts
from optimus.plan.step import StepTime, step_time


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


def predict(job: Job, work: RankCosts | None = None) -> Plan:
    """What a step of `job` takes, and its memory. `work` knows another job that divides a block likewise."""
    return Plan(job, step_time(job, work), memory_of(job))
