"""All chunks of a model: what the training step calls."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from optimus.comm import Group, Groups
from optimus.config.tree import StateConfig
from optimus.mesh import Layout
from optimus.optim.adamw import AdamW
from optimus.state.chunk import Chunk
from optimus.state.gathering import Gathering
from optimus.state.plan import ChunkPlan, Slot, divisions, plan_chunks

_REDUCING = 2  # chunks whose long gradient buffers may be on their way to the other ranks at once

Send = Literal["broadcast", "allreduce"]


class ModelState:
    """Takes over the parameters of `module` (usually made on the meta device) and keeps their whole state in chunks.

    `layouts` says of each parameter, by name, how it lies on the mesh of `groups`. After this, `module`'s parameters are
    views into the chunks, of this rank's parts; their values are zero until `initialize` or `load`. No chunk holds
    parameters of two stages, `stage_of` by name, of a pipeline.
    """

    def __init__(
        self,
        module: nn.Module,
        layouts: Mapping[str, Layout],
        groups: Groups,
        options: StateConfig,
        *,
        compute_dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        device: torch.device,
        stage_of: Callable[[str], int] = lambda name: 0,
    ) -> None:
        self.groups = groups
        self.tile = options.tile
        self.steps = 0  # optimizer steps applied, for the bias correction of the moments
        self._overlap = options.overlap
        self._reducing: deque[Chunk] = deque()
        piece = options.coarsening and options.coarsening * options.tile

        def make(plan: ChunkPlan) -> Chunk:
            shards, copies = (groups.dividing(parts) for parts in divisions(groups.mesh, plan.replicas, options))
            return Chunk(
                plan,
                shards,
                copies,
                compute_dtype,
                gradient_dtype,
                device,
                keep=not options.release,
                piece=piece,
                started=self._limit_reductions,
            )

        stages: dict[int, dict[str, Layout]] = {}
        for name, layout in layouts.items():
            stages.setdefault(stage_of(name), {})[name] = layout
        self._of_stage = {
            stage: [make(plan) for plan in plan_chunks(those, groups.mesh, groups.rank, options)]
            for stage, those in sorted(stages.items())
        }
        self.chunks = [chunk for chunks in self._of_stage.values() for chunk in chunks]
        _replace_parameters(module, dict(made for chunk in self.chunks for made in chunk.make_parameters()))
        # Else every rank has every gradient, and finds the same norm by itself.
        self._parted = any(chunk.plan.copies < groups.world.size for chunk in self.chunks)
        self._gathering = Gathering(module, self.chunks, options.prefetch, not options.release)

    @property
    def gathers_on_use(self) -> bool:
        """Whether a forward pass, even one for evaluation, is something that all ranks must do together."""
        return any(chunk.plan.shards_parameters for chunk in self.chunks)

    def initialize(self, seed: int, std: float) -> None:
        """Initial weights by name and position."""
        for chunk in self.chunks:
            chunk.initialize(seed, std)

    def begin_step(self) -> None:
        """Set all gradients to zero; must precede the first microbatch of a step."""
        self._reducing.clear()
        self._gathering.begin_step()
        for chunk in self.chunks:
            chunk.begin_step()

    def saving(self) -> AbstractContextManager[Any]:
        """Must be around every forward pass that a backward pass follows."""
        return self._gathering.saving()

    @contextmanager
    def watching(self, watch: Callable[[Tensor], None]) -> Iterator[None]:
        """Show `watch` every tensor that forward passes inside the context save for their backward passes."""
        self._gathering.watch = watch
        try:
            yield
        finally:
            self._gathering.watch = None

    def reduce_on_arrival(self) -> None:
        """The coming backward pass is the last of the step: each chunk is reduced when its last gradient is there."""
        for chunk in self.chunks:
            chunk.reduce_on_arrival()

    def start_reduction(self, stage: int) -> None:
        """A stage of a pipeline has done its last backward pass: begin to reduce what is not on its way yet."""
        for chunk in self._of_stage.get(stage, []):
            chunk.start_reduction()

    def reduce_gradients(self) -> float:
        """Sum the gradients over the replicas; returns the Euclidean norm of all of them, each parameter counted once.

        It is not finite when any gradient is not. While one chunk is measured, others are still on their way.
        """
        square = torch.zeros((), device=self.chunks[0].parameter.device)
        for chunk in self.chunks:
            chunk.reduce_gradients()
            if "ends" in chunk.plan.slots[0].layout.same:
                self.groups.along("ends").sum(chunk.reduced)
            square += chunk.gradient_square_sum(self.tile) / (chunk.plan.copies if self._parted else 1)
        if self._parted:
            self.groups.world.sum(square)
        return float(square.sqrt())

    def step(self, rule: AdamW, lr: float, gradient_scale: float) -> None:
        """One optimizer step on every chunk; while one is updated, the parameters of those before it are gathered."""
        self.steps += 1
        for chunk in self.chunks:
            chunk.step(rule, self.steps, lr, gradient_scale, self.tile)

    def finish(self) -> None:
        """Have everything here that is under way; must precede the end of the process group."""
        for chunk in self.chunks:
            chunk.settle()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(key, tensor) of everything that a checkpoint holds, global: `model.*` are the fp32 master weights.

        All ranks must go through it together; each may drop what it does not need.
        """
        common = [chunk for chunk in self.chunks if _on_all_stages(chunk)]
        yield from self._tensors_of(common)
        rest = [chunk for chunk in self.chunks if not _on_all_stages(chunk)]
        if self.groups.mesh.pp == 1:
            yield from self._tensors_of(rest)
            return
        pipeline, own = self.groups.along("pp"), self._tensors_of(rest)
        shapes = [
            (f"{kind}.{slot.name}", slot.layout.shape)
            for chunk in rest
            for kind in chunk.buffers
            for slot in chunk.plan.slots
        ]
        sent: set[str] = set()
        for owner, theirs in enumerate(pipeline.collect(shapes)):
            for key, shape in theirs:
                tensor = next(own)[1] if owner == pipeline.rank else self.chunks[0].master.new_empty(shape)
                if key not in sent:  # both ends may hold the embedding
                    pipeline.broadcast(tensor, owner)
                    yield key, tensor
                sent.add(key)

    def _tensors_of(self, chunks: Sequence[Chunk]) -> Iterator[tuple[str, Tensor]]:
        """`tensors` of chunks, by all ranks together that have a part of them."""
        for chunk in chunks:
            for kind, part in chunk.buffers.items():
                views = chunk.views(chunk.whole(part))
                for slot in chunk.plan.slots:
                    yield f"{kind}.{slot.name}", self._join(slot.layout, views[slot.name])

    def load(self, read: Callable[[dict[str, Tensor]], None], kinds: tuple[str, ...], send: Send = "broadcast") -> int:
        """Fill the buffers of `kinds` (prefixes of `tensors`' keys), then make the compute copies anew.

        The first rank of every group of replicas reads, chunk by chunk, and sends to the others. `read` fills the global
        tensors of a dict, by key. Returns how many ranks of the job have read anything.
        """
        reads = 0
        for chunk in self.chunks:
            replicas = self.groups.along(*chunk.plan.replicas)
            for kind, part in chunk.buffers.items():
                if kind not in kinds:
                    continue
                whole = torch.zeros(chunk.plan.size, dtype=part.dtype, device=part.device)
                if replicas.rank == 0:
                    _read_parts(read, kind, chunk, whole)
                    reads += 1
                _send(replicas, whole, send)
                part.copy_(whole[chunk.plan.part])
            chunk.publish()
        readers = torch.tensor(float(reads > 0), device=self.chunks[0].parameter.device)
        self.groups.world.sum(readers)
        return int(readers)

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes allocated for parameters, gradients, master weights and moments."""
        total: Counter[str] = Counter()
        for chunk in self.chunks:
            total.update(chunk.bytes_by_kind())
        return dict(total)

    def _limit_reductions(self, chunk: Chunk) -> None:
        """A reduction has begun: let no more than a few hold their long buffers at once, or none be under way."""
        if not self._overlap:
            chunk.finish_reduction()
            return
        if chunk.plan.shards_gradients:
            self._reducing.append(chunk)
            if len(self._reducing) > _REDUCING:
                self._reducing.popleft().advance()

    def _join(self, layout: Layout, part: Tensor) -> Tensor:
        """The global tensor from the parts of the ranks that it is split over."""
        for dim, axis in reversed(layout.splits):
            group = self.groups.along(axis)
            parts = part.new_empty(group.size * len(part), *part.shape[1:])
            group.gather(parts, part.contiguous())
            part = torch.cat(parts.chunk(group.size), dim)
        return part


def _on_all_stages(chunk: Chunk) -> bool:
    """Whether it holds parameters of which every rank of a pipeline has a part."""
    return any(axis == "pp" for _, axis in chunk.plan.slots[0].layout.splits)


def _replace_parameters(module: nn.Module, made: Mapping[str, nn.Parameter]) -> None:
    """Put the new parameters in the places of the old, in every module that shares one."""
    new = {id(old): made[name] for name, old in module.named_parameters()}
    for owner in module.modules():
        for leaf, old in owner._parameters.items():
            if old is not None:
                setattr(owner, leaf, new[id(old)])


def _read_parts(read: Callable[[dict[str, Tensor]], None], kind: str, chunk: Chunk, whole: Tensor) -> None:
    """Fill this rank's part of every parameter of a chunk from the global tensors."""
    views = chunk.views(whole)

    def target(slot: Slot) -> Tensor:
        return views[slot.name] if not slot.layout.splits else whole.new_empty(slot.layout.shape)

    tensors = {f"{kind}.{slot.name}": target(slot) for slot in chunk.plan.slots}
    read(tensors)
    for slot, tensor in zip(chunk.plan.slots, tensors.values()):
        if slot.layout.splits:
            views[slot.name].copy_(tensor[slot.region])


def _send(group: Group, tensor: Tensor, how: Send) -> None:
    """Give the first rank's `tensor` to all ranks of the group, whose own holds zeros."""
    if how == "broadcast":
        group.broadcast(tensor)
    else:
        group.sum(tensor.view(torch.int32))  # as integers: a sum of floats would lose the sign of zeros
