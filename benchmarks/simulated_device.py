"""A device that is not there: memory with a limit, copies that take their time on a virtual clock, and arrive late.

A copy is begun at once: its end follows from its link, and its destination is NaN until somebody waits for it. Source and
destination are looked at once more then: whoever has changed them meanwhile has raced with the copy (`Race`). Memory that is
freed, or new, holds NaN too. So reading too early, or too late, shows in the numbers. Time is computed, never measured: the
same figures on any machine, whatever else runs there.

`ModelState` runs on it as on any device (`moves`); what computes beside it moves the clock (`compute`).
`Simulation` trains a row of matrices so. Collectives are those of the process group, and take no time.
"""

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from optimus.autograd import once_differentiable
from optimus.comm import Groups, Handle, InTurn
from optimus.config.tree import StateConfig
from optimus.mesh import Layout, Mesh
from optimus.model.parameters import Size, declare
from optimus.optim.adamw import AdamW
from optimus.resolve.groups import state_groups
from optimus.state.gathering import ParameterPrefetcher
from optimus.state.model_state import ModelState
from optimus.state.plan import StateSpec, divide_chunks
from optimus.state.transfers import Job, Transfers

_PIECES = 16  # of an update, between which other copies take their turn on the links


class Race(Exception):
    """Memory has been changed under a copy."""


@dataclass
class CopyLink:
    """One direction of a bus: one copy after the other. `delay` is added to each, in seconds."""

    rate: float  # bytes/s
    latency: float = 0.0  # s
    delay: Callable[[], float] = lambda: 0.0
    free: float = 0.0  # s, when the last copy ends
    bytes: float = 0.0
    copies: int = 0  # without those of updates

    def take(self, ready: float, size: float) -> float:
        """When a copy of `size` bytes ends that may begin when it is `ready`."""
        if size:
            self.free = max(ready, self.free) + self.latency + self.delay() + size / self.rate
            self.bytes += size
            return self.free
        return ready


@dataclass
class _Update:
    """An update that has been submitted: its data are made when it is waited for, its time before."""

    work: Job
    on: str
    elements: int
    left: int  # elements whose time is not known yet
    piece: int
    ready: float
    end: float = 0.0
    made: Future[None] = field(default_factory=Future)


class SimulatedDevice(Transfers):
    """`up` and `down` are the links. The device has `limit` bytes; more end in `MemoryError`. The host updates `update_rate`
    elements/s, the device any number at once. `update_bytes` of an element go through the links for an update, there
    and back; an update that moves others raises. None: any, which take no time.

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
        self._processor = 0.0  # when it is free
        self._staging = (0.0, 0.0)  # when the memory of two pieces of updates is free
        self._carried = [0, 0]  # bytes of the update that is made, there and back

    # ---- Memory ----

    def on_device(self, elements: int, dtype: torch.dtype) -> Tensor:
        made = super().on_device(elements, dtype)
        self._count(made, made.untyped_storage().nbytes())
        return made

    def on_host(self, elements: int, dtype: torch.dtype) -> Tensor:
        self.host += elements * dtype.itemsize
        return super().on_host(elements, dtype)

    def resize(self, tensor: Tensor, size: int) -> None:
        """As `Transfers`; the memory stays, so that whoever reads it finds NaN."""
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
        """As `Transfers`: the clock stands still, and whoever waits for `turn` waits for the copy as well."""
        began = self.now
        turn.advance()
        if not turn:
            raise RuntimeError("nothing stands behind a copy: so no computation would wait for it")
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
                    raise Race("the source of a copy has been changed under it")
                if not target.isnan().all():
                    raise Race("the destination of a copy has been written to under it")
                target.data.copy_(kept)

        return Handle(wait)

    def compute(self, seconds: float) -> None:
        """The device computes for so long."""
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
        """Find the times of all pieces of updates that have begun by then."""
        while self._untimed and self._time_piece(until):
            pass

    def _time_piece(self, until: float) -> bool:
        """Find the time of the next piece of the first update, if it has begun by then."""
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
        """Carry an update out."""
        self._carried = [0, 0]
        try:
            with torch.no_grad():
                update.work()
            if self._update_bytes and self._carried != [update.elements * each for each in self._update_bytes]:
                raise RuntimeError(
                    f"an update of {update.elements} elements carries {self._carried} bytes there and back"
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


def _poison(tensor: Tensor) -> None:
    tensor.data.fill_(math.nan)  # by way of `data`: autograd must not take this for a change of what it has saved


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# ---- A model whose passes take their time on it ----


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
    """Of one step of a simulation: seconds, loss and norm, fetches of parameters, bytes through the links of this rank, most
    bytes of the device so far."""

    seconds: float
    loss: float
    norm: float
    loads: int
    up: float
    down: float
    peak: int


class Simulation:
    """A row of `layers` matrices, each a chunk, trained by AdamW on a simulated device; `ranks` of the process group share
    it. A pass of a layer takes `forward` and `backward` seconds; what `options` has is that of the section `state`."""

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
        **options: object,
    ) -> None:
        self.device, self._width, self._rank = device, width, rank
        state = StateConfig.model_validate({"chunk": width * width, "gradient_dtype": "bfloat16", **options})
        self.gathering = ParameterPrefetcher()
        with torch.device("meta"):
            self.layers = nn.ModuleList(Layer(width, device, forward, backward) for _ in range(layers))
        layouts = {name: Layout(tuple(each.shape)) for name, each in self.layers.named_parameters()}
        groups = Groups(Mesh.of(ranks))
        groups.make(state_groups(groups.mesh, layouts, state))
        rule = AdamW(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
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

    def run(self, steps: int, microbatches: int = 1, *, applied: bool = True) -> list[StepFigures]:
        """So many steps; each ends when its updates have been submitted, or it is skipped."""
        return [self._step(microbatches, applied) for _ in range(steps)]

    def evaluate(self) -> float:
        """The loss of a forward pass alone."""
        with torch.no_grad(), self.state.evaluating():
            return self._loss(torch.ones(4, self._width)).item()

    def _step(self, microbatches: int, applied: bool) -> StepFigures:
        device, state, loss = self.device, self.state, 0.0
        up, down = device.up_link, device.down_link
        before = device.now, up.copies, up.bytes, down.bytes
        generator = torch.Generator().manual_seed(1000 * self._steps + self._rank)
        self._steps += 1
        state.begin_step()
        for number in range(microbatches):
            if number + 1 == microbatches:
                state.reduce_on_arrival(0)
            found = self._loss(torch.randn(4, self._width, generator=generator)) / microbatches
            found.backward()
            loss += found.item()
        norm = state.reduce_gradients()
        if applied:
            state.step(1e-2, 1.0)
        else:
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
        """Master weights of this rank, behind all updates."""
        self.state.finish()
        return [chunk.resident["model"].clone() for chunk in self.state.chunks]
