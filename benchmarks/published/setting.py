"""How a published run divided its work, in the words that the sources share."""

from dataclasses import dataclass
from typing import Literal

from optimus.mesh import Mesh
from optimus.pipeline.schedules import DEFAULT
from optimus.state.plan import Shard


@dataclass(frozen=True)
class Setting:
    """What a row says of its layout. `recompute` is what a block makes again in its backward pass, as in a configuration, or
    'act' (what lies between its products), 'scores' (the attention's core alone), 'products' (all but that core and every
    second matrix product); of every `recompute_every`-th block."""

    mesh: Mesh
    context: int
    micro_batch: int
    microbatches: int
    schedule: str = DEFAULT
    stages_per_rank: int = 1
    sequence: bool = True
    shard: Shard = "none"
    shard_ranks: int | None = None
    release: bool = True  # of gathered parameters, after the forward pass
    recompute: frozenset[str] = frozenset()
    recompute_every: int = 1
    repeat_collectives: bool = False  # in recomputation
    dispatch: Literal["alltoall", "allgather"] = "alltoall"
    precision: str = "bf16"

    @property
    def itemsize(self) -> float:
        """Bytes of a parameter as it is computed with."""
        return 4.0 if self.precision == "fp32" else 2.0

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        return self.micro_batch * self.microbatches * self.mesh.dp

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.context

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return self.mesh.pp * self.stages_per_rank
