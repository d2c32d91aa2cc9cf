"""Finds the largest number of layers that a model can have on a machine, to within about 1/16."""

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
    """The fastest plan of the largest model that the search found.

    `limited` is true if every number of layers that the search tried fits.
    """

    plan: Plan
    limited: bool


def largest(job: Job) -> list[Deepest]:
    """Returns, for each setting of offloading, the fastest plan of the largest model found, if any.

    Raises `UserError` if the model is not a `ModelConfig`, if its layers differ in attention window or number of
    experts, if `Job.checked` does, or if no number of layers fits.
    """
    own_model(job.model, "--largest")
    if len(set(job.model.alike)) > 1:
        raise UserError("--largest adds layers of the same kind, but the layers of this model are of several kinds")
    found = [deepest for each in residencies(job.checked().undivided) for deepest in _deepest(each)]
    if not found:
        raise UserError(f"--largest: no number of these layers fits on {job.mesh.size} ranks of {job.machine.name}")
    return found


def _deepest(job: Job) -> Iterator[Deepest]:
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
