"""A simulated device: limited memory, and copies that take time on a virtual clock and arrive late.

A copy starts at once: its link gives its end, and its destination is NaN until a wait. The wait compares source and
destination again, and raises `Race` if either has changed. Freed and new memory holds NaN too. So a read that is too
early or too late shows in the numbers. Time is computed, never measured, so figures are the same on any machine.

`ModelState` runs on the device by its transfers (`moves`); computations move the clock (`compute`). `Simulation` trains
a row of matrices in this way. Collectives are those of the process group, and take no time, except all-reduces over a
`ReductionLink`.
"""

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from optimus.autograd import once_differentiable
from optimus.comm import Group, Groups, Handle, InTurn
from optimus.config.tree import StateConfig
from optimus.mesh import Layout, Mesh
from optimus.model.parameters import Size, declare
from optimus.optim.adamw import AdamW
from optimus.optim.rule import OptimizerStep, Tile
from optimus.resolve.groups import state_groups
from optimus.state.gathering import ParameterPrefetcher
from optimus.state.model_state import ModelState
from optimus.state.plan import StateSpec, divide_chunks
from optimus.state.transfers import Job, Transfers

_PIECES = 16  # pieces of an update, between which other copies use the links


class Race(Exception):
    """Raised if memory changes during a copy."""


@dataclass
class CopyLink:
    """One direction of a bus, with one copy at a time. `delay` adds seconds to each copy."""

    rate: float  # bytes/s
    latency: float = 0.0  # s
    delay: Callable[[], float] = lambda: 0.0
    free: float = 0.0  # s, the end of the last copy
    bytes: float = 0.0
    copies: int = 0  # without those of updates

    def take(self, ready: float, size: float) -> float:
        """Returns the end of a copy of `size` bytes that may begin at `ready`."""
        if size:
            self.free = max(ready, self.free) + self.latency + self.delay() + size / self.rate
            self.bytes += size
            return self.free
        return ready


@dataclass
class _Update:
    """A submitted update: its time is computed first, its data at the wait."""

    work: Job
    on: str
    elements: int
    left: int  # elements without a computed time
    piece: int
    ready: float
    end: float = 0.0
    made: Future[None] = field(default_factory=Future)


