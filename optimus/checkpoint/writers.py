"""Who writes what of a state into a checkpoint: arithmetic on plans of chunks, which every rank does alike."""

from collections import Counter
from collections.abc import Iterator, Sequence

from optimus.config.tree import StateConfig
from optimus.mesh import Layout, Mesh
from optimus.state.buffers import Residency
from optimus.state.chunk import Chunk
from optimus.state.model_state import ModelState
from optimus.state.plan import ChunkPlan, divisions, sharding_of


def written_here(state: ModelState, *, scattered: bool) -> list[Chunk]:
    """The chunks of which this rank writes its part; see `writers`."""
    plans, groups = [chunk.plan for chunk in state.chunks], state.groups
    found = writers(plans, groups.mesh, groups.rank, state.options, scattered=scattered)
    return [chunk for chunk, writer in zip(state.chunks, found) if writer == groups.rank]


def holders(mesh: Mesh, layout: Layout, options: StateConfig) -> list[list[int]]:
    """All ranks divided into those that keep the same part of a chunk of such parameters; each in order.

    The stages of a pipeline that do not hold the parameters are divided likewise.
    """
    *_, copies = divisions(mesh, layout.partial_axes, options)
    together = list(copies)
    of_rank = {rank: ranks for ranks in together for rank in ranks}
    alike = (
        [rank for other in mesh.group(ranks[0], layout.replicated_axes) for rank in of_rank[other]]
        for ranks in together
    )
    return sorted({min(ranks): sorted(ranks) for ranks in alike}.values())


def writers(plans: Sequence[ChunkPlan], mesh: Mesh, rank: int, options: StateConfig, *, scattered: bool) -> list[int]:
    """For each chunk of `rank`, which of those that keep the same part of it writes it into a checkpoint.

    `scattered`: one on the node that has least to write so far, so that the nodes share the writing (the Optimus paper,
    section 4: DP-scattered, where part m is written by rank m % DP of those that have it); else the first. All ranks of a
    stage have other parts of the same chunks, so that each of them knows what the others will write.
    """
    found, _ = _shared_writing(plans, mesh, rank, options, scattered)
    return found


def bytes_copied(
    plans: Sequence[ChunkPlan], mesh: Mesh, rank: int, options: StateConfig, *, scattered: bool
) -> Counter[int]:
    """Bytes that each rank of the stage of `rank`, whose chunks are `plans`, copies for a full checkpoint that is written
    beside the training: what the device has; the rest is written from where it lies."""
    stage = mesh.coordinate(rank, "pp")
    _, of_rank = _shared_writing(plans, mesh, rank, options, scattered)
    return Counter({each: size for each, size in of_rank.items() if mesh.coordinate(each, "pp") == stage})


def saved_bytes(plan: ChunkPlan) -> int:
    """Bytes of a rank's part of a chunk as checkpoints have it: fp32 weights and what the update rule keeps; of what is
    frozen, the weights in the type of computation."""
    return plan.length * sum(size for size, _ in _saved(plan))


def _saved(plan: ChunkPlan) -> Iterator[tuple[int, Residency]]:
    """(bytes of an element, where it is) of the weights and of what the update rule keeps."""
    yield plan.model_dtype.itemsize, plan.residency("master" if plan.has_master else "parameters.shard")
    yield from ((each.dtype.itemsize, each.residency) for each in plan.buffers if each.reported == "moments")


def _shared_writing(
    plans: Sequence[ChunkPlan], mesh: Mesh, rank: int, options: StateConfig, scattered: bool
) -> tuple[list[int], Counter[int]]:
    """(the writer of each chunk of `rank`, the bytes that each rank of its stage copies of those that are trained)."""
    stage, found = mesh.coordinate(rank, "pp"), [0] * len(plans)
    known: dict[tuple[tuple[str, ...], tuple[str, ...], bool], list[list[int]]] = {}
    of_node, of_rank, copied = Counter[int](), Counter[int](), Counter[int]()  # bytes to write, and to copy first
    for number, plan in sorted(enumerate(plans), key=lambda each: -saved_bytes(each[1])):
        layout = plan.slots[0].layout
        axes = layout.partial_axes, layout.replicated_axes, plan.rule.trains
        if axes not in known:
            alike = holders(mesh, layout, sharding_of(plan.rule, options))
            known[axes] = [ranks for ranks in alike if _on_stage(mesh, ranks, stage)]
        for place, ranks in enumerate(known[axes]):
            if not scattered:
                writer = ranks[0]
            elif "embedding" in layout.replicated_axes:  # on stages whose other chunks differ
                writer = ranks[place * len(ranks) // len(known[axes])]
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
