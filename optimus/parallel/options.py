"""Options for the parallelization of a model, in addition to the sizes of the mesh."""

from dataclasses import dataclass, field
from typing import Literal

from optimus.optim.losses import TokenLoss
from optimus.parallel.degrees import SAME_DEGREES, TensorDegrees
from optimus.parallel.recompute import Recomputation


@dataclass(frozen=True)
class StageOptions:
    """Options for parallelization and recomputation.

    With `sequence`, the rows of the residual stream are sharded over `tp_out`. With `overlap`, a projection's
    communication in the backward pass overlaps with a matmul. With `vocabulary`, all pipeline ranks have a shard of the
    vocabulary. With `duplicates`, all ranks of a tensor-parallel grid send the same tokens to the experts. `loss` is
    the loss of tokens, None for cross-entropy. `degrees` has the layers with fewer tensor-parallel ranks.
    """

    force_balanced: bool = False
    sequence: bool = False
    degrees: TensorDegrees = SAME_DEGREES
    overlap: bool = True
    vocabulary: bool = False
    context_method: Literal["ring", "ulysses"] = "ring"
    duplicates: bool = False
    dispatch: Literal["alltoall", "allgather"] = "alltoall"
    recomputation: Recomputation = field(default_factory=Recomputation)
    keep_collectives: bool = True
    loss: TokenLoss | None = None
