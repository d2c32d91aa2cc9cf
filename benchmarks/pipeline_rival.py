"""The stages of a pipeline, run by our executor and by torch.distributed.pipelining, for `bench pipeline`.

Both run the same modules with the same kernels, and accumulate gradients in the same tensors; only the executors
differ. For split backward passes torch gets our deferred weight gradients by its own hook (`dw_builder`), because its
own split would compute fused operations twice.

Legend: B sequences of a step, S positions, T rows of the residual stream, H columns of it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from optimus.comm import Groups
from optimus.config import RunConfig
from optimus.kernels.gradient_buffer import GradientBuffer, TensorBuffer
from optimus.model import Batch, Losses, Transformer
from optimus.model.architecture import own_model
from optimus.model.attention import AttentionPositions
from optimus.model.init import initialize
from optimus.parallel.options import StageOptions
from optimus.parallel.parallelize import parallelize
from optimus.pipeline.staged import PipelineStages
from optimus.resolve.ranks import mesh_of
from optimus.resolve.stages import partition_of
from optimus.step_context import StepContext
from optimus.training.stages import stages_of

Step = Callable[[Tensor], Tensor]  # tokens [B, S] of a step to the losses of its microbatches, on the last stage's rank

# Our schedules to torch's. Its interleaved zero-bubble schedule with one stage per rank is ZB-H1.
TORCH: dict[str, type[PipelineScheduleSingle] | type[PipelineScheduleMulti]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


def make_stages(config: RunConfig) -> PipelineStages:
    """Returns this rank's stages, initialised, in fp32. Gradients accumulate in `.grad` of the parameters."""
    groups = Groups(mesh_of(config, dist.get_world_size()))
    buffers: dict[nn.Parameter, GradientBuffer] = {}
    model = Transformer(own_model(config.model, "bench"))
    initialize(model, config.train.seed, config.model.init_std)
    partition = partition_of(config, groups.mesh, groups.rank)
    staged = stages_of(model, partition, config, groups, torch.float32, torch.device("cpu"))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        buffers[parameter] = TensorBuffer(parameter.grad, groups.step)
    parallelize(model, groups, StageOptions(), buffers, rows=[stage.row for stage in staged.stages.values()])
    return staged


def ours(staged: PipelineStages, config: RunConfig) -> Step:
    """Returns the step of our executor, as configured."""
    objective = _CrossEntropy(_microbatches(config), config.train.micro_batch * (config.train.sequence_length - 1))

    def step(tokens_BS: Tensor) -> Tensor:
        each = Batch(tokens_BS).split(config.train.micro_batch)
        reported = staged.train_microbatches(each, objective, _Plain())
        return torch.stack(reported) if reported else torch.empty(0)

    return step


class _CrossEntropy:
    """The mean over the microbatches, as an `Objective`."""

    add_rows = None

    def __init__(self, microbatches: int, count: int) -> None:
        self.scale, self.count = 1 / microbatches, float(count)

    def __call__(self, losses: Losses) -> tuple[Tensor, Tensor]:
        return losses.cross_entropy * self.scale, losses.cross_entropy.detach()


class _Plain:
    """A `Gradients` that leaves gradients in `.grad`."""

    def backward(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        return nullcontext()

    def reduce_on_arrival(self, stage: int) -> None: ...
    def start_reduction(self, stage: int) -> None: ...


def torchs(staged: PipelineStages, config: RunConfig) -> Step:
    """Returns the step of torch's executor, with its schedule of the configured name."""
    model = cast(Transformer, staged.model)
    last, microbatches = len(staged.partition.blocks) - 1, _microbatches(config)
    positions_S, positions = model.local_positions(Batch(torch.empty(1, config.train.sequence_length)))

    def loss_of(x_TH: Tensor, tokens_BS: Tensor) -> Tensor:
        return model.losses_of(model.normalise(x_TH), None, Batch(tokens_BS), positions_S).cross_entropy / microbatches

    modules = {
        stage: _Module(cast(nn.Module, staged.stages[stage].row), positions, model.embedding if stage == 0 else None)
        for stage in staged.partition.local_stages
    }
    stages = [_TorchStage(module, stage, last + 1, model.step) for stage, module in modules.items()]
    kind = TORCH[config.parallel.schedule]
    given: Any = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    schedule = kind(given, microbatches, loss_fn=loss_of, scale_grads=False)

    def step(tokens_BS: Tensor) -> Tensor:
        losses: list[Tensor] = []
        inputs = (tokens_BS,) if staged.partition.has_first else ()
        target = tokens_BS if staged.partition.has_last else None
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        return torch.stack(losses).detach() * microbatches if losses else torch.empty(0)

    return step


def _microbatches(config: RunConfig) -> int:
    return config.train.global_batch // config.train.micro_batch


class _Module(nn.Module):
    """A stage in torch's form, with one tensor in and one out. The first stage has an `embedding`."""

    def __init__(self, blocks: nn.Module, positions: AttentionPositions, embedding: nn.Module | None) -> None:
        super().__init__()
        self.blocks, self.embedding, self._positions = blocks, embedding, positions

    def forward(self, given: Tensor) -> Tensor:
        x_TH = given if self.embedding is None else self.embedding(given.flatten())
        return self.blocks(x_TH, self._positions)[0]


class _TorchStage(PipelineStage):
    """A stage whose weight gradients are deferred as ours are."""

    def __init__(self, module: _Module, stage: int, stages: int, context: StepContext) -> None:
        super().__init__(module, stage, stages, torch.device("cpu"), dw_builder=self._take_deferred)
        self._context = context
        self._deferred: list[Callable[[], None]] = []

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if full_backward:
            super().backward_one_chunk(bwd_chunk_id, loss, True, last_backward)
            return
        with self._context.deferring() as self._deferred:
            super().backward_one_chunk(bwd_chunk_id, loss, False, last_backward)

    def _take_deferred(self) -> Callable[[], None]:
        deferred, self._deferred = self._deferred, []

        def run() -> None:
            for add in deferred:
                add()

        return run
