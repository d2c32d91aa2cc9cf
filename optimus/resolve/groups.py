"""Computes the process groups of a run and the communicators of a rank."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from optimus.comm import PlannedGroups
from optimus.comm.groups import level_groups
from optimus.config import RunConfig
from optimus.config.tree import StateConfig
from optimus.mesh import Layout, Mesh, RankPartition
from optimus.mesh.mesh import runs_of_tensor
from optimus.resolve.rules import tilings
from optimus.resolve.stages import placement_of
from optimus.state.plan import shard_partitions

# Groups that do not depend on options.
_ALWAYS = (
    ("pp", "dp", "cp", "tp"),
    ("dp", "cp", "tp"),
    ("dp", "cp"),
    ("dp",),
    ("pp",),
    ("cp",),
    ("tp_out",),
    ("tp_in",),
)


class Communicators(NamedTuple):
    """`number` communicators to which one rank belongs, each with `size` ranks."""

    what: str
    size: int
    number: int


def shared_groups(config: RunConfig, mesh: Mesh, layouts: Mapping[str, Layout]) -> list[PlannedGroups]:
    """Returns the shared groups of a run (`PlannedGroups.apart` is 0); `run_groups` adds the unshared groups."""
    spread = config.model.experts is not None or config.parallel.expert > 1
    asked = [*_ALWAYS, *([("ep",), ("etp",)] if spread else [])]
    asked += [("ep", "etp")] if spread and config.moe.dispatch == "allgather" else []
    asked += [("pp", "tp_out")] if config.parallel.vocabulary else []
    asked += [("embedding",)] if any("embedding" in layout.replicated_axes for layout in layouts.values()) else []
    for tiling in tilings(config.optimizer):
        asked += dict.fromkeys(tiling.split_axes(layout, mesh) for layout in layouts.values())
    asked += dict.fromkeys(layout.partial_axes for layout in layouts.values())
    asked += [(axis,) for _, ranks in config.parallel.tensor_ranges for axis in runs_of_tensor(ranks)]
    named = {_named(mesh, axes): axes for axes in reversed(asked)}  # axes with the same name have the same groups
    found = [PlannedGroups(name, mesh.groups(named[name])) for name in dict.fromkeys(_named(mesh, a) for a in asked)]
    if spread and config.moe.dispatch == "alltoall":
        found += level_groups(mesh, "ep")
    found += state_groups(mesh, layouts, config.state)
    unlike: dict[RankPartition, PlannedGroups] = {}
    for each in found:
        unlike.setdefault(each.partition, each)
    return [each for each in unlike.values() if each.partition.largest > 1]


def state_groups(mesh: Mesh, layouts: Mapping[str, Layout], options: StateConfig) -> list[PlannedGroups]:
    """Returns the partitions into shard groups and replica groups for parameters with `layouts`."""
    found = []
    for axes in dict.fromkeys(layout.partial_axes for layout in layouts.values()):
        *steps, copies = shard_partitions(mesh, axes, options)
        name = _named(mesh, axes)
        found += [PlannedGroups(f"shards {number} of {name}", step) for number, step in enumerate(steps, start=1)]
        found.append(PlannedGroups(f"replicas of shards of {name}", copies))
        if options.unsharded_below:
            found.append(PlannedGroups(f"replicas of {name}", mesh.groups(axes)))
    return found


def run_groups(config: RunConfig, mesh: Mesh, layouts: Mapping[str, Layout], *, tags: bool) -> list[PlannedGroups]:
    """Returns the partitions of a run's ranks into process groups, without the groups of two-level collectives.

    `tags` is `Groups.tags`.
    """
    found, pipeline = shared_groups(config, mesh, layouts), mesh.groups(("pp",))
    if mesh.pp > 1 and not tags:
        found.append(PlannedGroups("messages of pp", pipeline, 2 * config.parallel.stages, messages=True))
    if config.parallel.vocabulary:
        found.append(PlannedGroups("passes of pp", pipeline, 4))
        found.append(
            PlannedGroups(f"normalisers of {_named(mesh, ('pp', 'tp_out'))}", mesh.groups(("pp", "tp_out")), 1)
        )
    state, replicas = config.state, mesh.groups(("dp", "cp"))
    arrives = config.optimizer.clip_norm is None and state.overlap and state.offload == "none"
    # In one communicator, the bound of the gradient norm would wait for all reductions (`ModelState.deciding`).
    if arrives and not tags and len(replicas) == 1 < replicas.largest:
        found.append(PlannedGroups("bound of the gradient norm", mesh.groups(_ALWAYS[0]), 1))
    return found


def communicators(
    config: RunConfig, mesh: Mesh, layouts: Mapping[str, Layout], ranks: Sequence[int]
) -> list[list[Communicators]]:
    """Returns, for each of `ranks`, the communicators of the rank if it uses all groups of `run_groups`.

    Messages need two communicators, one per direction, for each pair of consecutive stages on different ranks.
    """
    found: list[list[Communicators]] = [[] for _ in ranks]
    for what, partition, apart, messages in run_groups(config, mesh, layouts, tags=False):
        for rank, theirs in zip(ranks, found):
            size = partition.size_of(rank)
            if messages:
                theirs.append(Communicators(what, 2, 2 * _neighbours(config, mesh.coordinate(rank, "pp"))))
            elif size > 1:
                theirs.append(Communicators(what, size, apart or 1))
    return found


def _neighbours(config: RunConfig, pipeline_rank: int) -> int:
    """Counts the borders between a stage on `pipeline_rank` and a stage on another rank."""
    placement = placement_of(config)
    ranks = [placement.rank_of(stage) for stage in range(placement.stages)]
    return sum(pipeline_rank in border and len(set(border)) > 1 for border in pairwise(ranks))


def _named(mesh: Mesh, axes: Sequence[str]) -> str:
    return " x ".join(axis for axis in axes if mesh.axis_size(axis) > 1)
