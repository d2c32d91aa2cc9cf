"""Token dispatchers: how tokens reach experts on other ranks, and the results come back (expert parallelism).

Expert e of a layer with E experts lives on rank e // (E / N) of the N ranks along `ep`, and may be split over `etp`. Both
dispatchers are exact and drop no token. Each rank calls its layers with tokens of its own, in the same order as the others.
What autograd then leaves in an expert's gradient is the sum over the tokens of all N ranks, while all other gradients are of
this rank's tokens alone.
"""

from typing import Literal

from torch import nn

from optimus.comm import Groups
from optimus.errors import UserError
from optimus.model.moe.layer import MoeLayer
from optimus.parallel.dispatch.allgather import AllGatherDispatch
from optimus.parallel.dispatch.alltoall import AllToAllDispatch

__all__ = ["AllGatherDispatch", "AllToAllDispatch", "set_dispatch"]


def set_dispatch(
    model: nn.Module, groups: Groups, kind: Literal["allgather", "alltoall"], *, duplicates: bool = False
) -> None:
    """Give every MoE layer of `model` the dispatcher of `kind`, where the experts are divided at all (ep or etp > 1).

    `duplicates`: the ranks along `etp` come with the same tokens (alltoall only). Raises `UserError` when the experts of a
    layer cannot be divided evenly.
    """
    experts, parts = groups.along("ep"), groups.along("etp")
    if experts.size * parts.size == 1:
        return
    for name, layer in model.named_modules():
        if isinstance(layer, MoeLayer):
            if layer.expert_count % experts.size:
                raise UserError(
                    f"{layer.expert_count} experts of layer {name or 'model'} cannot be divided over ep {experts.size}: "
                    "set parallel.expert to a divisor of model.experts"
                )
            each = layer.expert_count // experts.size
            if kind == "alltoall":
                layer.dispatch = AllToAllDispatch(experts, each, parts, duplicates=duplicates)
            else:
                layer.dispatch = AllGatherDispatch(groups.along("ep", "etp"), experts.rank * each, each)
