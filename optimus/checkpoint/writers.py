"""Assigns each shard of a checkpoint to the rank that writes the shard."""

from collections import Counter
from collections.abc import Iterator, Sequence

from optimus.config.tree import StateConfig
from optimus.mesh import Layout, Mesh
from optimus.state.buffers import Residency
from optimus.state.chunk import Chunk
from optimus.state.model_state import ModelState
from optimus.state.plan import ChunkPlan, shard_partitions, sharding_of


def chunks_to_write(state: ModelState, *, scattered: bool) -> list[Chunk]:
    """Returns the chunks whose shard this rank writes."""
    plans, groups = [chunk.plan for chunk in state.chunks], state.groups
    found = writers(plans, groups.mesh, groups.rank, state.options, scattered=scattered)
    return [chunk for chunk, writer in zip(state.chunks, found) if writer == groups.rank]


def holders(mesh: Mesh, layout: Layout, options: StateConfig) -> list[list[int]]:
    """Returns the groups of ranks with the same shard, for a chunk whose parameters have `layout`.

    The ranks of a group are in ascending order. Ranks of pipeline stages without the parameters form groups too.
    """
    *_, copies = shard_partitions(mesh, layout.partial_axes, options)
    together = list(copies)
    of_rank = {rank: ranks for ranks in together for rank in ranks}
    alike = (
        [rank for other in mesh.group(ranks[0], layout.replicated_axes) for rank in of_rank[other]]
        for ranks in together
    )
    return sorted({min(ranks): sorted(ranks) for ranks in alike}.values())


def writers(plans: Sequence[ChunkPlan], mesh: Mesh, rank: int, options: StateConfig, *, scattered: bool) -> list[int]:
    """Returns, for each chunk, the rank that writes the shard that `rank` holds.

    If `scattered`, spreads the bytes over nodes and ranks. In the Optimus paper (section 4, DP-scattered),
    data-parallel rank m % DP writes model-parallel shard m instead.
    """
    found, _ = _shared_writing(plans, mesh, rank, options, scattered)
    return found


def bytes_copied(
    plans: Sequence[ChunkPlan], mesh: Mesh, rank: int, options: StateConfig, *, scattered: bool
) -> Counter[int]:
    """Returns the bytes that each rank on the stage of `rank` copies for a full asynchronous checkpoint.

    Counts only the device buffers of trained chunks.
    """
    stage = mesh.coordinate(rank, "pp")
    _, of_rank = _shared_writing(plans, mesh, rank, options, scattered)
    return Counter({each: size for each, size in of_rank.items() if mesh.coordinate(each, "pp") == stage})


def saved_bytes(plan: ChunkPlan) -> int:
    """Returns the bytes of the weights and the update rule's state in a shard of `plan.length` elements."""
    return plan.length * sum(size for size, _ in _saved(plan))


def _saved(plan: ChunkPlan) -> Iterator[tuple[int, Residency]]:
    """Yields (bytes per element, residency) of the weights and of each buffer of the update rule's state."""
    yield plan.model_dtype.itemsize, plan.residency("master" if plan.has_master else "parameters.shard")
    yield from ((each.dtype.itemsize, each.residency) for each in plan.buffers if each.reported == "moments")


def _shared_writing(
    plans: Sequence[ChunkPlan], mesh: Mesh, rank: int, options: StateConfig, scattered: bool
) -> tuple[list[int], Counter[int]]:
    """Returns (the writer of the shard of `rank` for each chunk, the bytes that each writer copies).

    The copied bytes count only the device buffers of trained chunks.
    """
    stage, found = mesh.coordinate(rank, "pp"), [0] * len(plans)
    known: dict[tuple[tuple[str, ...], tuple[str, ...], bool, bool], list[list[int]]] = {}
    # Bytes to write by node and by rank, and bytes to copy before the write, by rank.
    of_node, of_rank, copied = Counter[int](), Counter[int](), Counter[int]()
    for number, plan in sorted(enumerate(plans), key=lambda each: -saved_bytes(each[1])):
        layout = plan.slots[0].layout
        axes = layout.partial_axes, layout.replicated_axes, plan.rule.trains, plan.small
        if axes not in known:
            alike = holders(mesh, layout, sharding_of(plan.rule, options, small=plan.small))
            known[axes] = [ranks for ranks in alike if _on_stage(mesh, ranks, stage)]
        for index, ranks in enumerate(known[axes]):
            if not scattered:
                writer = ranks[0]
            elif "embedding" in layout.replicated_axes:  # two stages hold the chunk, and their other chunks differ
                writer = ranks[index * len(ranks) // len(known[axes])]
            else:
                writer = min(ranks, key=lambda each: (of_node[mesh.node(each)], of_rank[each], each))
            of_node[mesh.node(writer)] += saved_bytes(plan)
            of_rank[writer] += saved_bytes(plan)
            here = sum(size for size, residency in _saved(plan) if residency == "device")
            copied[writer] += plan.length * here * plan.rule.trains
            if rank in ranks:
                found[number] = writer
    return found, copied


def _on_stage(mesh: Mesh, ranks: Sequence[int], stage: int) -> bool:
    return stage in (mesh.coordinate(ranks[0], "pp"), mesh.coordinate(ranks[-1], "pp"))
