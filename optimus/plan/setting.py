"""How a run is divided over ranks: what the search varies, as far as time and memory depend on it."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

from optimus.config.tree import ShardRanks, StateConfig
from optimus.mesh import Mesh
from optimus.optim.rule import Rule
from optimus.pipeline.schedules import DEFAULT, schedules
from optimus.plan.collectives import Place
from optimus.state.plan import Shard

# Of each parameter of `blocks.examples`, in their order: its update rule, and the share of the blocks alike in which it has
# that; several, where the rules differ.
Rules = tuple[tuple[tuple[Rule, float], ...], ...]


class Saving(NamedTuple):
    """Checkpoints: steps between full ones and between those of the weights alone (None: there are none), whether they are
    written beside the training, whether ranks that hold the same share the writing, and whether the copies that are then
    written lie in the ranks' own memory."""

    every: int | None = None
    weights_every: int | None = None
    asynchronous: bool = False
    scattered: bool = True
    copied: bool = False


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a run says of itself, and the search leaves as it is."""

    precision: str = "bf16"
    imbalance: float = 1.0  # tokens of the busiest rank's experts, to the mean
    dispatch: Literal["auto", "alltoall", "allgather"] = "alltoall"
    ulysses: bool = False
    release: bool = True
    repeat_collectives: bool = False
    saving: Saving = field(default_factory=Saving)
    rules: Rules = ()  # update rules; empty: AdamW for all
    tile: int = StateConfig().tile  # elements that are updated at a time
    chunk: int | None = None  # elements of a chunk at most; None: the size that wastes least


@dataclass(frozen=True)
class Setting(Given):
    """One way of running an architecture. `recompute` is what a block makes again in its backward pass: 'norm', 'attention',
    'mlp', 'moe' (the feed-forward part), 'act' (what lies between its products), 'scores' (the attention's core alone),
    'products' (all but the attention's core and every second matrix product) or 'block', of every `recompute_every`-th."""

    mesh: Mesh
    context: int
    micro_batch: int
    microbatches: int
    schedule: str = DEFAULT
    stages_per_rank: int = 1
    sequence: bool = True
    shard: Shard = "none"
    shard_ranks: int | ShardRanks | None = None
    shard_over: Literal["replicas", "data"] = "replicas"
    recompute: frozenset[str] = frozenset()
    recompute_every: int = 1
    divided_vocabulary: bool = False
    blocks: tuple[int, ...] | None = None  # of each stage; None: by their time

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

    @property
    def ends_apart(self) -> bool:
        """Whether the first and the last stage are on different ranks of a pipeline."""
        return self.mesh.pp > 1 and schedules()[self.schedule].placement == "loop"

    def place(self, *axes: str) -> Place:
        """Where the ranks along `axes` lie."""
        return place(self.mesh, axes)


@lru_cache(maxsize=8192)
def place(mesh: Mesh, axes: tuple[str, ...]) -> Place:
    """Where the ranks of a group along `axes` of `mesh` lie; ranks between them are on inner axes."""
    if axes == ("pp",):
        return Place(mesh.pp, mesh.block)
    inner = {
        "tp_out": 1,
        "tp_in": mesh.tp_out,
        "cp": mesh.tp,
        "dp": mesh.tp * mesh.cp,
        "etp": 1,
        "ep": mesh.etp,
        "edp": mesh.etp * mesh.ep,
    }
    size, stride = mesh.axis_size(*axes), min(inner[axis] for axis in axes)
    near = mesh.block // stride
    if size <= near:
        return Place(size, stride)
    far = mesh.block * mesh.pp
    return Place(size, stride, near, far) if near > 1 else Place(size, far)
