"""Chooses the costs of a job's model."""

from typing import Any

from optimus.plan.counted_costs import CountedCosts
from optimus.plan.declared_costs import DeclaredCosts
from optimus.plan.job import Job
from optimus.plan.rank_costs import RankCosts


def costs_of(job: Job, shared: dict[Any, Any] | None = None) -> RankCosts:
    """Returns the costs of a job; see `RankCosts` for `shared`."""
    return (CountedCosts if job.model.is_adapted else DeclaredCosts)(job, shared)
