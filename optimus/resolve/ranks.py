"""The mesh of a run, and its ranks on nodes."""

import os

import torch
import torch.distributed as dist

from optimus.config import RunConfig
from optimus.mesh import Mesh
from optimus.resolve.decision import Decided


def ranks_per_node(ranks: int) -> int:
    """As the launcher says; of `ranks` ranks, all on this machine where there is none yet."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def mesh_of(config: RunConfig, ranks: int, ranks_per_node: int | None = None) -> Mesh:
    """The mesh of `ranks` ranks as configured. Raises `UserError` when the sizes do not fit."""
    parallel = config.parallel
    return Mesh.of(
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
    """The data axis of `parallel.data: auto`, and how far stages lie from each other; `mesh` is that of the run."""
    parallel, values = config.parallel, dict[str, object]()
    if parallel.data == "auto":
        values["parallel.data"] = mesh.dp
    if parallel.pipeline > 1 and parallel.pipeline_stride is None:
        values["parallel.pipeline_stride"] = mesh.stage
    return Decided(values, f"of {mesh.size} ranks what the other axes leave")


def device(config: RunConfig, kind: str) -> Decided:
    """The device of `train.device: auto`, which is of this kind."""
    if config.train.device != "auto":
        return Decided()
    return Decided(
        {"train.device": kind}, "the accelerator that is here" if kind != "cpu" else "no accelerator is here"
    )


def sharers(mesh: Mesh, device: torch.device) -> int:
    """Ranks that take their memory from that of `device`: on a CPU, or an accelerator that they share, all of a node."""
    shared = device.type == "cpu" or (dist.is_initialized() and dist.get_backend() == "gloo")
    return min(mesh.size, mesh.ranks_per_node or mesh.size) if shared else 1
