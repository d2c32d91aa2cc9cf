"""The layout of a published run, in the terms that all sources share."""

from dataclasses import dataclass
from typing import Literal

from optimus.mesh import Mesh
from optimus.pipeline.schedules import DEFAULT
from optimus.state.plan import Shard


@dataclass(frozen=True)
class Setting:
    """The layout that a row states.

    `recompute` holds the parts of every `recompute_every`-th block that are recomputed. The parts are those of a
    configuration, or 'act' (between the products), 'scores' (the attention's core alone), or 'products' (all but that
    core and every second matrix product).
    """

    mesh: Mesh
    context: int
    micro_batch: int
    microbatches: int
    schedule: str = DEFAULT
    stages_per_rank: int = 1
    sequence: bool = True
    shard: Shard = "none"
    shard_ranks: int | None = None
    release: bool = True  # reshards gathered parameters after the forward pass
    recompute: frozenset[str] = frozenset()
    recompute_every: int = 1
    repeat_collectives: bool = False  # in recomputation
    dispatch: Literal["alltoall", "allgather"] = "alltoall"
    precision: str = "bf16"

    @property
    def itemsize(self) -> float:
        """Returns the bytes of a parameter in its compute type."""
        return 4.0 if self.precision == "fp32" else 2.0

    @property
    def global_batch(self) -> int:
        """Returns the sequences of a step."""
        return self.micro_batch * self.microbatches * self.mesh.dp

    @property
    def tokens(self) -> int:
        """Returns the tokens of a step."""
        return self.global_batch * self.context

    @property
    def stages(self) -> int:
        """Returns the stages of the pipeline."""
        return self.mesh.pp * self.stages_per_rank
