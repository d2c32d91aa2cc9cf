"""How a run is divided over ranks: what the search varies, as far as time and memory depend on it."""

from dataclasses import dataclass
from typing import Literal

from optimus.mesh import Mesh
from optimus.state.plan import Shard

Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv"]


@dataclass(frozen=True)
class Setting:
    """One way of running an architecture. `recompute` is what a block makes again in its backward pass: 'norm', 'attention',
    'mlp', 'moe' (the feed-forward part), 'act' (what lies between its products), 'scores' (the attention's core alone),
    'products' (all but the attention's core and every second matrix product) or 'block', of every `recompute_every`-th.
    `offload` is what waits on the host: 'optimizer', 'parameters' (their shards), 'inputs' (of blocks that are recomputed),
    'scores' or 'experts' (what these keep)."""

    mesh: Mesh
    context: int
    micro_batch: int
    microbatches: int
    schedule: Schedule = "1f1b"
    stages_per_rank: int = 1
    sequence: bool = True
    ulysses: bool = False
    shard: Shard = "none"
    shard_ranks: int | None = None
    shard_over: Literal["replicas", "data"] = "replicas"
    release: bool = True
    dispatch: Literal["alltoall", "allgather"] = "alltoall"
    recompute: frozenset[str] = frozenset()
    recompute_every: int = 1
    repeat_collectives: bool = False
    offload: frozenset[str] = frozenset()
    precision: str = "bf16"
    divided_vocabulary: bool = False
    imbalance: float = 1.0  # tokens of the busiest rank's experts, to the mean
    blocks: tuple[int, ...] | None = None  # of each stage; None: as `even` says
    pipeline_inside: bool = False  # ranks that hold the same experts are further apart than those of a pipeline
    even: bool = False  # stages by the number of blocks, as other programs cut them; else by time, as this library does
    ends_count: bool = False  # embedding and loss then count as a block each

    @property
    def itemsize(self) -> float:
        """Bytes of a parameter as it is computed with, and of an activation."""
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
    def rows(self) -> int:
        """Tokens of a microbatch on a rank, before tensor parallelism."""
        return self.micro_batch * self.context // self.mesh.cp

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return self.mesh.pp * self.stages_per_rank

    def stride(self, axis: str) -> int:
        """Ranks from one to the next along an axis of the mesh."""
        mesh = self.mesh
        return {
            "tp_out": 1,
            "tp_in": mesh.tp_out,
            "cp": mesh.tp,
            "dp": mesh.tp * mesh.cp,
            "etp": 1,
            "ep": mesh.etp,
            "edp": mesh.etp * mesh.ep * (mesh.pp if self.pipeline_inside else 1),
            "pp": mesh.etp * mesh.ep if self.pipeline_inside else mesh.size // mesh.pp,
        }[axis]
