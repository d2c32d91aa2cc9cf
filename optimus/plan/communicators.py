"""The communicators of a job's ranks, and the memory that their buffers take."""

from optimus.plan.blocks import examples
from optimus.plan.job import Job
from optimus.resolve.groups import Communicators, communicators
from optimus.resolve.parameters import layouts_of


def communicators_of(job: Job) -> tuple[list[Communicators], float]:
    """(the communicators of the rank whose buffers take most, the bytes of these). On a machine whose ranks compute on the
    host's processors there are no such buffers."""
    config, mesh, machine = job.config, job.mesh, job.machine
    layouts = layouts_of(examples(config.model)[0], config)  # of blocks that are alike one says what all do
    ranks = communicators(config, mesh, layouts, [mesh.block * stage for stage in range(mesh.pp)])
    kind = machine.communicator
    found = [(theirs, sum(each.number * kind.memory(each.size) for each in theirs)) for theirs in ranks]
    connected, bytes_ = max(found, key=lambda each: each[1])
    return connected, 0.0 if machine.host.shared else bytes_


def buffers_of(job: Job) -> float:
    """Bytes of the fullest rank's."""
    return 0.0 if job.machine.host.shared or job.mesh.size == 1 else communicators_of(job)[1]
