"""The groups of a run. All ranks must create the groups in the same order."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import chain, combinations, count
from typing import NamedTuple

import torch
import torch.distributed as dist

from optimus.comm.algorithms import KINDS, OWN_LEVELS, Measured
from optimus.comm.device_waits import GRACE
from optimus.comm.exchange import AS_THEY_ARE, Codec
from optimus.comm.group import Group, Shared, Transport
from optimus.comm.host_staging import HostStagedGroup
from optimus.comm.recorder import Recorder
from optimus.comm.schedules import Shape
from optimus.comm.watch import Watch
from optimus.mesh import Mesh, RankPartition
from optimus.mesh.mesh import DENSE, EXPERT

_EVERYONE = "pp", "dp", "cp", "tp"  # the axes of the group of all ranks


class PlannedGroups(NamedTuple):
    """The groups of one partition of the ranks.

    `apart` is the number of unshared groups that each rank gets; `Groups.apart` returns each unshared group once. With
    `apart` 0, each rank gets one group that all callers share. `messages` is True for groups that carry only
    point-to-point messages.
    """

    what: str
    partition: RankPartition
    apart: int = 0
    messages: bool = False


def groups_of_mesh(mesh: Mesh) -> Iterator[PlannedGroups]:
    """Yields the groups along each set of axes in `DENSE` or in `EXPERT`, the embedding groups, and the
    `level_groups` along `ep`.

    Skips axes of size 1, and yields each partition once.
    """
    found: dict[RankPartition, PlannedGroups] = {}
    for view in (DENSE, EXPERT):
        axes = [axis for axis in view if mesh.axis_size(axis) > 1]
        sets = chain.from_iterable(combinations(axes, length) for length in range(1, len(axes) + 1))
        for each in [*sets, *([("embedding",)] if mesh.pp > 1 else [])]:
            partition = mesh.groups(each)
            found.setdefault(partition, PlannedGroups(" x ".join(each), partition))
    for level in level_groups(mesh, "ep"):
        found.setdefault(level.partition, level)
    yield from found.values()


def shape_of(ranks: Sequence[int], mesh: Mesh) -> Shape | None:
    """Returns the `Shape` (nodes, ranks per node) of the group `ranks`.

    Returns None if nodes have different numbers of these ranks, or the ranks are not in the order of their nodes.
    """
    nodes = [mesh.node(rank) for rank in ranks]
    shape = Shape(len(set(nodes)), len(ranks) // len(set(nodes)))
    alike = [node for node in sorted(set(nodes)) for _ in range(shape.per)]
    return shape if nodes == alike else None


def levels_of(partition: RankPartition, mesh: Mesh) -> tuple[RankPartition, RankPartition] | None:
    """Divides the groups of `partition`. Returns (groups across nodes with one rank per node, groups within a node).

    Returns None unless all groups have the same shape, with several nodes and several ranks on each node.

    Legend: G groups, N nodes of a group, P ranks of a group per node.
    """
    table, *others = partition.tables
    shape = shape_of(table[0].tolist(), mesh)
    if others or shape is None or min(shape) == 1:
        return None
    ranks_GNP = table.reshape(-1, *shape)
    nodes_GNP = ranks_GNP // (mesh.ranks_per_node or mesh.size)
    if (nodes_GNP != nodes_GNP[..., :1]).any() or (nodes_GNP[:, 1:, 0] <= nodes_GNP[:, :-1, 0]).any():
        return None
    across = RankPartition([ranks_GNP.swapaxes(1, 2).reshape(-1, shape.nodes)])
    return across, RankPartition([ranks_GNP.reshape(-1, shape.per)])


def level_groups(mesh: Mesh, *axes: str) -> list[PlannedGroups]:
    """Returns the groups across nodes and within nodes along `axes`; an empty list if `levels_of` returns None."""
    levels, what = levels_of(mesh.groups(axes), mesh), " x ".join(axes)
    return (
        []
        if levels is None
        else [PlannedGroups(f"{what} across nodes", levels[0]), PlannedGroups(f"{what} on a node", levels[1])]
    )


class Groups:
    """The groups of this rank: one shared group for each partition of the ranks, and unshared groups (`apart`).

    The constructor creates the groups of `planned`, by default `groups_of_mesh(mesh)`. Code that creates other process
    groups must create equally many on every rank; see `_handle`. `timeout` is in seconds, by default torch's timeout.
    """

    def __init__(
        self,
        mesh: Mesh,
        timeout: float | None = None,
        planned: Iterable[PlannedGroups] | None = None,
        *,
        measured: Measured | None = None,
        partial_sums: Codec = AS_THEY_ARE,
    ) -> None:
        self.mesh = mesh
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.watch, self.recorder = Watch(), Recorder()
        self._shared = Shared(self.recorder, self.watch, measured=measured, partial_sums=partial_sums)
        self.step = self._shared.step
        self._uneven: list[Sequence[int]] = []  # groups for which `shape_of` returns None
        grace = 0.0 if self.tags else GRACE
        self._timeout = None if timeout is None else timedelta(seconds=timeout + grace)
        self._made: dict[RankPartition, Group] = {}
        self._apart: dict[RankPartition, list[Group]] = {}
        self._numbers = count(1)  # numbers of unshared groups
        self._along: dict[frozenset[str], Group] = {}
        self.make(groups_of_mesh(mesh) if planned is None else planned)

    def make(self, planned: Iterable[PlannedGroups]) -> None:
        """Creates the shared groups of `planned` that do not exist yet, and all unshared groups.

        All ranks must pass the same groups in the same order.
        """
        for _, partition, apart, _ in planned:
            if apart:
                alone = [next(self._numbers) for _ in range(apart)]
                self._apart.setdefault(partition, []).extend(self._make(partition, number) for number in alone)
            else:
                self._shared_group(partition)

    @property
    def notes(self) -> list[str]:
        """Messages for users about the collectives of this rank's groups."""
        notes = []
        if self._uneven:
            ranks = ", ".join(map(str, self._uneven[0]))
            notes.append(f"ranks {ranks} are spread unevenly over nodes: their collectives treat all nodes as one")
        if (measured := self._shared.measured) is not None:
            shapes = dict.fromkeys(group.shape for group in self._made.values() if group.size > 1)
            for shape in shapes:
                if missing := [kind for kind in KINDS if not measured.curves(kind, shape)]:
                    which = ", ".join(missing)
                    notes.append(
                        f"{which}: not measured on {shape} (nodes x ranks per node): default algorithms are used"
                    )
        return notes

    @property
    def measured(self) -> Measured | None:
        """The measurements by which groups choose algorithms, or None for the default algorithms."""
        return self._shared.measured

    def choose_by(self, measured: Measured | None) -> None:
        """Makes groups choose the algorithms of collectives by `measured`. All ranks must call this method.

        Creates the group of all ranks again if it exists. Other existing groups keep their `Transport.levels`.
        """
        self._shared.choose_by(measured)
        # Runs use the group of all ranks before the measurements are known.
        if (everyone := self.mesh.groups(_EVERYONE)) in self._made:
            del self._made[everyone]
            self._along.clear()
            self._shared_group(everyone)

    @property
    def tags(self) -> bool:
        """True for Gloo, which distinguishes messages in a process group by tags, and without torch.distributed."""
        return not dist.is_initialized() or dist.get_backend() == "gloo"

    @property
    def world(self) -> Group:
        """The group of all ranks."""
        return self.along(*_EVERYONE)

    def origin(self) -> str | None:
        """Returns the operation in which this rank first sent NaN or Inf.

        Returns None if this rank sent neither, or received NaN or Inf from another rank before.

        All ranks must call this method.
        """
        spread = self.world.all_gather_object(self.watch.spread())
        return self.watch.origin(
            {collective for rank, collectives in enumerate(spread) if rank != self.rank for collective in collectives}
        )

    def along(self, *axes: str) -> Group:
        """Returns this rank's group along `axes` (see `Mesh.groups`)."""
        key = frozenset(axes)
        if key not in self._along:
            self._along[key] = self.group_of(self.mesh.groups(axes))
        return self._along[key]

    def streams(self, number: int, *axes: str) -> list[Group]:
        """Returns `number` groups along `axes`. Messages of one group do not wait for messages of another group."""
        group = self.along(*axes)
        if group.size > 1 and self.tags:
            return [group.tagged(tag) for tag in range(1, number + 1)]
        return self.apart(number, *axes)

    def beside(self, *axes: str) -> Group:
        """Returns a group along `axes` whose collectives do not wait for those of other groups, if the run has planned an
        unshared group; otherwise `along`. Callers share the group."""
        made = self._apart.get(self.mesh.groups(axes))
        return made[0] if made else self.along(*axes)

    def apart(self, number: int, *axes: str) -> list[Group]:
        """Returns `number` unshared groups along `axes`. Raises `RuntimeError` if too few unshared groups are left."""
        partition = self.mesh.groups(axes)
        made = self._apart.get(partition, [])
        if partition.largest == 1:
            return [self._make(partition) for _ in range(number)]
        if len(made) < number:
            raise _not_made(f"enough unshared groups along {', '.join(axes)} ({number} needed)")
        return [made.pop(0) for _ in range(number)]

    def group_of(self, partition: RankPartition) -> Group:
        """Returns this rank's shared group of `partition`.

        Raises `RuntimeError` if the group needs a process group that does not exist.
        """
        if partition not in self._made and len(partition) > 1 and partition.largest > 1:
            raise _not_made(f"the groups {partition.group(self.rank)} ...")
        # The group of all ranks and a partition into single ranks need no new process group.
        return self._shared_group(partition)

    def _make(self, partition: RankPartition, alone: int = 0) -> Group:
        """Creates this rank's group of `partition`; `alone` is an unshared group's number, or 0."""
        own = partition.group(self.rank)
        shape, levels = shape_of(own, self.mesh), None if alone else self._levels(partition)
        if shape is None:
            self._uneven.append(own)
        handle = self._handle(partition, own, alone)
        # Over Gloo, device tensors need host staging.
        kind = HostStagedGroup if self.tags and torch.accelerator.is_available() else Group
        return kind(own, own.index(self.rank), Transport(handle, alone, shape, levels), self._shared)

    def levels(self, *axes: str) -> tuple[Group, Group] | None:
        """Returns this rank's groups across and within nodes along `axes`, or None; see `levels_of`."""
        levels = levels_of(self.mesh.groups(axes), self.mesh)
        return None if levels is None else (self.group_of(levels[0]), self.group_of(levels[1]))

    def _levels(self, partition: RankPartition) -> tuple[Group, Group] | None:
        """Returns this rank's groups across and within nodes, for `OWN_LEVELS`.

        Returns None over Gloo, and if `measured` has no `OWN_LEVELS` for `partition`.
        """
        measured = self._shared.measured
        if self.tags or measured is None:
            return None
        levels = levels_of(partition, self.mesh)
        if levels is None:
            return None
        shape = Shape(*(level.largest for level in levels))
        if not any(OWN_LEVELS in measured.curves(kind, shape) for kind in KINDS):
            return None
        across, within = map(self._shared_group, levels)
        return across, within

    def _shared_group(self, partition: RankPartition) -> Group:
        if partition not in self._made:
            self._made[partition] = self._make(partition)
        return self._made[partition]

    def _handle(self, partition: RankPartition, ranks: Sequence[int], alone: int) -> "dist.ProcessGroup | None":
        """Creates a process group of `ranks`.

        Returns None for the shared group of all ranks (torch's default group), and for a `partition` into single ranks.

        torch names a group by its ranks and the number of groups that the process has created before. All members must
        agree on the name, so a rank creates its group of a partition even if the rank is the only member.
        """
        if partition.largest == 1 or not (alone or len(ranks) < self.mesh.size):
            return None
        # Takes `nccl` of `cpu:gloo,cuda:nccl`, as only the group of all ranks moves host tensors then.
        backend = dist.get_backend().split(":")[-1]
        group: dist.ProcessGroup = dist.new_group(
            list(ranks), timeout=self._timeout, backend=backend, use_local_synchronization=True
        )
        return group


def _not_made(what: str) -> RuntimeError:
    return RuntimeError(
        f"the run has not created {what}: it creates all groups at the beginning, from its planned groups"
    )
