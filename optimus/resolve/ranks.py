"""The mesh of a run, the type of its device, and the number of ranks on a node."""

import math
import os

import torch
import torch.distributed as dist

from optimus.config import RunConfig
from optimus.config.sizes import counted
from optimus.mesh import Mesh
from optimus.resolve.decision import Decided


def ranks_per_node(ranks: int) -> int:
    """Returns the launcher's number of ranks per node (LOCAL_WORLD_SIZE), by default `ranks`."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def least_ranks(config: RunConfig) -> int:
    """Returns the configured number of ranks.

    With `parallel.data: auto`, returns the minimum for the sizes of the other axes and `parallel.pipeline_stride`.
    """
    parallel = config.parallel
    others = parallel.context * math.prod(parallel.grid)
    if parallel.data != "auto":
        return parallel.pipeline * others * parallel.data
    experts = parallel.expert * _expert_tensor(config)
    return parallel.pipeline * math.lcm(experts, others, parallel.pipeline_stride or 1)


def _expert_tensor(config: RunConfig) -> int:
    return config.model.expert_tensor(config.parallel.expert_tensor, math.prod(config.parallel.grid))


def mesh_of(config: RunConfig, ranks: int, ranks_per_node: int | None = None) -> Mesh:
    """Builds the configured mesh of `ranks` ranks."""
    parallel = config.parallel
    return Mesh.from_sizes(
        ranks,
        pipeline=parallel.pipeline,
        data=None if parallel.data == "auto" else parallel.data,
        context=parallel.context,
        tensor=parallel.grid,
        expert=parallel.expert,
        expert_tensor=_expert_tensor(config),
        ranks_per_node=ranks_per_node,
        pipeline_stride=parallel.pipeline_stride,
    )


def axes(config: RunConfig, mesh: Mesh) -> Decided:
    """Decides `parallel.data: auto`, and with several stages an unset `parallel.pipeline_stride` (in ranks)."""
    parallel, values = config.parallel, dict[str, object]()
    if parallel.data == "auto":
        values["parallel.data"] = mesh.dp
    if parallel.pipeline > 1 and parallel.pipeline_stride is None:
        values["parallel.pipeline_stride"] = mesh.stage
    return Decided(values, f"what the other axes leave of {counted(mesh.size, 'rank')}")


def device(config: RunConfig, kind: str) -> Decided:
    """Decides `train.device: auto` as a device of type `kind`."""
    if config.train.device != "auto":
        return Decided()
    return Decided(
        {"train.device": kind}, "this machine's accelerator" if kind != "cpu" else "this machine has no accelerator"
    )


def ranks_sharing_memory(mesh: Mesh, device: torch.device) -> int:
    """Returns the number of ranks that share the memory of `device`.

    On an accelerator, all ranks of a node count as sharing one device if the process group uses Gloo.
    """
    shared = device.type == "cpu" or (dist.is_initialized() and dist.get_backend() == "gloo")
    return min(mesh.size, mesh.ranks_per_node or mesh.size) if shared else 1
