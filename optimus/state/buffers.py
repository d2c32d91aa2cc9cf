"""The buffers of a chunk: what each holds, how much of the chunk, where, and when it has memory.

A chunk is sharded in steps: over a few ranks near one another, each of the parts over more of them, and so on
(`plan.py`). A buffer of depth d is what a rank has after d of these steps; of depth 0, the whole chunk. What is called
ZeRO-1 to ZeRO-3, HSDP and ZeRO++'s secondary partition differ in the depths of three kinds alone:

                                                  parameters   gradients   master weights and moments
    none (DDP)                                             0           0                            0
    optimizer (ZeRO-1)                                     0           0                            1
    gradients (ZeRO-2)                                     0           1                            1
    parameters (ZeRO-3)                                    1           1                            1
    parameters, over 2, 8 and all ranks                    1           2                            3

Where these are kept is `RESIDENCES`. Parameters on the host have memory on the device while they are used, as those that
are sharded, and are sharded there as master weights are: each rank brings its part, and they are gathered on the device.

Frozen parameters have the first kind alone, sharded as far as it says.

Of pruned parameters only the unpruned elements are kept, reduced and sent (SAMO: `masks.py`). Modules compute with dense
parameters, and give dense gradients, which are compressed when the last one of a microbatch is there; all else is
compressed.
"""

from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from optimus.optim.rule import Rule

Residency = Literal["device", "host", "disk"]
# Always; from its first use in a step to its last or to the optimizer's; while in use; until another needs its memory.
Lifetime = Literal["always", "step", "use", "cache"]
# Of a pruned chunk: all elements, the unpruned ones, or the numbers that say which these are.
Extent = Literal["whole", "compressed", "mask"]

KINDS = ("parameters", "gradients", "master", "moments", "mask")  # of buffers, as memory reports count them

# By `state.offload`: of parameters, of gradients between their reduction and the update, of the optimizer's buffers.
RESIDENCES: dict[str, tuple[Residency, Residency, Residency]] = {
    "none": ("device", "device", "device"),
    "optimizer": ("device", "device", "host"),  # ZeRO-Offload
    "all": ("host", "host", "host"),  # Elixir
    "disk": ("host", "host", "disk"),  # ZeRO-Infinity
}

N = TypeVar("N", int, float, Tensor)

ALIGN = 32  # elements: 64 bytes in bf16, as vector units like it


class Buffer(NamedTuple):
    """One buffer of a chunk, as planned. Kinds: parameters, gradients, master, those that an update rule keeps; with .shard,
    what is kept of absent ones; gradients.host, those that wait for the update on the host; mask."""

    kind: str
    dtype: torch.dtype
    depth: int  # in how many steps it is sharded
    residency: Residency = "device"
    lifetime: Lifetime = "always"
    align: int = ALIGN  # parameters, shards and tiles of it begin at multiples of so many elements
    extent: Extent = "compressed"  # of a chunk that is not pruned all elements, too

    def bytes(self, elements: N) -> N:
        """Of so many elements."""
        return elements * self.dtype.itemsize

    @property
    def reported(self) -> str:
        """As what memory reports count it."""
        kind = self.kind.removesuffix(".shard").removesuffix(".host")
        return kind if kind in KINDS else "moments"


def aligned(elements: int, align: int = ALIGN) -> int:
    """The next multiple."""
    return -(-elements // align) * align


class Depths(NamedTuple):
    """In how many steps a chunk is sharded: for its parameters, its gradients, and for what the optimizer keeps."""

    parameters: int
    gradients: int
    optimizer: int


def buffers(
    depths: Depths,
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
    """Those of a chunk that `rule` updates; of one that it does not, nothing but the parameters. `sends`: the gradients of
    each microbatch, to be added up on the host.

    `lifetime` is that of whole parameters where a part or the host keeps them. Where they are of type fp32 and what the rule
    computes with, they are the master weights themselves. Gradients wait for the update in the place of the parameters on
    the host, whose last use has been by then, if they are of one type (Elixir, section 6): 14 bytes per parameter in bf16.
    Those that are added up there have a place of their own: the parameters are still in use.

    Of `prunable` parameters, which may be `pruned` later, a record on a disk has from the beginning what it will have then:
    so the space that it takes up is known before the first step.
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
    added = not sends and (pruned or depths.gradients > 0)  # those of each microbatch to what is kept of them
    rows += [Buffer("gradients", gradient, 0, lifetime="use" if added or sends else lasting, extent="whole")]
    rows += [Buffer("gradients.shard", gradient, depths.gradients, lifetime=lasting)] if added else []
    if waiting != "device" and (sends or not (apart and gradient == compute)):
        rows += [Buffer("gradients.host", gradient, depths.optimizer, waiting)]
    kinds = (*(["master"] if apart else []), *rule.kinds)
    return *rows, *(Buffer(kind, torch.float32, depths.optimizer, optimizer) for kind in kinds)
