"""Plans each buffer of a chunk: contents, fraction of the chunk, memory (device, host or disk) and lifetime.

Ranks shard a chunk in steps (`plan.py`): the first step divides the chunk over neighbouring replicas, and each further
step divides every shard over more ranks. A buffer of depth d holds a rank's shard after d steps; a buffer of depth 0
holds the whole chunk. The depths of three kinds of buffers distinguish ZeRO-1 to ZeRO-3 and ZeRO++'s secondary
partition:

                                                  parameters   gradients   master weights and moments
    none (DDP)                                             0           0                            0
    optimizer (ZeRO-1)                                     0           0                            1
    gradients (ZeRO-2)                                     0           1                            1
    parameters (ZeRO-3)                                    1           1                            1
    parameters, over 2, 8 and all ranks                    1           2                            3

`RESIDENCES` gives the memory of the three kinds. Parameters on the host have device memory only temporarily, like
sharded parameters. Parameters on the host are sharded like master weights: each rank uploads its shard, and the ranks
all-gather the shards on the device.

A chunk of frozen parameters has only parameter buffers.

A pruned chunk reduces, sends and updates only its unpruned elements (SAMO: `masks.py`). All buffers except whole
parameters, whole gradients and the mask are compressed.
"""

from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from optimus.optim.rule import Rule

Residency = Literal["device", "host", "disk"]
# The time during which a buffer has memory. "step": from the buffer's first use in a step to the last use or to the
# optimizer's use; "use": during each use; "cache": until another chunk needs the memory.
Lifetime = Literal["always", "step", "use", "cache"]
# The contents of a pruned chunk's buffer: all elements, the unpruned elements, or the mask of the unpruned elements.
Extent = Literal["dense", "compressed", "mask"]

KINDS = ("parameters", "gradients", "master", "moments", "mask")  # kinds of buffers in memory reports

# For each value of `state.offload`: the memory of parameters, of gradients between reduction and update, and of optimizer
# buffers.
RESIDENCES: dict[str, tuple[Residency, Residency, Residency]] = {
    "none": ("device", "device", "device"),
    "optimizer": ("device", "device", "host"),  # ZeRO-Offload
    "all": ("host", "host", "host"),  # Elixir
    "disk": ("host", "host", "disk"),  # ZeRO-Infinity
}

N = TypeVar("N", int, float, Tensor)

ALIGN = 32  # elements: 64 bytes in bf16, the width of vector units


class Buffer(NamedTuple):
    """The plan of one buffer of a chunk.

    The kinds are parameters, gradients, master, mask, and the kinds of the update rule's state. A kind that ends in
    .shard is a rank's shard, which may have memory while the whole buffer has none. The kind gradients.host holds
    gradients that wait for the update on the host.
    """

    kind: str
    dtype: torch.dtype
    depth: int  # number of sharding steps
    residency: Residency = "device"
    lifetime: Lifetime = "always"
    align: int = ALIGN  # parameters, and the shards and tiles of a flat tiling, begin at multiples of this number
    extent: Extent = "compressed"  # "compressed" means all elements where the chunk is not pruned

    def bytes(self, elements: N) -> N:
        """Returns the size of `elements` elements in bytes."""
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
    """Returns the buffers of a chunk that `rule` updates, or only the parameters if `rule` does not train.

    With `sends`, the host receives and accumulates the gradients of each microbatch. `lifetime` applies to whole
    parameters whose shards are stored separately or on the host. Parameters of type fp32 serve as the master weights,
    unless the rule averages weights, the chunk is pruned, or the chunk is `prunable` with its optimizer state on a
    disk.

    Offloaded gradients of the parameters' type wait for the update in the host memory of the parameters (Elixir,
    section 6), if the master weights are a separate buffer. Gradients that accumulate on the host have separate memory,
    because the step still uses the parameters.

    The disk record of `prunable` parameters, which may be `pruned` later, reserves the space of their master weights
    from the beginning.
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
    added = not sends and (pruned or depths.gradients > 0)  # each microbatch adds its gradients to the shard
    rows += [Buffer("gradients", gradient, 0, lifetime="use" if added or sends else lasting, extent="dense")]
    rows += [Buffer("gradients.shard", gradient, depths.gradients, lifetime=lasting)] if added else []
    if waiting != "device" and (sends or not (apart and gradient == compute)):
        rows += [Buffer("gradients.host", gradient, depths.optimizer, waiting)]
    kinds = (*(["master"] if apart else []), *rule.kinds)
    return *rows, *(Buffer(kind, torch.float32, depths.optimizer, optimizer) for kind in kinds)
