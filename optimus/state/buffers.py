"""Plans the buffers of a chunk: their contents, their share of the chunk, their residency and their lifetime.

A chunk is sharded in steps: first over a few ranks near one another, then each shard over more of them, and so on
(`plan.py`). A buffer of depth d holds what a rank has after d of these steps; a buffer of depth 0 holds the whole chunk.
ZeRO-1 to ZeRO-3, HSDP and ZeRO++'s secondary partition differ only in the depths of three kinds:

                                                  parameters   gradients   master weights and moments
    none (DDP)                                             0           0                            0
    optimizer (ZeRO-1)                                     0           0                            1
    gradients (ZeRO-2)                                     0           1                            1
    parameters (ZeRO-3)                                    1           1                            1
    parameters, over 2, 8 and all ranks                    1           2                            3

`RESIDENCES` says where each kind is kept. Parameters on the host have device memory only while they are used, like sharded
parameters. On the host they are sharded like master weights: each rank uploads its shard, and the device gathers all shards.

Frozen parameters have only the first kind, sharded as far as its depth says.

Pruned parameters keep, reduce and send only their unpruned elements (SAMO: `masks.py`). Modules compute with dense
parameters and produce dense gradients. The gradients are compressed when the last one of a microbatch has arrived. All other
buffers are compressed.
"""

from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from optimus.optim.rule import Rule

Residency = Literal["device", "host", "disk"]
# Always; from the first use in a step to the last or to the optimizer's; while in use; until another needs its memory.
Lifetime = Literal["always", "step", "use", "cache"]
# Contents for a pruned chunk: all elements, the unpruned elements, or the numbers that say which elements are unpruned.
Extent = Literal["whole", "compressed", "mask"]

KINDS = ("parameters", "gradients", "master", "moments", "mask")  # of buffers, as memory reports count them

# By `state.offload`, where three kinds reside: parameters, gradients between reduction and update, optimizer buffers.
RESIDENCES: dict[str, tuple[Residency, Residency, Residency]] = {
    "none": ("device", "device", "device"),
    "optimizer": ("device", "device", "host"),  # ZeRO-Offload
    "all": ("host", "host", "host"),  # Elixir
    "disk": ("host", "host", "disk"),  # ZeRO-Infinity
}

N = TypeVar("N", int, float, Tensor)

ALIGN = 32  # elements: 64 bytes in bf16, the width of vector units


class Buffer(NamedTuple):
    """One buffer of a chunk, as planned.

    Kinds: parameters, gradients, master, mask, and the state of an update rule. A kind with .shard is the part that is kept
    while the whole buffer has no memory. The kind gradients.host holds gradients that wait for the update on the host.
    """

    kind: str
    dtype: torch.dtype
    depth: int  # number of sharding steps
    residency: Residency = "device"
    lifetime: Lifetime = "always"
    align: int = ALIGN  # parameters, shards and tiles begin at multiples of this number of elements
    extent: Extent = "compressed"  # all elements where the chunk is not pruned

    def bytes(self, elements: N) -> N:
        """Returns the bytes of `elements` elements."""
        return elements * self.dtype.itemsize

    @property
    def reported(self) -> str:
        """The kind under which memory reports count this buffer."""
        kind = self.kind.removesuffix(".shard").removesuffix(".host")
        return kind if kind in KINDS else "moments"


def aligned(elements: int, align: int = ALIGN) -> int:
    """Rounds up to the next multiple of `align`."""
    return -(-elements // align) * align


class ShardDepths(NamedTuple):
    """The number of steps in which a chunk's parameters, gradients and optimizer state are sharded."""

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

    With `sends`, the gradients of each microbatch are sent to the host and accumulated there. `lifetime` is that of the
    whole parameters where the chunk keeps a shard or the host keeps them. Parameters of type fp32 that are also the rule's
    compute weights serve as the master weights.

    Gradients wait for the update in the host memory of the parameters, if both have the same type: by then the parameters
    have been used for the last time (Elixir, section 6). That makes 14 bytes per parameter in bf16. Gradients that
    accumulate on the host have memory of their own, because the parameters are still in use.

    The disk record of `prunable` parameters, which may be `pruned` later, reserves from the beginning what pruning will
    need. Thus the space on the disk is known before the first step.
    """
    home, waiting, optimizer = RESIDENCES[offload]
    kept_whole = not depths.parameters and home == "device"
    rows = [Buffer("parameters", compute, 0, lifetime="always" if kept_whole else lifetime, extent="whole")]
    rows += [] if kept_whole else [Buffer("parameters.shard", compute, depths.parameters, home)]
    if not rule.trains:
        return tuple(rows)
    rows += [Buffer("mask", torch.int32, 0, align=1, extent="mask")] if pruned else []
    apart = compute != torch.float32 or rule.averages or pruned or (prunable and optimizer == "disk")
    lasting: Lifetime = "always" if waiting == "device" else "step"
    added = not sends and (pruned or depths.gradients > 0)  # each microbatch's gradients are added to the shard
    rows += [Buffer("gradients", gradient, 0, lifetime="use" if added or sends else lasting, extent="whole")]
    rows += [Buffer("gradients.shard", gradient, depths.gradients, lifetime=lasting)] if added else []
    if waiting != "device" and (sends or not (apart and gradient == compute)):
        rows += [Buffer("gradients.host", gradient, depths.optimizer, waiting)]
    kinds = (*(["master"] if apart else []), *rule.kinds)
    return *rows, *(Buffer(kind, torch.float32, depths.optimizer, optimizer) for kind in kinds)
