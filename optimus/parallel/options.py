"""How a model is divided over a mesh, beyond the mesh's sizes."""

from dataclasses import dataclass, field
from typing import Literal

from optimus.parallel.recompute import Recomputation


@dataclass(frozen=True)
class StageOptions:
    """How a model is divided, beyond the sizes of the mesh, and what is recomputed.

    `sequence`: the rows of the residual stream are split over `tp_out`. `overlap`: communication of a projection goes on
    beside its products. `vocabulary`: all ranks of the pipeline have a part of it. `duplicates`: the ranks of a
    tensor-parallel grid send the same tokens to the experts.
    """

    force_balanced: bool = False
    sequence: bool = False
    overlap: bool = True
    vocabulary: bool = False
    context_method: Literal["ring", "ulysses"] = "ring"
    duplicates: bool = False
    dispatch: Literal["alltoall", "allgather"] = "alltoall"
    recomputation: Recomputation = field(default_factory=Recomputation)
    keep_collectives: bool = True
