"""Checks a chunk against a plain calculation under random orders of events.

Background work (copies, collectives, updates) happens as late as possible, and asserts that its operands have not been
touched until then. All numbers are small multiples of powers of two, so every sum is exact.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from optimus.comm import Group, Handle
from optimus.config.tree import StateConfig
from optimus.mesh import Layout, Mesh
from optimus.optim.rule import OptimizerStep, Rule, Tile, UpdateRule
from optimus.state.masks import packed_bits
from optimus.state.plan import ChunkPlan, StateSpec, divide_chunks, place_chunks, unpruned_shares
from optimus.state.transfers import Job, Transfers
from optimus.step_context import StepContext

SHAPES = {"a": (5,), "b": (4, 3), "c": (7,)}
RATE = 0.25


class Race(Exception):
    """A change of memory that background work was using."""


@dataclass(frozen=True, kw_only=True)
class Total(UpdateRule):
    """A rule that moves weights against the sum of all gradients so far."""

    kinds = ("total",)

    def apply(self, now: OptimizerStep, tile: Tile) -> None:
        (total,) = tile.moments
        total.add_(tile.gradient)
        tile.weight.sub_(total, alpha=now.lr)


class Late(NamedTuple):
    """A copy that happens when waited for."""

    target: Tensor
    source: Tensor

    def begin(self) -> Handle:
        kept, waiting = self.source.clone(), [True]
        self.target.data.fill_(torch.nan)

        def wait() -> None:
            if waiting:
                waiting.clear()
                if not torch.equal(kept.view(torch.uint8), self.source.view(torch.uint8)):
                    raise Race("the source of a copy has been changed under it")
                if not self.target.isnan().all():
                    raise Race("the target of a copy has been written to under it")
                self.target.data.copy_(kept)

        return Handle(wait)


class LateTransfers(Transfers):
    """Transfers whose updates run in a slow thread, or when waited for."""

    def __init__(self, threads: bool, drawn: random.Random) -> None:
        super().__init__(torch.device("cpu"))
        self._threads, self._drawn = threads, drawn

    def resize(self, tensor: Tensor, size: int) -> None:
        """Keeps the memory and fills it with NaN, which readers would see."""
        tensor.data.fill_(torch.nan)

    def up(self, target: Tensor, source: Tensor) -> Handle:
        return Late(target, source).begin()

    def down(self, target: Tensor, source: Tensor) -> Handle:
        return Late(target, source).begin()

    def submit(self, work: Job, elements: int, on: str) -> Handle:
        pause, done = self._drawn.choice([0.0, 0.0, 2e-4]), Future[None]()

        def run() -> None:
            time.sleep(pause)
            work()

        if self._threads:
            return super().submit(run, elements, on)

        def wait() -> None:
            if not done.done():
                before, threading.current_thread().name = threading.current_thread().name, "optimus update, later"
                try:
                    with torch.no_grad():
                        work()
                finally:
                    threading.current_thread().name = before
                done.set_result(None)

        return Handle(wait)


class LateGroup:
    """The first of two ranks; the other has zero gradients and constant weights."""

    watch = None

    def __init__(self) -> None:
        self.unwatched, self.others = self, torch.zeros(0)

    def all_gather_async(self, whole: Tensor, part: Tensor, lengths: Sequence[int]) -> Handle:
        kept = part.clone()
        whole.data[lengths[0] :] = torch.nan

        def wait() -> None:
            if not torch.equal(kept, part):
                raise Race("a part has been changed while it was gathered")
            whole.data[: lengths[0]] = kept
            whole.data[lengths[0] :] = self.others

        return Handle(wait)

    def reduce_scatter_async(self, whole: Tensor, part: Tensor, lengths: Sequence[int]) -> Handle:
        kept = whole.clone()

        def wait() -> None:
            if not torch.equal(kept, whole):
                raise Race("gradients have been changed while they were reduced")
            whole[len(part) :] = torch.nan

        return Handle(wait)

    def all_reduce_async(self, piece: Tensor) -> Handle:
        kept = piece.clone()
        piece.fill_(torch.nan)

        def wait() -> None:
            if not piece.isnan().all():
                raise Race("a sum has been changed while it was made")
            piece.copy_(kept)

        return Handle(wait)


@dataclass
class Case:
    """The way in which a chunk is sharded, stored and pruned."""

    options: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    compute: torch.dtype = torch.bfloat16
    trains: bool = True
    prunes: bool = False

    @property
    def config(self) -> StateConfig:
        places = {"update_on": "host"} if "residency" in self.options else {}
        return StateConfig.model_validate({"gradient_dtype": "float32", "tile": 32, **places, **self.options})

    def plan(self, masks: dict[str, Tensor]) -> ChunkPlan:
        layouts, mesh = {name: Layout(shape) for name, shape in SHAPES.items()}, Mesh(dp=self.ranks)
        rule = Total(weight_decay=0.0) if self.trains else Rule()
        shares = unpruned_shares(masks, layouts, mesh, 0)
        unpruned: dict[str, float | None] = dict.fromkeys(SHAPES if self.prunes else ()) | shares
        state_spec = StateSpec(self.compute, dict.fromkeys(SHAPES, rule), unpruned)
        (plan,) = place_chunks(divide_chunks(layouts, mesh, 0, self.config, state_spec), self.config, state_spec)
        return plan


SHARDED = {"shard": "parameters"}
STEPS = {"shard": "parameters", "shard_ranks": {"parameters": 2, "gradients": 2, "optimizer": 4}}
CASES = [
    Case(),
    Case(compute=torch.float32),
    Case({"all_reduce_tiles": 1}),
    Case(prunes=True),
    Case(prunes=True, compute=torch.float32),
    Case({"shard": "optimizer"}, 2),
    Case({"shard": "gradients"}, 2),
    Case({"shard": "gradients", "all_reduce_tiles": 2}, 2),
    Case(SHARDED, 2),
    Case(SHARDED, 2, torch.float32),
    Case({**SHARDED, "reshard_after_forward": False}, 2),
    Case(STEPS, 4),
    Case({"offload": "optimizer"}),
    Case({"offload": "optimizer"}, prunes=True),
    Case({"offload": "all"}),
    Case({"offload": "all", "gradient_dtype": "bfloat16"}),
    Case({"offload": "all", "gradient_dtype": "bfloat16"}, prunes=True),
    Case({"offload": "all", "accumulate_on": "host"}),
    Case({"offload": "all", "gradient_dtype": "bfloat16", **SHARDED}, 2),
    Case({"offload": "optimizer", **STEPS}, 4),
    Case(SHARDED, 2, trains=False),
    Case({"offload": "all"}, trains=False),
]


class Abandoned(Exception):
    """Raised to end a step early."""


class Order:
    """A chunk's whole life, in a random order of events."""

    def __init__(self, case: Case, seed: int, threads: bool, chunk: ModuleType, placement: ModuleType) -> None:
        self.case, self.drawn, self.threads = case, random.Random(seed), threads
        self.masks: dict[str, Tensor] = {}
        plan, self.step = case.plan({}), StepContext()
        copies, self.groups = LateGroup(), [LateGroup() for _ in plan.shard_steps]
        self.moves = LateTransfers(threads, self.drawn)
        context = placement.ChunkContext(
            cast(list[Group], self.groups),
            cast(Group, copies),
            self.moves,
            self.step,
            options=case.config,
            started=lambda begun: self._started(begun),
        )
        self.chunk = (chunk.TrainedChunk if case.trains else chunk.Chunk)(plan, context)
        self.parameters: dict[str, nn.Parameter] = dict(self.chunk.make_parameters())
        self.trained = case.trains
        self.weight, self.total = self._numbers(), torch.zeros(plan.size)
        for depth, group in enumerate(self.groups):
            outer, inner = plan.extent(depth), plan.extent(depth + 1)
            group.others = self.weight[inner.stop : outer.stop].to(case.compute)
        with self.chunk.states(change=True) as states:
            self.chunk.fill_part(states["model"], self.weight[self.chunk.dense_extent])
        self.chunk.refresh_compute_copy()
        self.saver = ThreadPoolExecutor(1, thread_name_prefix="optimus checkpoint")
        self.saved: list[Future[None]] = []
        self.updates = 0

    def _numbers(self, most: int = 4) -> Tensor:
        """Returns small whole numbers for the whole chunk, zero between the parameters."""
        found = torch.zeros(self.chunk.plan.size)
        for slot in self.chunk.plan.slots:
            count = slot.end - slot.start
            found[slot.start : slot.end] = torch.tensor([float(self.drawn.randint(-most, most)) for _ in range(count)])
        return found

    def _started(self, begun: Any) -> None:
        if self.drawn.random() < 0.3:
            begun.finish()
        if begun.may_offload and self.drawn.random() < 0.5:
            begun.offload_gradient(32)

    def _maybe(self, share: float = 0.5) -> bool:
        return self.drawn.random() < share

    def run(self, steps: int = 3) -> None:
        """Runs the steps; raises errors of the chunk, and `AssertionError` for wrong numbers."""
        with self.saver:
            for _ in range(steps):
                try:
                    self._step()
                except Abandoned:
                    continue
                self._between()
            if self.trained:
                self.chunk.gradients.clear()
                self.chunk.skip()
            self._use()
            self.chunk.unsharded.wait()
            with self.chunk.states() as states:
                self._compare(states)
            for each in self.saved:
                each.result(60)
            if self.moves._worker is not None:
                self.moves._worker.shutdown()

    # ---- A step ----

    def _step(self) -> None:
        chunk = self.chunk
        if not self.trained:
            for _ in range(3):
                self._use()
                self._anything()
            return
        chunk.gradients.bounded = bounded = self._maybe()
        chunk.gradients.clear()
        chunk.skip()
        if self._maybe(0.2):  # a second time changes nothing
            chunk.gradients.clear()
        self.sum, passes = torch.zeros(chunk.plan.size), self.drawn.choice([0, 1, 1, 2, 3])
        early, deferred = self._maybe(0.3), list[tuple[int, list[Callable[[], None]]]]()
        for number in range(passes):
            last = number == passes - 1
            if last and early and not deferred:
                chunk.gradients.reduce_on_arrival()
            self._use()
            self._anything()
            if last and self._maybe(0.8):
                self._add(deferred)
                chunk.gradients.reduce_on_arrival()
            self._backward(number, deferred)
            if self._maybe(0.1):
                raise Abandoned
            if self._maybe():
                self._add(deferred)
        self._add(deferred)
        if self._maybe():
            chunk.gradients.start()
        self._anything(used=True)
        own = self.sum[chunk.dense_extent]
        expected = float(own.double().square().sum())
        if bounded:  # every gradient is a small whole number, so every sum is exact
            assert float(chunk.gradients.square_bound()) >= float(self.sum.double().square().sum()), "the bound"
        if not chunk.plan.offloaded and self._maybe(0.3):
            chunk.gradients.begin_last()
            if chunk.gradients.arriving:
                self._update(own, on_arrival=True)
                assert float(chunk.gradients.square_sum(32)) == expected, "the norm of what has been updated"
                return
        chunk.gradients.reduce()
        if chunk.gradients.may_offload:
            chunk.gradients.offload_gradient(32)
            if self._maybe(0.1):
                raise Abandoned
        square = chunk.gradients.square_sum(32)
        chunk.gradients.finish_offload()
        assert abs(float(square) - expected) <= 8 * torch.finfo(torch.float64).eps * expected, (
            "the norm"
        )  # over three tiles
        if self._maybe(0.05):
            raise Abandoned
        if self._maybe(0.2):
            chunk.skip()
            return
        self._update(own)

    def _update(self, own: Tensor, on_arrival: bool = False) -> None:
        self.updates += 1
        self.chunk.update.step(OptimizerStep(self.updates, RATE), 32, on_arrival=on_arrival)
        part = self.chunk.dense_extent
        self.total[part] += own
        self.weight[part] -= RATE * self.total[part]

    def _backward(self, number: int, deferred: list[tuple[int, list[Callable[[], None]]]]) -> None:
        """Runs a backward pass to all or some parameters, by kernels or by autograd."""
        gradient, names = self._numbers(3), [*self.parameters]
        self.drawn.shuffle(names)
        if self._maybe(0.2):
            names.pop()
        views = self.chunk.views(gradient)
        self.chunk.unsharded.gather()
        splits = self._maybe(0.4)
        with self.step.in_backward(0, number), self.step.deferring() if splits else _nothing() as later:
            for name in names:
                parameter, grad = self.parameters[name], views[name]
                if self._maybe():
                    self.chunk.gradients.buffers[parameter].add(lambda to, grad=grad: to.add_(grad))
                elif not self.chunk.gradients.buffers[parameter].used:
                    assert self.chunk.unsharded.is_present
                    (parameter * grad.to(parameter.dtype)).sum().backward()
                else:
                    self.chunk.gradients.buffers[parameter].add(lambda to, grad=grad: to.add_(grad))
                self.sum[self._slot(name)] += grad.flatten()
            if self._maybe(0.3):
                self.chunk.unsharded.gather()
            self.chunk.gradients.end_backward()
        for name in self.masks:
            self.sum[self._slot(name)] *= self._mask(name)
        deferred.append((number, later or []))

    def _add(self, deferred: list[tuple[int, list[Callable[[], None]]]]) -> None:
        for number, adds in deferred:
            with self.step.in_backward(0, number):
                for add in adds:
                    add()
                self.chunk.gradients.end_backward()
        deferred.clear()

    def _slot(self, name: str) -> slice:
        slot = next(slot for slot in self.chunk.plan.slots if slot.name == name)
        return slice(slot.start, slot.end)

    def _mask(self, name: str) -> Tensor:
        count = int(np.prod(SHAPES[name]))
        return torch.from_numpy(np.unpackbits(self.masks[name].numpy(), count=count, bitorder="little")).float()

    def _use(self) -> None:
        """Asserts that the gathered parameters are right."""
        self.chunk.unsharded.gather()
        for name, view in self.chunk.views(self.weight).items():
            assert torch.equal(self.parameters[name].detach(), view.to(self.case.compute)), "what is computed with"

    # ---- What may come at any time ----

    def _anything(self, used: bool = False) -> None:
        """Runs some random events within a step. `used` means that the step needs no parameters any more, and gradients
        may take their memory."""
        unsharded = self.chunk.unsharded
        for event in self.drawn.sample(
            [unsharded.reshard, unsharded.start_gather, unsharded.wait, self._hold], self.drawn.randint(0, 2)
        ):
            if not (used and event == self._hold):
                event()

    def _between(self) -> None:
        """Runs some random events between two steps."""
        chunk = self.chunk
        events = [
            self._hold,
            self._read,
            self._write,
            chunk.refresh_compute_copy,
            chunk.unsharded.start_gather,
            chunk.unsharded.reshard,
        ]
        for event in self.drawn.sample(
            [*events, *([self._prune] if self.case.prunes else [])], self.drawn.randint(0, 3)
        ):
            event()

    def _read(self) -> None:
        with self.chunk.states() as states:
            self._compare(states)

    def _write(self) -> None:
        """Loads other weights, as from a checkpoint."""
        if not self.trained:
            return
        part = self.chunk.dense_extent
        self.weight[part] += 1.0
        for name in self.masks:
            self.weight[self._slot(name)] *= self._mask(name)
        between = self._between_parameters()
        self.weight[between] = 0.0
        with self.chunk.states(change=True) as states:
            self.chunk.fill_part(states["model"], self.weight[part])
        self.chunk.refresh_compute_copy()

    def _between_parameters(self) -> Tensor:
        outside = torch.ones(self.chunk.plan.size, dtype=torch.bool)
        for slot in self.chunk.plan.slots:
            outside[slot.start : slot.end] = False
        return outside

    def _compare(self, states: Any, weight: Tensor | None = None, total: Tensor | None = None) -> None:
        part = self.chunk.dense_extent
        weight, total = (
            (self.weight[part] if weight is None else weight),
            (self.total[part] if total is None else total),
        )
        assert torch.equal(self.chunk.dense_part(states["model"]).float(), weight), "weights"
        if "total" in states:
            assert torch.equal(self.chunk.dense_part(states["total"]), total), "what is kept"

    def _hold(self) -> None:
        """Starts a copy beside the training, and blocks updates until the copy is made."""
        if not self.trained:
            return
        for each in self.saved:
            each.result(60)
        chunk, copied, weights = self.chunk, threading.Event(), self._maybe()
        part, updated = chunk.dense_extent, chunk.updated
        weight, total = self.weight[part].clone(), self.total[part].clone()
        pause = self.drawn.choice([0.0, 0.0, 2e-4])

        def copy() -> None:
            try:
                time.sleep(pause)
                with chunk.states(after=updated) as states:
                    self._compare(states, weight, total)
                    if weights and not chunk.elements.prunes:
                        assert torch.equal(chunk.compute_shard.float(), weight), "weights that are copied"
            finally:
                copied.set()

        if self.threads:
            self.saved.append(self.saver.submit(copy))
            chunk.block_update_until(Handle(lambda: cast(None, copied.wait(60))), weights)
        else:
            chunk.block_update_until(Handle(lambda: None if copied.is_set() else copy()), weights)

    def _prune(self) -> None:
        """Prunes some more elements."""
        for name in self.drawn.sample([*SHAPES], 2):
            count = int(np.prod(SHAPES[name]))
            keeps = torch.tensor([self._maybe(0.7) for _ in range(count)])
            if name in self.masks:
                keeps &= self._mask(name).bool()
            self.masks[name] = packed_bits(keeps)
            self.weight[self._slot(name)] *= keeps
            self.total[self._slot(name)] *= keeps
        self.chunk.prune(self.case.plan(self.masks), self.masks)


@contextmanager
def _nothing() -> Iterator[None]:
    yield None
