"""Plans the buffers of a chunk: dtype, sharding, memory and lifetime.

Depth d of a buffer means this rank's shard after d sharding steps; depth 0 means the whole chunk. Depths of a
trained chunk with more than 8 replicas, without offloading:

                                                  parameters   gradients   master weights and moments
    none (DDP)                                             0           0                            0
    optimizer (ZeRO-1)                                     0           0                            1
    gradients (ZeRO-2)                                     0           1                            1
    parameters (ZeRO-3)                                    1           1                            1
    parameters, over 2, 8 and all ranks                    1           2                            3
"""

from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from optimus.optim.rule import Rule

Residency = Literal["device", "host", "disk"]
# The time during which a buffer has memory: "step" from the first use in a step until the step no longer needs the
# buffer, "use" during each use, "cache" from a use until another chunk needs the memory.
Lifetime = Literal["always", "step", "use", "cache"]
# The contents of a pruned chunk's buffer: all elements, the unpruned elements, or the mask.
Extent = Literal["dense", "compressed", "mask"]

KINDS = ("parameters", "gradients", "master", "moments", "mask")

# By `state.offload`: where the parameters, the gradients between reduction and update, and the optimizer buffers are.
RESIDENCES: dict[str, tuple[Residency, Residency, Residency]] = {
    "none": ("device", "device", "device"),
    "optimizer": ("device", "device", "host"),  # ZeRO-Offload
    "all": ("host", "host", "host"),  # Elixir
    "disk": ("host", "host", "disk"),  # ZeRO-Infinity
}

N = TypeVar("N", int, float, Tensor)

ALIGN = 32  # elements


class Buffer(NamedTuple):
    """The plan of one buffer of a chunk.

    The kinds are parameters, gradients, master, mask, and the kinds of the update rule's state. The suffix
    .shard marks the shard that this rank stores (at depth 0, the whole chunk). The kind gradients.host is for gradients
    on the host.
    """

    kind: str
    dtype: torch.dtype
    depth: int  # number of sharding steps
    residency: Residency = "device"
    lifetime: Lifetime = "always"
    align: int = ALIGN  # in elements
    extent: Extent = "compressed"  # "compressed" means all elements where the chunk is not pruned

    def bytes(self, elements: N) -> N:
        """Returns the bytes of `elements` elements."""
        return elements * self.dtype.itemsize

    @property
    def reported(self) -> str:
        """The kind under which memory reports count this buffer."""
        kind = self.kind.removesuffix(".shard").removesuffix(".host")
        return kind if kind in KINDS else "moments"


def aligned(elements: int, align: int = ALIGN) -> int:
    """Rounds `elements` up to a multiple of `align`."""
    return -(-elements // align) * align


class ShardDepths(NamedTuple):
    """The number of sharding steps of a chunk's parameters, gradients and optimizer state."""

    parameters: int
    gradients: int
    optimizer: int


def buffers(
    depths: ShardDepths,
    compute: torch.dtype,
    gradient: torch.dtype,
    rule: Rule,
    *,
    lifetime: Lifetime = "use",
    offload: str = "none",
    pruned: bool = False,
    prunable: bool = False,
    sends: bool = False,
) -> tuple[Buffer, ...]:
    """Returns the buffers of a chunk with the update rule `rule`; only the parameters if `rule` does not train.

    `lifetime` applies to the gathered copy of parameters that are sharded or on the host. With `sends`, the host
    accumulates the gradients of each microbatch. A `prunable` chunk may be `pruned` later.

    Without `sends`, offloaded gradients of the parameters' dtype wait for the update in the host memory of the
    parameters, if there are master weights (Elixir, section 6).
    """
    home, waiting, optimizer = RESIDENCES[offload]
    keeps_unsharded = not depths.parameters and home == "device"
    rows = [Buffer("parameters", compute, 0, lifetime="always" if keeps_unsharded else lifetime, extent="dense")]
    rows += [] if keeps_unsharded else [Buffer("parameters.shard", compute, depths.parameters, home)]
    if not rule.trains:
        return tuple(rows)
    rows += [Buffer("mask", torch.int32, 0, align=1, extent="mask")] if pruned else []
    apart = compute != torch.float32 or rule.averages or pruned or (prunable and optimizer == "disk")
    lasting: Lifetime = "always" if waiting == "device" else "step"
    added = not sends and (pruned or depths.gradients > 0)
    rows += [Buffer("gradients", gradient, 0, lifetime="use" if added or sends else lasting, extent="dense")]
    rows += [Buffer("gradients.shard", gradient, depths.gradients, lifetime=lasting)] if added else []
    if waiting != "device" and (sends or not (apart and gradient == compute)):
        rows += [Buffer("gradients.host", gradient, depths.optimizer, waiting)]
    kinds = (*(["master"] if apart else []), *rule.kinds)
    return *rows, *(Buffer(kind, torch.float32, depths.optimizer, optimizer) for kind in kinds)
