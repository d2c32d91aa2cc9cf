"""The section `parallel`."""

import math
import re
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from optimus.pipeline.schedules import DEFAULT, schedules
from optimus.plugins import NameIn
from optimus.section import Section

ScheduleName = Annotated[str, NameIn(schedules())]

_DEEPENED = " or ".join(row.name for row in schedules().values() if row.deepens)
_STAGES = ", ".join(
    f"for {row.name} {row.stages}{' or more' * row.any_stages}" for row in schedules().values() if row.stages > 1
)


LayerRange = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) in (int, float) else value)]


class LayersConfig(Section):
    """Options of a range of layers that differ from the rest of the model."""

    layers: LayerRange = Field(description="A layer, such as 3, or the first and the last one, such as 0-7; from 0.")
    recompute: list[Literal["norm", "attention", "mlp", "moe", "block"]] | None = None
    """Activation recomputation in each of these layers, instead of `recompute` and `recompute_every`; []: none."""
    tensor: int | None = Field(None, gt=0)
    """Tensor-parallel ranks of each of these layers, a divisor of the run's `tensor`. These ranks compute a share of the
    sequences of a microbatch. Needs sequence parallelism; experts keep their layout."""

    @property
    def range(self) -> range:
        """The numbers of the layers."""
        first, _, last = self.layers.partition("-")
        return range(int(first), int(last or first) + 1)

    @model_validator(mode="after")
    def _valid(self) -> "LayersConfig":
        if re.fullmatch(r"\d+(-\d+)?", self.layers) is None or not self.range:
            raise ValueError(
                f"layers {self.layers}: give a layer, such as 3, or the first and the last one, such as 0-7"
            )
        if self.recompute is None and self.tensor is None:
            raise ValueError(f"layers {self.layers}: set recompute, tensor or both, or remove the range")
        return self