class SimulatedDevice(Transfers):
    """`up` and `down` are the links, and more than `limit` bytes raise `MemoryError`.

    The host updates `update_rate` elements/s, the device any number at once. An update moves `update_bytes` of an
    element through the links, there and back, and raises if it moves others; None allows any bytes, which take no time.

    `now` is the clock; `used` and `peak` are bytes of the device, `host` those of the host.
    """

    def __init__(
        self,
        up: CopyLink,
        down: CopyLink,
        *,
        limit: float = math.inf,
        update_rate: float = math.inf,
        update_bytes: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(torch.device("cpu"))
        self.up_link, self.down_link, self.limit = up, down, limit
        self._update_rate, self._update_bytes = update_rate, update_bytes
        self.now, self.used, self.peak, self.host = 0.0, 0, 0, 0
        self._sizes: dict[int, int] = {}  # bytes of the device, by storage
        self._untimed: deque[_Update] = deque()
        self._unmade: deque[_Update] = deque()
        self._processor = 0.0  # the time at which the processor is free
        self._staging = (0.0, 0.0)  # the times at which the memory of two pieces of updates is free
        self._carried = [0, 0]  # bytes of the current update, there and back

    # ---- Memory ----

    def on_device(self, elements: int, dtype: torch.dtype) -> Tensor:
        made = super().on_device(elements, dtype)
        self._count(made, made.untyped_storage().nbytes())
        return made

    def on_host(self, elements: int, dtype: torch.dtype) -> Tensor:
        self.host += elements * dtype.itemsize
        return super().on_host(elements, dtype)

    def resize(self, tensor: Tensor, size: int) -> None:
        """Resizes as `Transfers`, but keeps freed memory, so that readers find NaN."""
        if size > tensor.untyped_storage().nbytes():
            super().resize(tensor, size)
        self._count(tensor, size)
        _poison(tensor)

    def _count(self, tensor: Tensor, size: int) -> None:
        key = tensor.untyped_storage()._cdata
        self.used += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        if self.used > self.limit:
            raise MemoryError(f"{self.used:,} bytes on a device of {self.limit:,}")
        self.peak = max(self.peak, self.used)

    # ---- Copies ----

    def up(self, target: Tensor, source: Tensor) -> Handle:
        return self._copy(self.up_link, target, source)

    def down(self, target: Tensor, source: Tensor) -> Handle:
        return self._copy(self.down_link, target, source)

    def advance(self, turn: InTurn) -> None:
        """Advances as `Transfers`, but without moving the clock: whoever waits for `turn` also waits for the copy."""
        began = self.now
        turn.advance()
        if not turn:
            raise RuntimeError("no turn follows a copy, so no computation would wait for the copy")
        ended, self.now = self.now, began
        turn.add(lambda: Handle(lambda: self._reach(ended)))

    def _copy(self, link: CopyLink, target: Tensor, source: Tensor) -> Handle:
        self._time_updates(self.now)
        link.copies += 1
        end = link.take(self.now, source.numel() * source.element_size())
        kept, arrived = source.clone(), False
        _poison(target)

        def wait() -> None:
            nonlocal arrived
            self._reach(end)
            if not arrived:
                arrived = True
                if not _equal(kept, source):
                    raise Race("the source of a copy changed during the copy")
                if not target.isnan().all():
                    raise Race("the destination of a copy was written during the copy")
                target.data.copy_(kept)

        return Handle(wait)

    def compute(self, seconds: float) -> None:
        """Moves the clock by the seconds of a computation."""
        self.now += seconds

    def _reach(self, time: float) -> None:
        self.now = max(self.now, time)

    # ---- Updates ----

    def submit(self, work: Job, elements: int, on: str) -> Handle:
        update = _Update(work, on, elements, elements, -(-elements // _PIECES), self.now)
        self._untimed.append(update)
        self._unmade.append(update)

        def wait() -> None:
            while update.left:
                self._time_piece(math.inf)
            self._reach(update.end)
            while not update.made.done():
                self._make(self._unmade.popleft())
            update.made.result()

        return Handle(wait)

    def _time_updates(self, until: float) -> None:
        """Computes the times of all pieces of updates that have begun by `until`."""
        while self._untimed and self._time_piece(until):
            pass

    def _time_piece(self, until: float) -> bool:
        """Computes the time of the next piece of the first update; returns False if it begins after `until`."""
        update = self._untimed[0]
        at = max(update.ready, self._staging[0])
        if at > until:
            return False
        size = min(update.piece, update.left)
        there, back = (size * each for each in self._update_bytes or (0, 0))
        ways = (self.up_link, self.down_link) if update.on == "device" else (self.down_link, self.up_link)
        at = ways[0].take(at, there)
        if update.on == "host":
            at = self._processor = max(at, self._processor) + size / self._update_rate
        update.end = at = ways[1].take(at, back)
        self._staging = self._staging[1], at
        update.left -= size
        if not update.left:
            self._untimed.popleft()
        return True

    def _make(self, update: _Update) -> None:
        """Runs an update."""
        self._carried = [0, 0]
        try:
            with torch.no_grad():
                update.work()
            if self._update_bytes and self._carried != [update.elements * each for each in self._update_bytes]:
                raise RuntimeError(
                    f"an update of {update.elements} elements moves {self._carried}, not {self._update_bytes} bytes each"
                )
            update.made.set_result(None)
        except BaseException as error:
            update.made.set_exception(error)

    def staged(self, name: object, part: Tensor, on: str, *, filled: bool) -> Tensor:
        self._carried[0] += part.numel() * part.element_size() * filled
        return super().staged(name, part, on, filled=filled)

    def put_back(self, part: Tensor, staged: Tensor) -> None:
        self._carried[1] += part.numel() * part.element_size()
        super().put_back(part, staged)


class ReductionLink:
    """The group of this rank and another with equal gradients, whose all-reduces take turns on `link`.

    A tensor is NaN until the wait for its sum.
    """

    def __init__(self, device: SimulatedDevice, link: CopyLink) -> None:
        self._device, self._link = device, link

    def all_reduce_async(self, tensor: Tensor) -> Handle:
        end = self._link.take(self._device.now, tensor.numel() * tensor.element_size())
        sum_, arrived = 2 * tensor, False
        _poison(tensor)

        def wait() -> None:
            nonlocal arrived
            self._device._reach(end)
            if not arrived:
                arrived = True
                if not tensor.isnan().all():
                    raise Race("a sum was written before it arrived")
                tensor.copy_(sum_)

        return Handle(wait)


@dataclass(frozen=True, kw_only=True)
class TimedAdamW(AdamW):
    """AdamW that takes `seconds` per element on `device`."""

    device: SimulatedDevice
    seconds: float

    def update(self, now: OptimizerStep, tile: Tile) -> None:
        self.device.compute(tile.weight.numel() * self.seconds)
        super().update(now, tile)


def _poison(tensor: Tensor) -> None:
    tensor.data.fill_(math.nan)  # through `data`, so that autograd does not see a change of saved tensors


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# ---- A model whose passes take time on the device ----


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, device: SimulatedDevice, forward: float, backward: float) -> Tensor:
        ctx.device, ctx.seconds = device, backward
        device.compute(forward)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.device.compute(ctx.seconds)
        return gradient, None, None, None


class Layer(nn.Module):
    """One matrix, whose passes take so many seconds."""

    def __init__(self, width: int, device: SimulatedDevice, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = declare(self, "weight", Size("ffn", width), Size("residual", width))
        self._timing = device, forward, backward

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = _Timed.apply(torch.tanh(x @ self.weight.T), *self._timing)
        return made


class StepFigures(NamedTuple):
    """The figures of one simulated step.

    The figures are seconds, loss and norm, fetches of parameters, bytes through this rank's links, and the device's
    peak.
    """

    seconds: float
    loss: float
    norm: float
    loads: int
    up: float
    down: float
    peak: int


class Simulation:
    """A row of `layers` matrices, each a chunk, trained by AdamW on a simulated device; `ranks` share the state.

    A pass of a layer takes `forward` or `backward` seconds; `options` are those of the section `state`. An update on the
    device takes `update` seconds per element. `link` carries all-reduces with another rank (`ReductionLink`).
    """

    def __init__(
        self,
        device: SimulatedDevice,
        *,
        layers: int,
        width: int = 16,
        forward: float = 20e-3,
        backward: float = 40e-3,
        ranks: int = 1,
        rank: int = 0,
        compute: torch.dtype = torch.bfloat16,
        update: float = 0.0,
        link: CopyLink | None = None,
        **options: object,
    ) -> None:
        self.device, self._width, self._rank = device, width, rank
        state = StateConfig.model_validate({"chunk": width * width, "gradient_dtype": "bfloat16", **options})
        self.gathering = ParameterPrefetcher()
        with torch.device("meta"):
            self.layers = nn.ModuleList(Layer(width, device, forward, backward) for _ in range(layers))
        layouts = {name: Layout(tuple(each.shape)) for name, each in self.layers.named_parameters()}
        groups = Groups(Mesh.from_sizes(ranks))
        groups.make(state_groups(groups.mesh, layouts, state))
        rule = TimedAdamW(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, device=device, seconds=update)
        state_spec = StateSpec(compute, dict.fromkeys(layouts, rule))
        self.state = ModelState(
            self.layers,
            layouts,
            groups,
            state,
            {0: divide_chunks(layouts, groups.mesh, groups.rank, state, state_spec)},
            spec=state_spec,
            device=device.device,
            gathering=self.gathering,
            moves=device,
        )
        self.state.initialize(1, 0.3)
        self._steps = 0
        if link is not None:
            for chunk in self.state.trained:
                chunk.gradients.replica_group = cast(Group, ReductionLink(device, link))

    def run(
        self, steps: int, microbatches: int = 1, *, applied: bool = True, on_arrival: bool = False
    ) -> list[StepFigures]:
        """Runs steps; each ends when its updates have been submitted, or is skipped. With `on_arrival`, chunks are
        updated as they are reduced."""
        return [self._step(microbatches, applied, on_arrival) for _ in range(steps)]

    def evaluate(self) -> float:
        """Returns the loss of a forward pass alone."""
        with torch.no_grad(), self.state.evaluating():
            return self._loss(torch.ones(4, self._width)).item()

    def _step(self, microbatches: int, applied: bool, on_arrival: bool) -> StepFigures:
        device, state, loss = self.device, self.state, 0.0
        up, down = device.up_link, device.down_link
        before = device.now, up.copies, up.bytes, down.bytes
        generator = torch.Generator().manual_seed(1000 * self._steps + self._rank)
        self._steps += 1
        state.begin_step(bounded=on_arrival)
        for number in range(microbatches):
            if number + 1 == microbatches:
                state.reduce_on_arrival(0)
            found = self._loss(torch.randn(4, self._width, generator=generator)) / microbatches
            found.backward()
            loss += found.item()
        if on_arrival:
            assert state.square_bound().isfinite()
            norm = state.reduce_and_step(1e-2, 1.0)
        else:
            norm = state.reduce_gradients()
        if applied and not on_arrival:
            state.step(1e-2, 1.0)
        elif not applied:
            state.skip()
        now = device.now, up.copies, up.bytes, down.bytes
        seconds, loads, carried_up, carried_down = (after - before for after, before in zip(now, before))
        return StepFigures(seconds, loss, norm, int(loads), carried_up, carried_down, device.peak)

    def _loss(self, x: Tensor) -> Tensor:
        x = x.to(self.state.chunks[0].parameter.dtype)
        for layer in self.layers:
            x = self.gathering.unit((layer,), layer, x)
        return x.float().square().mean()

    def weights(self) -> list[Tensor]:
        """Returns the master weights of this rank after all updates."""
        self.state.finish()
        return [chunk.resident["model"].clone() for chunk in self.state.chunks]
