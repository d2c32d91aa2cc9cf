"""Bytes that the modules of a model keep and hold, measured: each is run once, forward and backward, by shapes alone.

They are made with the parts that a mesh gives them and with one rank's parameters, and run on tensors that have shapes only
(`shapes.py`). Blocks of the same shapes are measured once, and few sequences tell how many more go on: after every operation
the bytes there grow with their number.

Experts are taken to get equally many tokens, or a multiple of the mean; tokens choose them at random.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from math import ceil, lcm
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from optimus.config import ModelConfig
from optimus.kernels.expert_mlp import PADDING
from optimus.kernels.gradient_buffer import TensorBuffer
from optimus.kernels.linear_cross_entropy import block_rows
from optimus.mesh import Mesh
from optimus.model import Batch, Transformer
from optimus.model.attention import AttentionPositions
from optimus.model.ensemble import Ensemble
from optimus.model.moe.statistics import RouterStats
from optimus.model.units import Unit, units_of
from optimus.parallel.layouts import parameter_layouts
from optimus.parallel.parallelize import StageOptions, parallelize
from optimus.parallel.recompute import Recomputation, Recompute
from optimus.parallel.shapes import ShapeGroups, Shapes
from optimus.step_context import StepContext

_ROWS = 8 * PADDING  # of an expert from which on what is padded matters little

End = Literal["embedding", "places", "head"]
Place = tuple[int, int]  # of a module in a block: in which row of modules that are run together, and where in it
_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


class ModuleSetting(NamedTuple):
    """What is the same for all modules: the model, how it is divided, how long sequences are, and how busy experts are."""

    model: ModelConfig
    mesh: Mesh
    options: StageOptions
    context: int
    dtype: torch.dtype
    load: float  # tokens of this rank's experts, to the mean
    teachers: tuple[ModelConfig, ...] = ()  # that the output layer asks, as an ensemble
    splits: bool = False  # whether the gradients of weights are found later than those of inputs

    @classmethod
    @lru_cache(maxsize=4096)
    def of(
        cls,
        config: ModelConfig,
        mesh: Mesh,
        options: StageOptions,
        context: int,
        itemsize: int,
        load: float,
        teachers: tuple[ModelConfig, ...] = (),
        splits: bool = False,
    ) -> "ModuleSetting":
        """That of all meshes whose ranks have equally much to do."""
        experts, tensor = mesh.ep * mesh.etp, mesh.cp * mesh.tp
        mesh = replace(mesh, pp=1, dp=lcm(tensor, experts) // tensor, ranks_per_node=None, pipeline_stride=None)
        options = replace(options, recomputation=Recomputation())
        return cls(config, mesh, options, context, _DTYPES[itemsize], load, teachers, splits)

    @property
    def without_experts(self) -> "ModuleSetting":
        """The same for all that the way to divide experts does not change."""
        options = replace(self.options, duplicates=False, dispatch="alltoall")
        return self._replace(mesh=replace(self.mesh, dp=1, ep=1, etp=1), options=options, load=1.0)

    @property
    def of_experts(self) -> "ModuleSetting":
        """The same for experts, to which a context-parallel rank is one with shorter sequences."""
        mesh = self.mesh
        alone = replace(mesh, cp=1, dp=lcm(mesh.tp, mesh.ep * mesh.etp) // mesh.tp)
        return self._replace(mesh=alone, context=self.context // mesh.cp)

    def stream(self, sequences: int) -> Tensor:
        """The residual stream of so many sequences."""
        rows = sequences * self.context // self.mesh.cp // (self.mesh.tp_out if self.options.sequence else 1)
        return torch.empty(rows, self.model.hidden // self.mesh.tp_in, dtype=self.dtype, device="meta")


class ModuleBytes(NamedTuple):
    """Of one module, run with some number of sequences."""

    kind: str
    given: float  # its input, if it is kept
    saved: float  # from the forward to the backward pass, its input included
    works: Sequence[float]  # what there is besides, after each operation of the backward pass
    waiting: float = 0.0  # after it, for the gradients of the weights, which are found later

    @property
    def work(self) -> float:
        """The most that there is besides."""
        return max(self.works)

    @property
    def summed_up(self) -> "ModuleBytes":
        """With the most of what there is besides alone."""
        return self._replace(works=[self.work])


@lru_cache(maxsize=16384)
def block_bytes(
    setting: ModuleSetting, layer: int, sequences: int, *, experts: bool, again: bool = False
) -> dict[Place, ModuleBytes]:
    """Those of the experts of block `layer` with so many sequences, if it has any, or of its other modules, in their order.

    `again`: each is run again in the backward pass, and what its collectives gave is cached.
    """
    config, mesh, least = setting.model, setting.mesh, 1
    if not experts:  # what does not depend on how they are divided is measured once
        setting = setting.without_experts
    elif number := config.experts_of(layer):
        setting = setting.of_experts
        rows = setting.context * mesh.ep * (config.experts_per_token or 1) / mesh.tp
        least = ceil(_ROWS * number / rows)
    else:
        return {}
    found = _grown(partial(_block_bytes, setting, layer, experts, again), least, sequences)
    return {place: module.summed_up for place, module in found.items()}


@lru_cache(maxsize=4096)
def end_bytes(setting: ModuleSetting, what: End, sequences: int) -> ModuleBytes:
    """Of what is before the blocks, with the embedding or without, or of the last norm and the output layer."""
    setting, rows = setting.without_experts, 1
    if what == "head":  # from there on it works in several blocks of rows
        rows = 2 * block_rows(-(-setting.model.vocab // setting.mesh.tp_out))
    least = ceil(rows * setting.mesh.cp / setting.context)
    return _grown(partial(_end_bytes, setting, what), least, sequences)[0, 0].summed_up


def _grown(measure: Callable[[int], dict[Place, ModuleBytes]], least: int, sequences: int) -> dict[Place, ModuleBytes]:
    """With any number of sequences: from the bytes of `least` and of twice as many, where there are more."""
    if sequences <= 2 * least:
        return measure(sequences)
    one, two, times = measure(least), measure(2 * least), sequences / least - 1

    def grow(few: float, more: float) -> float:
        return few + times * (more - few)

    def grow_module(few: ModuleBytes, more: ModuleBytes) -> ModuleBytes:
        # Operations go in step, but for the output layer's, of which there are more for more blocks of rows.
        both = zip(few.works, more.works) if len(few.works) == len(more.works) else [(few.work, more.work)]
        work = max(grow(*works) for works in both)
        given, saved, waiting = map(grow, few[1:3] + few[4:], more[1:3] + more[4:])
        return ModuleBytes(few.kind, given, saved, [work], waiting)

    return {place: grow_module(one[place], two[place]) for place in one}


@lru_cache(maxsize=1024)
def _block_bytes(
    setting: ModuleSetting, layer: int, experts: bool, again: bool, sequences: int
) -> dict[Place, ModuleBytes]:
    """Of its experts alone, or of all other modules."""
    stage = _Stage.of(setting)
    config, ranks = stage.model.config, setting.mesh.ep
    # Where this rank has all experts, one of them is busy.
    busy = config.experts_of(layer) // ranks if ranks > 1 else 1
    with stage.shapes(setting.load, busy, sequences) as shapes:
        _, places = stage.model.places(_batch(setting, sequences))
        return stage.runner.measure(
            stage.blocks[layer],
            setting.stream(sequences),
            places,
            shapes,
            experts=experts,
            again=again,
            splits=setting.splits,
        )


@lru_cache(maxsize=1024)
def _end_bytes(setting: ModuleSetting, what: End, sequences: int) -> dict[Place, ModuleBytes]:
    stage = _Stage.of(setting)
    model, batch = stage.model, _batch(setting, sequences)
    with stage.shapes() as shapes:
        x_TH = setting.stream(sequences).requires_grad_()
        start = shapes.alive
        positions_S, places = model.places(batch)
        made = x_TH
        if what == "embedding":
            made = model.embedded(batch.tokens_BS[:, positions_S].flatten(), places)
        elif what == "head":
            start = shapes.alive
            shapes.history.clear()
            soft = stage.teacher.soft_targets(batch, positions_S, 1.0) if stage.teacher is not None else None
            losses = model.losses_of(x_TH * 1, None, batch, positions_S, 1.0, None, soft)
            made = losses.cross_entropy if losses.divergence is None else losses.cross_entropy + losses.divergence
            del soft, losses
        kept = shapes.alive - start - (made.nbytes if made is not x_TH else 0)
        if what != "head":  # which holds most in its forward pass, when all else is there already
            shapes.history.clear()
        waiting = stage.runner.backward([made], [torch.empty_like(made)], shapes, splits=setting.splits)
        work = [each - start - kept for each in shapes.history]
    model.zero_grad()
    return {(0, 0): ModuleBytes(what, 0, kept, work, waiting)}


def _batch(setting: ModuleSetting, sequences: int) -> Batch:
    return Batch(torch.zeros(sequences, setting.context, dtype=torch.int64))


class _Stage:
    """A model on the first rank of a mesh, of each kind of block one; its modules are run by `runner`."""

    @classmethod
    @lru_cache(maxsize=32)
    def of(cls, setting: ModuleSetting) -> "_Stage":
        return cls(setting)

    def __init__(self, setting: ModuleSetting) -> None:
        config, options = setting.model, setting.options
        groups, examples = ShapeGroups(setting.mesh), sorted(set(config.alike))
        self.runner = _Measuring(groups.step)
        self._buffers: dict[nn.Parameter, TensorBuffer] = {}
        with torch.device("meta"), torch.no_grad():
            model = Transformer(config, layers=examples).to(setting.dtype)
            self.model = parallelize(model, groups, options, self._buffers)
            layouts = parameter_layouts(self.model, sequence=options.sequence, duplicates=options.duplicates)
            for name, parameter in self.model.named_parameters():
                own = parameter.new_empty(layouts[name].local_shape(setting.mesh))
                parameter.set_(own)  # type: ignore[call-overload]  # torch declares storages only
                gradient = torch.empty_like(parameter, dtype=torch.float32)
                self._buffers[parameter] = TensorBuffer(gradient, groups.step)
            teachers = [Transformer(each).to(setting.dtype) for each in setting.teachers]
        self.blocks = dict(zip(examples, self.model.blocks, strict=True))
        self.teacher = Ensemble(teachers) if teachers else None

    def shapes(self, load: float = 1.0, busy: int = 1, repeats: int = 1) -> Shapes:
        """In which parameters and their gradients are not counted."""
        shapes = Shapes(load, busy, repeats)
        shapes.ignore(*self.model.parameters(), *self.model.buffers(), *(each.grad for each in self._buffers.values()))
        shapes.ignore(*(() if self.teacher is None else self.teacher.parameters()))
        return shapes


class _Measuring:
    """Runs the units of a block so that their modules are measured; they give what they would in shape only."""

    def __init__(self, step: StepContext) -> None:
        self._step = step

    def measure(
        self,
        block: nn.Module,
        x_TH: Tensor,
        places: AttentionPositions,
        shapes: Shapes,
        *,
        experts: bool,
        again: bool,
        splits: bool,
    ) -> dict[Place, ModuleBytes]:
        """Of its experts alone, or of all other modules."""
        self._found: dict[Place, ModuleBytes] = {}
        self._shapes, self._experts, self._again, self._splits = shapes, experts, again, splits
        for row, unit in enumerate(units_of(block)):
            unit.run_by(partial(self._measure_unit, unit, row))
        block(x_TH, places)
        return self._found

    def _measure_unit(self, unit: Unit, row: int, x: Tensor, *args: Any) -> Any:
        """Of its modules, the first reads the residual stream and the last adds to it."""
        more: list[RouterStats | None] = []
        for place, (kind, module) in enumerate(unit.steps):
            if (kind == "moe") == self._experts:
                alone, own = Unit(kind, module), args if module is unit.module else ()
                Recompute(Recomputation(), self._step).arrange_unit(alone, (kind,) if self._again else ())
                first, last = place == 0, place == len(unit.steps) - 1
                self._found[row, place], more_here = self._run(alone, x, *own, first=first, last=last)
                more += more_here * [None]
            elif kind == "moe":  # its experts are measured apart
                more.append(_no_stats(module))
        return (x, *more) if more else x

    def _run(self, unit: Unit, x: Tensor, *args: Any, first: bool, last: bool) -> tuple[ModuleBytes, int]:
        """Of a unit of one module; and how many results it gives beside what it makes of x."""
        shapes = self._shapes
        leaf, gradient = torch.empty_like(x).requires_grad_(), torch.empty_like(x)
        start = shapes.alive
        stream = leaf * 1
        given = stream if first else stream * 1  # `* 1` stands for the modules before and behind, and keeps nothing
        storage = weakref.ref(given.untyped_storage())
        result = unit(given, *args)
        y, *more = result if isinstance(result, tuple) else (result,)
        number, stats = len(more), more[0] if more else None
        y = stream + (y if last else y * 1)  # as large as its gradient, which is not counted
        ends = [y] if stats is None else [y, stats.probabilities_E, stats.z]
        del result, stream, given, more, stats
        kept, saved_of_input = shapes.alive - start - y.nbytes, 0 if storage() is None else x.nbytes
        gradients = [gradient, *map(torch.empty_like, ends[1:])]
        del y, gradient
        shapes.history.clear()
        waiting = self.backward(ends, gradients, shapes, splits=self._splits)
        works = [each - start - kept for each in shapes.history]
        return ModuleBytes(unit.steps[0][0], saved_of_input, kept, works, waiting), number

    def backward(self, ends: list[Tensor], gradients: list[Tensor], shapes: Shapes, *, splits: bool) -> int:
        """Do the backward pass and empty both lists; returns the bytes that wait for the gradients of the weights, where it
        `splits` them off."""
        with self._step.deferring() if splits else nullcontext([]) as deferred:
            torch.autograd.backward(ends, gradients)
        ends.clear()
        gradients.clear()
        there = shapes.alive
        deferred.clear()
        return there - shapes.alive


def _no_stats(module: Any) -> RouterStats:
    """Statistics of no tokens."""
    zeros_E = torch.zeros(len(module.router.weight), device="meta")
    return RouterStats(zeros_E, zeros_E, zeros_E.sum(), 0)
