"""Converts a job to a configuration, and resolves the run on the job's machine."""

from dataclasses import replace
from typing import Any

from optimus.config import RunConfig, load_config
from optimus.config.phases import as_of_run
from optimus.errors import UserError
from optimus.measurements import Timing
from optimus.plan.job import Job, machine_facts, profile_of
from optimus.plan.memory import FRAGMENTS, OPTIMIZER, Memory, device_capacity, memory_of
from optimus.plan.offloading import Elsewhere, rates_of
from optimus.resolve.facts import AMOUNTS, Facts
from optimus.resolve.memory import MemoryAccount, memories
from optimus.resolve.resolve import resolve
from optimus.resolve.run import ResolvedRun, RunInputs

_SHARDING = {
    "shard",
    "shard_ranks",
    "shard_over",
    "reshard_after_forward",
    "offload",
    "resident_fraction",
    "accumulate_on",
}


# ---- The configuration ----


def layout_of(job: Job) -> dict[str, Any]:
    """Returns the layout of `job` as the configuration's keys `parallel`, `state` and `recompute`."""
    mesh, state = job.mesh, job.state
    used = {"data"}
    used |= {"sequence"} if mesh.tp > 1 else set()
    used |= {"context_method"} if mesh.cp > 1 else set()
    used |= {"expert", "expert_tensor"} if mesh.ep * mesh.etp > 1 else set()
    used |= {"schedule"} if mesh.pp > 1 else set()
    parallel = job.parallel.model_copy(update={"sequence": job.parallel.splits_sequence}).model_dump()
    changed = job.parallel.model_dump(exclude_defaults=True, exclude={"sequence", "context_method", "overlap"})
    parallel = {name: value for name, value in parallel.items() if name in used or name in changed}
    moot = {"reshard_after_forward"} if state.shard != "parameters" else set[str]()
    sharding = state.model_dump(include=_SHARDING - moot, exclude_defaults=True)
    return {"parallel": parallel, "state": {"shard": state.shard} | sharding, "recompute": job.config.recompute}


def config_of(job: Job) -> RunConfig:
    """Returns the configuration of a job. Raises `UserError` when the job's layout conflicts with another setting."""
    layout = layout_of(job)
    config = as_of_run(job.config, job.run) if job.run is not None and job.config.phases else job.config
    raw = config.model_dump(exclude_unset=True)
    raw["parallel"] = {"overlap": job.parallel.overlap} | layout["parallel"]
    raw["state"] = {name: raw["state"][name] for name in raw.get("state", {}) if name not in _SHARDING} | layout[
        "state"
    ]
    try:
        return load_config(raw)
    except UserError as error:
        raise UserError(f"the planned layout conflicts with the rest of the configuration: {error}") from None


# ---- The run on the machine ----


def facts_of(job: Job) -> Facts:
    """Returns the facts that the job's run finds on its machine."""
    machine, facts = job.machine, machine_facts(job.machine, job.mesh.size)
    facts = replace(facts, device_bytes=int(device_capacity(job) / (1 - FRAGMENTS)))  # the run keeps its own margin
    if job.state.offload == "none" or machine.host.bandwidth is None:
        return facts
    rates = rates_of(job)
    done = rates.up, rates.down, rates.host_update, rates.device_update, machine.rates(job.precision).sustained_rate
    seconds = {what: amount / rate for (what, amount), rate in zip(AMOUNTS.items(), done, strict=True)}
    return replace(facts, timings={what: Timing(each, each) for what, each in seconds.items()})


def run_of(job: Job) -> ResolvedRun:
    """Resolves the configuration of a job with the facts of the job's machine."""
    return resolve(config_of(job), facts_of(job), RunInputs(sequences=job.sequences, teachers=job.teachers))


def decided(job: Job, run: ResolvedRun) -> Job:
    """Returns the job with the mesh, the recomputation and, under offloading, the placement of state of its `run`."""
    config = run.config
    keys = "recompute", "recompute_every", "recompute_budget"
    elsewhere = ("resident_fraction", "accumulate_on") if config.state.offload != "none" else ()
    state = {key: getattr(config.state, key) for key in elsewhere}
    return job.changed(run.mesh, state=state, **{key: getattr(config, key) for key in keys})


def memory_of_run(job: Job, run: ResolvedRun) -> Memory:
    """Returns the memory of the fullest pipeline rank, from the memory account of `run`.

    Returns an estimate if the job's profile has recomputation, or other bytes of state or gradients than Optimus.
    """
    own, profile = profile_of(job.config), job.profile
    if (profile.state, profile.gradient, profile.recompute) != (own.state, own.gradient, own.recompute):
        return memory_of(job)
    shared = job.machine.host.shared
    found = [_memory(rank, each, shared) for rank, each in enumerate(memories(run, job.imbalance))]
    return max(found, key=lambda memory: memory.total)


def _memory(rank: int, found: MemoryAccount, shared: bool) -> Memory:
    kinds = found.kinds(shared=shared)
    parts = {"gathered": 0.0, "copies": 0.0, "optimizer": float(sum(kinds.pop(kind) for kind in OPTIMIZER))}
    parts |= {kind: float(size) for kind, size in kinds.items()}
    return Memory(rank, parts, Elsewhere(*(float(sum(sizes.values())) for sizes in (found.host, found.disk))))
