"""The buffers of a chunk: what each holds, how much of the chunk, and when it has memory.

A chunk is sharded in steps: over a few ranks near one another, each of the parts over more of them, and so on
(`plan.py`). A buffer of depth d is what a rank has after d of these steps; of depth 0, the whole chunk. What is called
ZeRO-1 to ZeRO-3, HSDP and ZeRO++'s secondary partition differ in the depths of three kinds alone:

                                                  parameters   gradients   master weights and moments
    none (DDP)                                             0           0                            0
    optimizer (ZeRO-1)                                     0           0                            1
    gradients (ZeRO-2)                                     0           1                            1
    parameters (ZeRO-3)                                    1           1                            1
    parameters, over 2, 8 and all ranks                    1           2                            3

Frozen parameters have the first kind alone, sharded as far as it says.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from optimus.optim.rule import Rule

# There always; from its first use in a step to the optimizer's; while in use.
Residency = Literal["device", "step", "use"]
BufferStatus = Literal["absent", "coming", "here", "leaving"]
BufferEvent = Literal["open", "gather", "arrive", "reduce", "free"]


ALIGN = 32  # elements: 64 bytes in bf16, as vector units like it


class Buffer(NamedTuple):
    """One buffer of a chunk, as planned. Kinds: parameters, gradients, master, those that an update rule keeps; with .shard,
    what is kept of absent ones."""

    kind: str
    dtype: torch.dtype
    depth: int  # in how many steps it is sharded
    residency: Residency = "device"
    align: int = ALIGN  # parameters, shards and tiles of it begin at multiples of so many elements

    @property
    def reported(self) -> str:
        """As what memory reports count it."""
        kind = self.kind.removesuffix(".shard")
        return kind if kind in ("parameters", "gradients", "master") else "moments"


def aligned(elements: int, align: int = ALIGN) -> int:
    """The next multiple."""
    return -(-elements // align) * align


class Depths(NamedTuple):
    """In how many steps a chunk is sharded: for its parameters, its gradients, and for what the optimizer keeps."""

    parameters: int
    gradients: int
    optimizer: int


def buffers(
    depths: Depths, compute: torch.dtype, gradient: torch.dtype, rule: Rule, *, reshard: bool = True
) -> tuple[Buffer, ...]:
    """Those of a chunk that `rule` updates; of one that it does not, nothing but the parameters.

    Without `reshard`, parameters stay from their first use to the optimizer step. Where they are of type fp32 and what the
    rule computes with, they are the master weights themselves.
    """
    rows: list[Buffer] = []
    long = [
        ("parameters", compute, depths.parameters, "use" if reshard else "step"),
        ("gradients", gradient, depths.gradients, "use"),
    ]
    for kind, dtype, depth, used in long if rule.trains else long[:1]:
        rows.append(Buffer(kind, dtype, 0, used if depth else "device"))  # type: ignore[arg-type]
        rows += [Buffer(f"{kind}.shard", dtype, depth)] if depth else []
    apart = rule.trains and (compute != torch.float32 or rule.averages)
    kinds = (*(["master"] if apart else []), *rule.kinds)
    return *rows, *(Buffer(kind, torch.float32, depths.optimizer) for kind in kinds)


# What may happen to what a buffer holds. A buffer that is absent has no memory, or memory whose content is out of date.
TRANSITIONS: dict[tuple[BufferStatus, BufferEvent], BufferStatus] = {
    ("absent", "gather"): "coming",  # its parts are on their way from other ranks
    ("coming", "arrive"): "here",
    ("absent", "open"): "here",  # it begins at zero
    ("here", "open"): "here",
    ("here", "reduce"): "leaving",  # the other ranks are given their parts
    ("leaving", "free"): "absent",
    ("here", "free"): "absent",
    ("absent", "free"): "absent",
}


class ManagedBuffer:
    """A buffer as it is: a `tensor` of the whole chunk, and where its content is.

    Unless it `stays`, its memory is freed while it is absent; views of it are valid again when it has memory.
    """

    def __init__(self, tensor: Tensor, kind: str, *, stays: bool) -> None:
        self.tensor, self._kind, self._stays = tensor, kind, stays
        self.status: BufferStatus = "here"

    def go(self, event: BufferEvent) -> None:
        """Take the way of the table. Raises `RuntimeError` where there is none."""
        place = TRANSITIONS.get((self.status, event))
        if place is None:
            raise RuntimeError(f"{event} of {self._kind} that are {self.status}: a mistake in the order of the calls")
        if not self._stays and (self.status == "absent") != (place == "absent"):
            storage = self.tensor.untyped_storage()
            storage.resize_(0 if place == "absent" else self.tensor.numel() * self.tensor.element_size())
        if event == "open" and self.status == "absent":
            self.tensor.zero_()
        self.status = place
