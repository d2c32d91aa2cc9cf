"""The mesh of a run, and the placement of its ranks on nodes."""

import os

import torch
import torch.distributed as dist

from optimus.config import RunConfig
from optimus.mesh import Mesh
from optimus.resolve.decision import Decided


def ranks_per_node(ranks: int) -> int:
    """Returns the number of ranks per node that the launcher has set (LOCAL_WORLD_SIZE), by default all `ranks`."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def mesh_of(config: RunConfig, ranks: int, ranks_per_node: int | None = None) -> Mesh:
    """Builds the configured mesh of `ranks` ranks. Raises `UserError` when the configured sizes do not fit the number of
    ranks."""
    parallel = config.parallel
    return Mesh.from_sizes(
        ranks,
        pipeline=parallel.pipeline,
        data=None if parallel.data == "auto" else parallel.data,
        context=parallel.context,
        tensor=parallel.grid,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
        ranks_per_node=ranks_per_node,
        pipeline_stride=parallel.pipeline_stride,
    )


def axes(config: RunConfig, mesh: Mesh) -> Decided:
    """Decides the size of the data axis for `parallel.data: auto` and, with a pipeline, an open distance in ranks
    between neighbouring stages. `mesh` is the mesh of the run."""
    parallel, values = config.parallel, dict[str, object]()
    if parallel.data == "auto":
        values["parallel.data"] = mesh.dp
    if parallel.pipeline > 1 and parallel.pipeline_stride is None:
        values["parallel.pipeline_stride"] = mesh.stage
    return Decided(values, f"what the other axes leave of {mesh.size} ranks")


def device(config: RunConfig, kind: str) -> Decided:
    """Decides `train.device: auto` as a device of type `kind`."""
    if config.train.device != "auto":
        return Decided()
    return Decided(
        {"train.device": kind}, "this machine's accelerator" if kind != "cpu" else "this machine has no accelerator"
    )


def ranks_sharing_memory(mesh: Mesh, device: torch.device) -> int:
    """Returns the number of ranks that share the memory of `device`. On a CPU, or with Gloo as the backend, all ranks
    of a node count as sharing the memory. Otherwise returns 1."""
    shared = device.type == "cpu" or (dist.is_initialized() and dist.get_backend() == "gloo")
    return min(mesh.size, mesh.ranks_per_node or mesh.size) if shared else 1
