"""Searches for the fastest layouts that fit, among the candidates for a model, a machine and a number of ranks.

A queue orders the layouts by a lower bound of the step time. The search ends when no bound is below the time
of the slowest layout among the `best` fastest layouts found.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from optimus.config.sizes import counted, size_text
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.pipeline.schedules import DEFAULT
from optimus.plan.candidate_meshes import candidates
from optimus.plan.job import Job
from optimus.plan.links import even, exchanged
from optimus.plan.machine import load_machine, machine_names
from optimus.plan.memory import FRAGMENTS, buffers_of, device_capacity, memory_of, state_size, states_of, usable
from optimus.plan.memory_fit import Fitting, Timed, residencies
from optimus.plan.offloading import host_capacity
from optimus.plan.prediction import Plan, predict
from optimus.plan.step import step_time

_TRIES = 5


def search(job: Job, best: int = 10, *, layers: bool = False) -> list[Plan]:
    """Returns up to `best` plans, the fastest first, with different divisions of the job's ranks.

    With `layers`, plans may have layers that recompute other modules, or have fewer tensor-parallel ranks; the plans without
    such ranges are searched too, so that none is slower.

    Without configured offloading, the search offloads state only if no layout fits on the devices alone. Raises
    `UserError` if `Job.checked` does, if no layout divides the batch, or if no layout fits.
    """
    asked = job.checked().undivided
    for each in residencies(asked):
        plans = search_residency(each, best)
        if layers:
            plans = _fastest([*plans, *search_residency(each, best, layers=True)], best)
        if plans:
            return plans
    raise _too_large(asked)


def _fastest(plans: Sequence[Plan], best: int) -> list[Plan]:
    found = dict[object, Plan]()
    for plan in sorted(plans, key=lambda plan: plan.step.seconds):
        found.setdefault(_division(plan.job.mesh.pp, plan.job.mesh), plan)
    return [*found.values()][:best]


def _division(pp: int, mesh: Mesh) -> tuple[int, ...]:
    return pp, mesh.tp, mesh.tp_in, mesh.cp, mesh.ep, mesh.etp


def search_residency(job: Job, best: int, *, layers: bool = False) -> list[Plan]:
    """Searches like `search`, but only with the job's own setting of offloading. Returns an empty list when no layout
    fits. The job must be undivided (see `Job.undivided`).

    The search estimates memory more coarsely than `predict`. If a found plan does not fit by `predict`, the function
    searches again for a machine with less memory. The function searches at most `_TRIES` times. The result contains
    only plans that fit.
    """
    least = machine = job.machine
    for _ in range(_TRIES):
        found = [
            predict(replace(each.job, machine=machine)) for each in _search(replace(job, machine=least), best, layers)
        ]
        over = max((plan.memory.total - device_capacity(plan.job) for plan in found), default=0.0)
        if over <= 0:
            break
        least = least.model_copy(update={"memory": least.memory - over / (1 - FRAGMENTS)})
    return sorted(filter(_fits, found), key=lambda plan: plan.step.seconds)


def _fits(plan: Plan) -> bool:
    job, memory = plan.job, plan.memory
    return memory.total <= device_capacity(job) and memory.elsewhere.host <= host_capacity(job)


def _search(job: Job, best: int, layers: bool) -> list[Timed]:
    links = job.machine.network.links is not None
    ideal = replace(job, machine=even(job.machine)) if links else job
    ways = list(candidates(ideal))
    if not ways:
        batch = f"a global batch of {job.train.global_batch} sequences"
        if job.config.phases:
            batch = f"the global batches of all phases, multiples of {job.common_batch} sequences,"
        raise UserError(
            f"no layout divides {batch} over {job.mesh.size} ranks: use a multiple of {job.mesh.size} sequences"
        )
    job = job.with_neighbours()
    found: dict[tuple[int, ...], Timed] = {}
    fitting = Fitting(job, layers=layers)
    limit = math.inf  # seconds below which a plan is among the best
    queue = [(each.bound * fitting.least_share(each), number, False) for number, each in enumerate(ways)]
    heapify(queue)
    while queue:
        bound, number, refined = heappop(queue)
        if bound >= limit:
            break
        candidate = ways[number]
        if not refined:
            heappush(queue, (fitting.least(candidate), number, True))
            continue
        key = _division(candidate.pp, candidate.timing.mesh)
        most = min(limit, found[key].seconds) if key in found else limit
        fastest = fitting.fastest(candidate, most) if bound < most else None
        if fastest is not None:
            found[key] = fastest
            times = sorted(timed.seconds for timed in found.values())
            limit = times[best - 1] if len(times) >= best else limit
    timed = sorted(found.values(), key=lambda each: each.seconds)[:best]
    return [_rearranged(each) for each in timed] if links else timed


def _rearranged(timed: Timed) -> Timed:
    job, links = timed.job, timed.job.machine.network.links
    assert links is not None
    assert job.nodes is not None

    def seconds(nodes: Sequence[int]) -> float:
        return step_time(replace(job, nodes=tuple(nodes))).seconds

    nodes = tuple(exchanged(job.nodes, len(links), seconds))
    return Timed(seconds(nodes), replace(job, nodes=nodes))


def fits(job: Job) -> bool:
    """True if a layout with the smallest microbatches, sharded parameters and recomputation of whole blocks fits."""
    capacity, beside = usable(job.machine), host_capacity(job)
    tight = ((each, memory_of(each)) for size, each in _tightest(job) if size <= capacity)
    return any(memory.total <= device_capacity(each) and memory.elsewhere.host <= beside for each, memory in tight)


def _tightest(job: Job) -> list[tuple[float, Job]]:
    """Returns (bytes of the state on the fullest rank, job) for layouts that need little memory, smallest state
    first."""
    ways = list(candidates(job))
    smallest = min((candidate.timing.micro_batch for candidate in ways), default=0)
    found = [
        candidate.job.changed(state={"shard": "parameters"}, recompute=["block"])
        for candidate in ways
        if candidate.timing.micro_batch == smallest and candidate.schedule == DEFAULT
    ]
    return sorted(((state_size(each), each) for each in found), key=lambda sized: sized[0])


def _too_large(job: Job) -> UserError:
    least, tightest, beside = math.inf, _tightest(job), host_capacity(job)
    on_host = min((max(there.host for _, there in states_of(each)) for _, each in tightest), default=0.0)
    if on_host > beside:
        return UserError(
            f"no layout fits: a rank of {job.machine.name} may take {size_text(beside)} of its host's memory, but with "
            f"state.offload={job.state.offload} every layout of {counted(job.mesh.size, 'rank')} takes at least "
            f"{size_text(on_host)} there: offload less state, or use more nodes"
        )
    for size, each in tightest:
        if size >= least:  # the state alone takes at least the memory of an earlier layout
            break
        least = min(least, memory_of(each).total + buffers_of(each))
    memories = sorted({(load_machine(name).memory, name) for name in machine_names()})
    enough = [f"{name} ({size_text(size)})" for size, name in memories if least <= size * (1 - FRAGMENTS)]
    cure = (
        f"the smallest known machine with this memory is {enough[0]}" if enough else "no known machine has this memory"
    )
    return UserError(
        f"no layout fits: a rank of {job.machine.name} has {size_text(job.machine.memory)}, but every layout of "
        f"{counted(job.mesh.size, 'rank')} takes at least {size_text(least)}: {cure}; or use more ranks"
    )
