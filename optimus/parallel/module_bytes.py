"""Activation bytes of a model's modules on one rank, measured on tensors without floating-point data."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from math import ceil, inf, lcm
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from optimus.config import Architecture
from optimus.kernels.expert_mlp import PADDING
from optimus.kernels.gradient_buffer import TensorBuffer
from optimus.kernels.linear_cross_entropy import block_rows
from optimus.mesh import Mesh
from optimus.model import Batch
from optimus.model.build import causal_model
from optimus.model.ensemble import Ensemble
from optimus.model.moe.statistics import RouterStats
from optimus.model.units import Unit, in_turn, units_of
from optimus.parallel.degrees import SAME_DEGREES
from optimus.parallel.layouts import parameter_layouts
from optimus.parallel.options import StageOptions
from optimus.parallel.parallelize import parallelize
from optimus.parallel.recompute import Recomputation, Recompute
from optimus.parallel.shapes import ShapeGroups, Shapes
from optimus.step_context import StepContext

_ROWS = 8 * PADDING  # from this number of rows per expert, padding is negligible

End = Literal["embedding", "positions", "head"]
ModulePosition = tuple[int, int]  # a module's position in a block: the index of its unit, and its index within the unit
_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


class ModuleSetting(NamedTuple):
    """The settings common to all modules."""

    model: Architecture
    mesh: Mesh
    options: StageOptions
    context: int
    dtype: torch.dtype
    load: float  # tokens of this rank's experts, or of one expert if `ep` is 1, relative to the mean
    teachers: tuple[Architecture, ...] = ()
    splits: bool = False

    @classmethod
    @lru_cache(maxsize=4096)
    def canonical(
        cls,
        config: Architecture,
        mesh: Mesh,
        options: StageOptions,
        context: int,
        itemsize: int,
        load: float,
        teachers: tuple[Architecture, ...] = (),
        splits: bool = False,
    ) -> "ModuleSetting":
        """Returns a setting that equivalent meshes share."""
        experts, tensor = mesh.ep * mesh.etp, mesh.cp * mesh.tp
        mesh = replace(mesh, pp=1, dp=lcm(tensor, experts) // tensor, ranks_per_node=None, pipeline_stride=None)
        options = replace(options, recomputation=Recomputation(), degrees=SAME_DEGREES)
        return cls(config, mesh, options, context, _DTYPES[itemsize], load, teachers, splits)

    @property
    def without_experts(self) -> "ModuleSetting":
        """The setting without expert parallelism."""
        options = replace(self.options, duplicates=False, dispatch="alltoall")
        return self._replace(
            mesh=replace(self.mesh, dp=1, ep=1, etp=self.model.expert_tensor(1, self.mesh.tp)),
            options=options,
            load=1.0,
        )

    def with_tensor(self, ranks: int) -> "ModuleSetting":
        """Returns the setting of layers with `ranks` tensor-parallel ranks, for their share of the sequences."""
        mesh = self.mesh
        mesh = replace(mesh, tp=ranks, dp=lcm(mesh.cp * ranks, mesh.ep * mesh.etp) // (mesh.cp * ranks))
        return self._replace(mesh=mesh, options=replace(self.options, sequence=ranks > 1))

    @property
    def for_experts(self) -> "ModuleSetting":
        """The setting for the experts, without context parallelism."""
        mesh = self.mesh
        alone = replace(mesh, cp=1, dp=lcm(mesh.tp, mesh.ep * mesh.etp) // mesh.tp)
        return self._replace(mesh=alone, context=self.context // mesh.cp)

    def stream(self, sequences: int) -> Tensor:
        """Returns this rank's shard of the residual stream for `sequences` sequences, without data."""
        rows = sequences * self.context // self.mesh.cp // (self.mesh.tp_out if self.options.sequence else 1)
        return torch.empty(rows, self.model.stream_width // self.mesh.tp_in, dtype=self.dtype, device="meta")

    def batch(self, sequences: int) -> Batch:
        """Returns a batch of `sequences` sequences of token 0."""
        return Batch(torch.zeros(sequences, self.context, dtype=torch.int64))


class ModuleBytes(NamedTuple):
    """Bytes of one module for some number of sequences."""

    kind: str
    saved_input: float  # bytes of the module's input, 0 if autograd does not save the input
    saved: float  # bytes saved for the backward pass, including the input
    works: Sequence[float]  # transient bytes after each operation of the backward pass, or their peak alone
    waiting: float = 0.0  # bytes for deferred weight gradients after the backward pass
    source: tuple[int, ...] = ()  # position of the first module with the same input

    @property
    def work(self) -> float:
        """Peak of the transient bytes in the backward pass; the head's peak may be in the forward pass."""
        return max(self.works)


@lru_cache(maxsize=16384)
def block_bytes(
    setting: ModuleSetting, layer: int, sequences: int, *, experts: bool, again: bool = False
) -> dict[ModulePosition, ModuleBytes]:
    """Returns the bytes of modules in block `layer`, by position.

    With `experts`, the result has only the block's MoE layer, if any; otherwise, the result has all other modules. With
    `again`, the backward pass recomputes each module, with cached results of collectives.
    """
    config, mesh, least = setting.model, setting.mesh, 1
    if not experts:
        setting = setting.without_experts
    elif number := config.experts_of(layer):
        setting = setting.for_experts
        rows = setting.context * mesh.ep * (config.experts_per_token or 1) / mesh.tp
        least = ceil(_ROWS * number / rows)
    else:
        return {}
    return _grown(partial(_block_bytes, setting, layer, experts, again), least, sequences)


@lru_cache(maxsize=4096)
def end_bytes(setting: ModuleSetting, what: End, sequences: int) -> ModuleBytes:
    """Returns the bytes of modules outside the blocks.

    `what` is "positions" (position tensors of the blocks), "embedding" (embedding and these tensors) or "head" (final
    norm, output layer and loss).
    """
    setting, rows = setting.without_experts, 1
    if what == "head":  # enough rows for the output layer to have several blocks of rows
        rows = 2 * block_rows(-(-setting.model.vocab // setting.mesh.tp_out))
    least = ceil(rows * setting.mesh.cp / setting.context)
    return _grown(partial(_end_bytes, setting, what), least, sequences)[0, 0]


def _grown(
    measure: Callable[[int], dict[ModulePosition, ModuleBytes]], least: int, sequences: int
) -> dict[ModulePosition, ModuleBytes]:
    """Returns `measure(sequences)`, with only the peak of the transient bytes.

    For more than 2 `least` sequences, extrapolates linearly from `least` and 2 `least` sequences.
    """
    if sequences <= 2 * least:
        return {position: module._replace(works=[module.work]) for position, module in measure(sequences).items()}
    one, two, times = measure(least), measure(2 * least), sequences / least - 1

    def grow(few: float, more: float) -> float:
        return few + times * (more - few)

    def grow_module(few: ModuleBytes, more: ModuleBytes) -> ModuleBytes:
        # With more blocks of rows, the output layer has more operations.
        both = zip(few.works, more.works) if len(few.works) == len(more.works) else [(few.work, more.work)]
        work = max(grow(*works) for works in both)
        given, saved, waiting = map(
            grow, (few.saved_input, few.saved, few.waiting), (more.saved_input, more.saved, more.waiting)
        )
        return few._replace(saved_input=given, saved=saved, works=[work], waiting=waiting)

    return {position: grow_module(one[position], two[position]) for position in one}


@lru_cache(maxsize=1024)
def _block_bytes(
    setting: ModuleSetting, layer: int, experts: bool, again: bool, sequences: int
) -> dict[ModulePosition, ModuleBytes]:
    stage = stage_of(setting)
    config, ranks = stage.model.config, setting.mesh.ep
    # The overloaded experts: all experts of this rank, or one expert if this rank has all experts.
    busy = config.experts_of(layer) // ranks if ranks > 1 else 1
    with stage.shapes(setting.load, busy, sequences) as shapes:
        batch, number = setting.batch(sequences), stage.numbers[layer]
        positions_S, positions = stage.model.local_positions(batch)
        run = stage.model.stage(range(number, number + 1), first=False, last=False)
        measuring = _Measuring(stage.model.blocks[number], shapes, step=stage.step, experts=experts, again=again)
        return measuring.measure(
            setting.stream(sequences),
            lambda x_TH: run(batch, positions_S, positions, x_TH, None),
            splits=setting.splits,
        )


@lru_cache(maxsize=1024)
def _end_bytes(setting: ModuleSetting, what: End, sequences: int) -> dict[ModulePosition, ModuleBytes]:
    stage = stage_of(setting)
    model, batch = stage.model, setting.batch(sequences)
    with stage.shapes() as shapes:
        x_TH = setting.stream(sequences).requires_grad_()
        start = shapes.alive
        positions_S, positions = model.local_positions(batch)
        made = x_TH
        if what == "embedding":
            made, _ = model.stage(range(0), first=True, last=False)(batch, positions_S, positions, None, None)
        elif what == "head":
            start = shapes.alive
            shapes.history.clear()
            soft = stage.teacher.soft_targets(batch, positions_S, 1.0) if stage.teacher is not None else None
            end = model.stage(range(len(model.blocks), len(model.blocks)), first=False, last=True)
            hidden_TH, _ = end(batch, positions_S, positions, x_TH * 1, None)
            losses = model.losses_of(hidden_TH, None, batch, positions_S, 1.0, None, soft)
            del hidden_TH
            made = losses.cross_entropy if losses.divergence is None else losses.cross_entropy + losses.divergence
            del soft, losses
        saved = shapes.alive - start - (made.nbytes if made is not x_TH else 0)
        if what != "head":  # the head's forward pass may have the peak: it runs while the blocks' activations are saved
            shapes.history.clear()
        deferred = _backward(stage.step, [made], [torch.empty_like(made)], splits=setting.splits)
        there, work = shapes.alive, [each - start - saved for each in shapes.history]
        deferred.clear()
        waiting = there - shapes.alive
    model.zero_grad()
    return {(0, 0): ModuleBytes(what, 0, saved, work, waiting)}


class ShapeStage:
    """A model on the first rank of a mesh. A `Transformer` has only one block of each group of equal blocks."""

    def __init__(self, setting: ModuleSetting) -> None:
        config, options = setting.model, setting.options
        groups, examples = ShapeGroups(setting.mesh), sorted(set(config.alike))
        self.step, self.sent = groups.step, groups.sent
        self._buffers: dict[nn.Parameter, TensorBuffer] = {}
        with torch.device("meta"), torch.no_grad():
            model = causal_model(config, layers=examples).to(device="meta", dtype=setting.dtype)
            self.model = parallelize(model, groups, options, self._buffers)
            layouts = parameter_layouts(self.model, sequence=options.sequence, duplicates=options.duplicates)
            for name, parameter in self.model.named_parameters():
                own = parameter.new_empty(layouts[name].local_shape(setting.mesh))
                parameter.set_(own)  # type: ignore[call-overload]  # torch's annotations only allow storages
                gradient = torch.empty_like(parameter, dtype=torch.float32)
                self._buffers[parameter] = TensorBuffer(gradient, groups.step)
            teachers = [causal_model(each).to(setting.dtype) for each in setting.teachers]
        numbers = range(len(examples)) if len(self.model.blocks) == len(examples) else examples
        self.numbers = dict(zip(examples, numbers, strict=True))
        self.teacher = Ensemble(teachers) if teachers else None

    def shapes(self, load: float = 1.0, busy: int = 1, repeats: int = 1) -> Shapes:
        """Returns a `Shapes` context that counts neither parameters nor their gradients, nor the model's buffers."""
        shapes = Shapes(load, busy, repeats)
        shapes.ignore(*self.model.parameters(), *self.model.buffers(), *(each.grad for each in self._buffers.values()))
        shapes.ignore(*(() if self.teacher is None else self.teacher.parameters()))
        return shapes


stage_of = lru_cache(maxsize=32)(ShapeStage)


class _Run(NamedTuple):
    position: ModulePosition
    kind: str
    source: int  # the number of the input's storage
    made: int  # number of storages created until the module returned


class _Measuring:
    """Runs a block and attributes bytes to the block's modules.

    The transient bytes exclude the bytes saved by the module itself and by earlier modules; an input of several modules
    counts once among these bytes. Storages that the block creates between two modules count with the later module.
    """

    def __init__(self, block: nn.Module, shapes: Shapes, *, step: StepContext, experts: bool, again: bool) -> None:
        self._block, self._shapes, self._step = block, shapes, step
        self._experts, self._again = experts, again
        self._runs: list[_Run] = []
        # For each backward pass of a module: (run, earlier operations, earlier deferred computations).
        self._begun: list[tuple[int, int, int]] = []
        for unit in units_of(block):
            unit.run_by(partial(self._run_unit, unit))

    def measure(
        self, x_TH: Tensor, run: Callable[[Tensor], tuple[Tensor, RouterStats | None]], *, splits: bool
    ) -> dict[ModulePosition, ModuleBytes]:
        """Returns the bytes by position. `run` runs the block on the residual stream."""
        shapes, leaf, gradient = self._shapes, x_TH.requires_grad_(), torch.empty_like(x_TH)
        start, before = shapes.alive, shapes.made
        # `* 1` stands for a neighbouring block: autograd frees gradients as between blocks.
        x_TH, stats = run(leaf * 1)
        sums = () if stats is None else (stats.probabilities_E, stats.z)
        outputs = [x_TH * 1, *(each for each in sums if each.requires_grad)]
        last = shapes.number(outputs[0])
        del x_TH, stats, sums
        saved_sizes = {number: size for number, size in shapes.sizes.items() if before < number != last}
        shapes.history.clear()
        deferred = _backward(self._step, outputs, [gradient, *map(torch.empty_like, outputs[1:])], splits=splits)
        self._block.zero_grad()
        return self._found(saved_sizes, start + outputs[0].nbytes, deferred)

    def _run_unit(self, unit: Unit, x: Tensor, *args: Any) -> Any:
        row = self._runs[-1].position[0] + 1 if self._runs else 0
        calls = [
            (partial(self._run, (row, at), kind, module), module is unit.module)
            for at, (kind, module) in enumerate(unit.steps)
        ]
        return in_turn(calls, x, *args)

    def _run(self, position: ModulePosition, kind: str, module: nn.Module, x: Tensor, *args: Any) -> Any:
        """Runs a measured module. Replaces any other module by an operation that saves nothing."""
        if self._again:  # a separate tensor: the input must not be another module's cached result of a collective
            x = x * 1
        if (kind == "moe") == self._experts:
            unit = Unit(kind, module)
            Recompute(Recomputation(), self._step).arrange_unit(unit, (kind,) if self._again else ())
            result = unit(x, *args)
        else:
            result = (x * 1, _BESIDE[kind](module)) if kind in _BESIDE else x * 1
        y: Tensor = result[0] if isinstance(result, tuple) else result
        y.register_hook(partial(self._begin, len(self._runs)))
        self._runs.append(_Run(position, kind, self._shapes.number(x), self._shapes.made))
        return result

    def _begin(self, number: int, _: Tensor) -> None:
        self._block.zero_grad()  # the package `state` accounts for the gradients of parameters
        history = self._shapes.history
        self._begun.append((number, len(history) if self._begun else 0, len(self._step.deferred or ())))
        history.append(self._shapes.alive)

    def _found(self, saved_sizes: dict[int, int], start: int, deferred: list[Any]) -> dict[ModulePosition, ModuleBytes]:
        """Returns the bytes by position. `saved_sizes` maps the numbers of the saved storages to bytes."""
        runs, history = self._runs, self._shapes.history
        first = {run.source: run.position for run in reversed(runs)}
        given = [saved_sizes.get(run.source, 0) for run in runs]
        made = [
            sum(size for number, size in saved_sizes.items() if low < number <= high and number not in first)
            for low, high in pairwise([0, *(run.made for run in runs[:-1]), inf])
        ]
        own = [new + (old if first[run.source] == run.position else 0) for run, new, old in zip(runs, made, given)]
        below = [start + there for there in accumulate(own)]
        found, waited, last = dict[ModulePosition, ModuleBytes](), 0, (0, len(history), len(deferred))
        for (number, at, done), (_, end, later) in pairwise([*self._begun, last]):
            run, there = runs[number], self._shapes.alive
            works = [alive - below[number] - waited for alive in history[at:end]]
            del deferred[: later - done]
            waiting = there - self._shapes.alive
            waited += waiting
            if (run.kind == "moe") == self._experts:
                saved = given[number] + made[number]
                found[run.position] = ModuleBytes(
                    run.kind, given[number], saved, works, waiting, source=first[run.source]
                )
        return found


def _backward(step: StepContext, outputs: list[Tensor], gradients: list[Tensor], *, splits: bool) -> list[Any]:
    with step.deferring() if splits else nullcontext([]) as deferred:
        torch.autograd.backward(outputs, gradients)
    return deferred


def _no_stats(module: Any) -> RouterStats:
    zeros_E = torch.zeros(len(module.router.weight), device="meta")
    return RouterStats(zeros_E, zeros_E, zeros_E.sum(), 0)


# The second result of a module, by kind.
_BESIDE: dict[str, Callable[[nn.Module], RouterStats | None]] = {"mlp": lambda _: None, "moe": _no_stats}
