"""Finds about the largest model that a machine can train: the job's model with about as many layers as fit."""

from collections.abc import Iterator
from typing import NamedTuple

from optimus.errors import UserError
from optimus.model.architecture import own_model
from optimus.plan.job import Job
from optimus.plan.memory_fit import residencies
from optimus.plan.prediction import Plan
from optimus.plan.search import fits, search_residency

MOST_LAYERS = 1 << 12
"""Largest number of layers that the search tries, unless the job's own model has more."""


class Deepest(NamedTuple):
    """The fastest plan of the largest model that the search found. `limited` is true if the search ended at the limit
    of layers, so that larger models may fit."""

    plan: Plan
    limited: bool


def largest(job: Job) -> list[Deepest]:
    """Returns, for each setting of offloading with which any model fits, the fastest plan of the largest model found.

    Raises `UserError` when the model's layers are not all of one kind, or when no number of layers fits.
    """
    own_model(job.model, "--largest")
    if len(set(job.model.alike)) > 1:
        raise UserError("--largest adds layers of the same kind, but the layers of this model are of several kinds")
    found = [deepest for each in residencies(job.checked().undivided) for deepest in _deepest(each)]
    if not found:
        raise UserError(f"--largest: no number of these layers fits on {job.mesh.size} ranks of {job.machine.name}")
    return found


def _deepest(job: Job) -> Iterator[Deepest]:
    """Yields the fastest plan of the largest model found, if any model fits. The search doubles the number of layers
    while the model fits, and then bisects."""
    least, most, layers = 0, None, job.model.layers
    limit = max(MOST_LAYERS, layers)
    while 0 < layers <= limit and (most is None or most - least > max(1, least // 16)):
        if fits(job.changed(model={"layers": layers})):
            least = layers
        else:
            most = layers
        layers = 2 * least if most is None else (least + most) // 2
    if least:
        for plan in search_residency(job.changed(model={"layers": least}), best=1):
            yield Deepest(plan, limited=most is None)