class ParallelConfig(Section):
    """The division of model and data among the ranks."""

    data: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    """Data-parallel ranks, each with a share of every global batch; auto: all ranks that the other axes leave."""
    tensor: Annotated[int, Field(gt=0)] | list[int] = 1
    """Tensor-parallel ranks: a number (Megatron-LM), or a grid [outputs, inputs] that shards weight matrices in both
    dims (AxoNN's G_x and G_y)."""
    sequence: bool | None = None
    """With tensor parallelism: sequence parallelism for norms and residual stream. Default: true if the model supports
    sequence parallelism."""
    overlap: bool = True
    """With tensor parallelism: overlap the communication of input gradients with the weight gradients (AxoNN's OAR)."""
    context: int = Field(1, gt=0, description="Context-parallel ranks, each with its part of every sequence.")
    context_method: Literal["ring", "ulysses"] = "ring"
    """ring: keys and values travel from rank to rank (ring attention); ulysses: all-to-all, which gives each rank some
    heads of whole sequences."""
    expert: int = Field(1, gt=0)
    """Expert-parallel ranks, folded over the data-, context- and tensor-parallel ranks."""
    expert_tensor: int = Field(
        1, gt=0, description="Expert-tensor-parallel ranks, which shard each expert; a divisor of tensor."
    )
    pipeline: int = Field(1, gt=0, description="Pipeline-parallel ranks, each with some of the blocks.")
    schedule: ScheduleName = DEFAULT
    """With pipeline: the pipeline schedule; `optimus schedule` draws a schedule."""
    stages_per_rank: int = Field(1, gt=0, description=f"With pipeline: stages on each rank: {_STAGES}, else 1.")
    microbatches: Annotated[int, Field(gt=0)] | Literal["auto"] | None = None
    """With pipeline: microbatches of a step on each data-parallel rank. auto: the fewest with a simulated bubble of at
    most 10 %, if possible. Default: train.micro_batch decides."""
    executor: Literal["scheduled", "message-driven"] = "scheduled"
    """With pipeline. scheduled: follow the schedule; message-driven: compute as inputs arrive (AxoNN)."""
    max_in_flight: Annotated[int, Field(gt=0)] | list[int] | None = None
    """With `executor: message-driven`. A number: microbatches in flight (AxoNN's pipeline_limit). A list: the largest
    number of live activations of each stage. Default: the number of stages."""
    warmup_factor: float = Field(
        1.0,
        ge=1,
        description=f"With schedule {_DEEPENED}: factor of the usual live activations; a larger factor hides more jitter.",
    )
    layers_per_stage: list[int] | None = None
    """With pipeline: stage partition, blocks per stage. Default: balanced."""
    pipeline_stride: Annotated[int, Field(gt=0)] | None = None
    """With pipeline: distance in ranks from one stage to the next, a multiple of `context` x `tensor` and of `expert` x
    `expert_tensor`. Default: the number of ranks of a stage."""
    layers: list[LayersConfig] = Field([])
    """Ranges of layers with strategies of their own (Galvatron); `optimus plan --layers` finds them. All other layers
    follow `recompute`."""
    vocabulary: bool = False
    """With pipeline: vocabulary parallelism over all stages, which balances memory and computation over the stages."""
    vocabulary_algorithm: Literal[1, 2] = 1
    """With `vocabulary`: the algorithm of Yeung et al. (2024). 1: the gradients of the output layer wait for the softmax
    over all stages; 2: only the weight gradients wait, with one communication barrier less in each microbatch, and the
    saved activations of one microbatch less."""

    @property
    def grid(self) -> tuple[int, int]:
        """The numbers of tensor-parallel ranks that shard weights: (over outputs, over inputs)."""
        return (self.tensor, 1) if isinstance(self.tensor, int) else (self.tensor[0], self.tensor[1])

    @property
    def splits_sequence(self) -> bool:
        """True with sequence parallelism. With `sequence` None, True with tensor parallelism, for any model."""
        return self.grid != (1, 1) if self.sequence is None else self.sequence

    @property
    def tensor_ranges(self) -> tuple[tuple[range, int], ...]:
        """The ranges of layers with fewer tensor-parallel ranks than the rest of the model, and the numbers of ranks."""
        return tuple((each.range, each.tensor) for each in self.layers if each.tensor not in (None, self.grid[0]))

    @property
    def sharing_groups(self) -> int:
        """The least common multiple of the numbers of groups that share the sequences of a microbatch in some layer."""
        return math.lcm(*(self.grid[0] // ranks for _, ranks in self.tensor_ranges))

    @property
    def split_vocabulary(self) -> int:
        """The algorithm of vocabulary parallelism over the stages; 0 for a vocabulary that the stages do not split."""
        return self.vocabulary_algorithm if self.vocabulary else 0

    @property
    def stages(self) -> int:
        """The number of stages of the pipeline."""
        return self.pipeline * self.stages_per_rank

    @model_validator(mode="after")
    def _sizes(self) -> "ParallelConfig":
        if isinstance(self.tensor, list) and (len(self.tensor) != 2 or min(self.tensor) < 1):
            raise ValueError(f"tensor {self.tensor} must be a number, or a list of two numbers [outputs, inputs]")
        named = sorted((each.range.start, each.range.stop, each.layers) for each in self.layers)
        for (_, stop, before), (start, _, after) in pairwise(named):
            if start < stop:
                raise ValueError(f"layers {before} and layers {after} overlap: give each layer once")
        tensor = self.grid[0] * self.grid[1]
        if self.sequence and tensor == 1:
            raise ValueError("sequence splits tokens over the tensor-parallel ranks, but tensor is 1: remove it")
        if self.expert_tensor > tensor:
            raise ValueError(
                f"expert_tensor {self.expert_tensor} is larger than tensor {tensor}: set it to at most {tensor}, and "
                "use expert for the rest"
            )
        if tensor % self.expert_tensor:
            raise ValueError(f"expert_tensor {self.expert_tensor} does not divide tensor {tensor}: choose a divisor")
        return self
