"""A fake accelerator in pure Python: real runs on a device whose tensors have shapes, types and memory, but no numbers.

Tensors of the device are FakeTensors of PyTorch's Python PrivateUse1 backend, those of the host are real; ranks are those of
the `fake` process group, so that this process is any one of any number. Kernels of Triton are not launched. So a step of
training takes a second, whatever the model, and shows

- a tensor of the host among the device's, which raises as it would there, and memory that is used after it was released;
- what makes the host wait (`Wait`): numbers that are read, copies that are not from or to pinned memory beside the rest;
- launches, by phase; bytes of the device, now and at most; collectives, process groups; which devices are touched.

Numbers, the order of streams and communication are not there to be wrong. Numbers that the host reads are 0 or 1.

A process that has it never loses it again (`install`): it is one of its own.
"""

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed import fake_pg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from optimus.autograd import once_differentiable
from optimus.comm import Group
from optimus.kernels import adamw, attention
from optimus.kernels import devices as chips
from optimus.parallel.dispatch.allgather import AllGatherDispatch
from optimus.parallel.dispatch.alltoall import AllToAllDispatch, ExchangeCounts
from optimus.parallel.dispatch.choice import copies
from optimus.pipeline.executor import Message
from optimus.pipeline.message_driven import MessageDrivenExecutor
from optimus.pipeline.schedule import Action, Kind
from optimus.testing.memory import Allocations, resizes

NAME = "fakegpu"


# Of what a rank gets, as torch describes it; where torch says less of a maker's devices, so do these.
PROPERTIES: dict[str, dict[str, Any]] = {
    "A100": {
        "name": "NVIDIA A100-SXM4-80GB", "total_memory": 80 << 30, "multi_processor_count": 108, "warp_size": 32,
        "shared_memory_per_block_optin": 166_912, "major": 8, "minor": 0,
    },
    "H200": {
        "name": "NVIDIA H200", "total_memory": 141 << 30, "multi_processor_count": 132, "warp_size": 32,
        "shared_memory_per_block_optin": 232_448, "major": 9, "minor": 0,
    },
    "MI300X": {
        "name": "AMD Instinct MI300X", "total_memory": 192 << 30, "multi_processor_count": 304, "warp_size": 64,
        "gcnArchName": "gfx942:sramecc+:xnack-", "major": 9, "minor": 4,
    },
    "PVC": {
        "name": "Intel(R) Data Center GPU Max 1550", "total_memory": 64 << 30, "gpu_subslice_count": 64,
    },
}  # fmt: skip
_NO_FLASH = {"PVC"}  # torch has no flash attention that gives log-sum-exps there


class Wait(NamedTuple):
    """The host has waited for the device."""

    what: str
    place: str  # in this package
    phase: str


class ReleasedMemoryError(Exception):
    """Memory of the device has been used that had been released."""


class _FakeTensors(FakeTensorMode):
    """For several threads: while one is in a kernel, tensors have their device for the others."""

    def __init__(self) -> None:
        self._here = threading.local()
        super().__init__(allow_non_fake_inputs=True)

    @property
    def in_kernel_invocation(self) -> bool:
        return getattr(self._here, "inside", False)

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, inside: bool) -> None:
        self._here.inside = inside


class FakeAccelerator(TorchDispatchMode):
    """What happens on the fake devices of this process, while it is entered; see the module's text.

    `waits`, `launches` by (phase, kernel or operator), `collectives` and `touched`, the devices, are since `forget`.
    """

    def __init__(self, properties: dict[str, Any], devices: int = 1) -> None:
        super().__init__()
        self.properties, self.devices = SimpleNamespace(**properties), devices
        self.memory = Allocations()
        self.waits: list[Wait] = []
        self.launches: Counter[tuple[str, str]] = Counter()
        self.collectives: Counter[str] = Counter()
        self.touched: set[int] = set()
        self.groups: list[int] = []  # sizes of the process groups that were made
        self.now = 0  # the device that is selected
        self.phase = ""
        self._fake = _FakeTensors()
        self._pinned: set[int] = set()  # storages of the host
        self._lock = threading.RLock()  # FakeTensorMode is for one thread at a time, autograd has one of its own

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def forget(self) -> None:
        """Count anew."""
        self.waits, self.touched = [], set()
        self.launches.clear()
        self.collectives.clear()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Name what is done inside."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def waited(self, what: str) -> None:
        """The host has waited."""
        self.waits.append(Wait(what, _place(), self.phase))

    def launched(self, kernel: str, tensors: Sequence[Any]) -> None:
        """A kernel of Triton: all its tensors must be on the device that is selected, and have memory."""
        for name, each in tensors:
            if isinstance(each, Tensor):
                if not is_here(each):
                    raise RuntimeError(f"{kernel}: {name} is on {each.device}")
                if each.device.index != self.now:
                    raise RuntimeError(f"{kernel} is launched on device {self.now}, {name} is on {each.device}")
                _check_memory(kernel, each)
        self.launches[self.phase, kernel] += 1

    # ---- Operators ----

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self._lock:
            if function.namespace == "prim":  # such as the device of a tensor
                return function(*args, **kwargs)
            return self._dispatch(function, args, kwargs)

    def _dispatch(self, function: Any, args: Any, kwargs: Any) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        to = kwargs.get("device")
        here = any(map(is_here, given))
        if not here and (to is None or torch.device(to).type != NAME):
            if kwargs.get("pin_memory"):
                made = function(*args, **(kwargs | {"pin_memory": False}))
                self._pinned.add(made.untyped_storage()._cdata)
                return made
            return function(*args, **kwargs)
        return self._on_device(function, args, kwargs, given)

    def _on_device(self, function: Any, args: Any, kwargs: Any, given: Sequence[Tensor]) -> Any:
        name = str(function)
        if name in _READ:
            return _READ[name](self, function, args, kwargs)
        if function.namespace == "c10d":
            self.collectives[name.split(".")[1]] += 1
        elif not _gives_views(function):
            for each in given:
                if is_here(each):
                    _check_memory(name, each)
            if not name.startswith("aten.empty"):
                self.launches[self.phase, name] += 1
        return self.run(function, *args, **kwargs)

    def run(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """What an operator gives on the device."""
        known = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, FakeTensor)}
        with self._fake:
            result = function(*args, **kwargs)
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and is_here(each):
                self.touched.add(each.device.index)
                storage = each.untyped_storage()
                if storage._cdata not in known and not self.memory.knows(storage):
                    self.memory.allocated(storage)
        if self.memory.current > self.properties.total_memory:
            raise torch.OutOfMemoryError(f"{self.memory.current:,} bytes on {self.properties.name}")
        return result

    def empty(self, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of the device of `like`, whose numbers nobody has."""
        make = torch.ops.aten.empty.memory_format
        made: Tensor = self.run(make, list(shape), dtype=dtype or like.dtype, device=like.device)
        return made

    # ---- Between host and device ----

    def _read_number(self, function: Any, args: Any, kwargs: Any) -> Any:
        self.waited("a number is read")
        dtype = args[0].dtype
        return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 0

    def _counted(self, function: Any, args: Any, kwargs: Any) -> Tensor:
        """An operator whose result's size is known on the device alone: half of what it may be."""
        x = args[0]
        self.waited(str(function))
        if function is torch.ops.aten.nonzero.default:
            return self.empty([-(-x.numel() // 2), x.dim()], x, torch.int64)
        if function is torch.ops.aten.masked_select.default:
            return self.empty([-(-x.numel() // 2)], x)
        if function is torch.ops.aten.bincount.default:
            return self.empty([kwargs.get("minlength", args[2] if len(args) > 2 else 0)], x, torch.int64)
        return self.empty([16 * x.numel()], x)  # repeat_interleave: so many of each

    def _indexed(self, function: Any, args: Any, kwargs: Any) -> Tensor:
        x, indices = args[0], args[1]
        masks = [each for each in indices if each is not None and each.dtype in (torch.bool, torch.uint8)]
        if not masks:
            self.launches[self.phase, str(function)] += 1
            result: Tensor = self.run(function, *args, **kwargs)
            return result
        self.waited("boolean index")
        return self.empty([-(-masks[0].numel() // 2), *x.shape[masks[0].dim() :]], x)

    def _copied_to(self, function: Any, args: Any, kwargs: Any) -> Any:
        x, to = args[0], kwargs.get("device")
        there = x.device if to is None else torch.device(to)
        dtype = kwargs.get("dtype") or x.dtype
        if there.type == NAME and is_here(x):
            self.launches[self.phase, str(function)] += 1
            return self.run(function, *args, **kwargs)
        if there.type == NAME:  # from the host, which goes on when its memory has been read
            return self.run(torch.ops.aten.empty.memory_format, list(x.shape), dtype=dtype, device=there)
        _check_memory(str(function), x)
        self.waited("copy to the host")
        return torch.zeros(x.shape, dtype=dtype)

    def _copied_into(self, function: Any, args: Any, kwargs: Any) -> Any:
        into, x = args[:2]
        beside = (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)) is True
        for each in (into, x):
            if is_here(each):
                _check_memory(str(function), each)
        if is_here(into) and is_here(x):
            self.launches[self.phase, str(function)] += 1
            return self.run(function, *args, **kwargs)
        host = x if is_here(into) else into
        if not (beside and host.untyped_storage()._cdata in self._pinned) and host is into:
            self.waited("copy to the host")
        return into.zero_() if host is into else into

    def _added_wide(self, function: Any, args: Any, kwargs: Any) -> Tensor:
        """What the CPU's torch has no shapes for."""
        for each in (*args[:3], kwargs["out"]):
            _check_memory(str(function), each)
        self.launches[self.phase, str(function)] += 1
        out: Tensor = kwargs["out"]
        return out

    # ---- The machine ----

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """As a device module has it: (free, all)."""
        self.touched.add(self.now if device is None else torch.device(device).index or 0)
        return self.properties.total_memory - self.memory.current, self.properties.total_memory


_READ: dict[str, Callable[..., Any]] = {
    "aten._local_scalar_dense.default": FakeAccelerator._read_number,
    "aten.nonzero.default": FakeAccelerator._counted,
    "aten.masked_select.default": FakeAccelerator._counted,
    "aten.bincount.default": FakeAccelerator._counted,
    "aten.repeat_interleave.Tensor": FakeAccelerator._counted,
    "aten.index.Tensor": FakeAccelerator._indexed,
    "aten.addmm.dtype_out": FakeAccelerator._added_wide,
    "aten._to_copy.default": FakeAccelerator._copied_to,
    "aten.copy_.default": FakeAccelerator._copied_into,
}


def is_here(x: Tensor) -> bool:
    """Whether it is on a fake device."""
    return x.device.type == NAME


def _check_memory(what: str, x: Tensor) -> None:
    if x.numel() and not x.untyped_storage().nbytes():
        raise ReleasedMemoryError(f"{what}: a tensor of shape {tuple(x.shape)} has been released ({_place()})")


@cache
def _gives_views(function: Any) -> bool:
    """Whether an operator reads and writes nothing."""
    schema = function._schema
    writes = any(each.is_write for each in schema.arguments)
    return not writes and any(each.alias_info is not None for each in schema.returns)


def _place() -> str:
    """The line of this package that is at work."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/optimus/" in file and "/optimus/testing/" not in file:
            return f"{file.split('/optimus/')[-1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


# ---- What torch asks of a device ----


class _Stream:
    """A stream that orders nothing."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = torch.device(NAME, _machine().now) if device is None else torch.device(device)

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None: ...

    def record_event(self, event: Any = None) -> "_Event":
        return event or _Event()

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None:
        _machine().waited("stream.synchronize")


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _machine().waited("event.synchronize")


class _Module:
    """`torch.fakegpu`."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...

    def device_count(self) -> int:
        return _machine().devices

    def current_device(self) -> int:
        return _machine().now

    def set_device(self, device: Any) -> None:
        _machine().now = device if isinstance(device, int) else torch.device(device).index or 0

    def get_device_name(self, device: Any = None) -> str:
        return str(_machine().properties.name)

    def get_device_properties(self, device: Any = None) -> Any:
        return _machine().properties

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return _machine().mem_get_info(device)

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None: ...

    def synchronize(self, device: Any = None) -> None:
        _machine().waited("synchronize")

    def current_stream(self, device: Any = None) -> _Stream:
        return _Stream(device)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def device(self, device: Any) -> Any:
        return nullcontext()


class _Entered(NamedTuple):
    machines: list[FakeAccelerator]


@cache
def _entered() -> _Entered:
    return _Entered([])


def _machine() -> FakeAccelerator:
    return _entered().machines[-1]


@cache
def install() -> None:
    """Give this process the fake accelerator for the rest of its life."""
    module = _Module()
    _setup_privateuseone_for_python_backend(NAME, backend_module=module)
    torch.set_num_threads(1)
    torch._C._set_only_lift_cpu_tensors(True)  # else torch.tensor([...], device=...) goes past all modes
    # What this package asks of torch's modules at call time.
    _put(torch, Stream=_Stream, Event=_Event)
    _put(
        torch.accelerator,
        device_count=module.device_count,
        current_device_index=module.current_device,
        set_device_index=module.set_device,
        current_stream=module.current_stream,
        synchronize=module.synchronize,
        max_memory_allocated=lambda device=None: _machine().memory.peak,
        reset_peak_memory_stats=lambda device=None: _machine().memory.reset_peak(),
    )
    _put(FakeTensor, tolist=lambda self: self.cpu().tolist())  # one copy, as on any device
    _put(Tensor, record_stream=lambda self, stream: None)
    _operators().impl("addmm.dtype_out", lambda *_, **__: None, "PrivateUse1")  # it has one
    _stub_triton()
    _stub_groups()
    _stub_dispatch()
    _stub_message_driven()
    run = threading.Thread.run

    def run_in_mode(self: threading.Thread) -> None:  # modes are a thread's
        with _machine() if _entered().machines else nullcontext():
            run(self)

    _put(threading.Thread, run=run_in_mode)


def _put(owner: Any, **functions: Any) -> None:
    """In the place of its own."""
    for name, function in functions.items():
        setattr(owner, name, function)


@cache
def _operators() -> torch.library.Library:
    return torch.library.Library("aten", "IMPL")


def _stub_triton() -> None:
    from triton.runtime import interpreter, jit

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        given = dict(zip(self.arg_names, args)) | options
        sizes = tuple(grid(given) if callable(grid) else grid)
        x, y, z = sizes + (1,) * (3 - len(sizes))
        if not (0 < x < 1 << 31 and 0 < y < 1 << 16 and 0 < z < 1 << 16):
            raise RuntimeError(f"{self.fn.__name__}: a grid of {sizes}")
        _machine().launched(self.fn.__name__, list(given.items()))

    _put(jit.JITFunction, run=run)
    _put(interpreter.InterpretedFunction, run=run)


def _stub_groups() -> None:
    """Objects that ranks tell each other are those of this one, and groups are of the `fake` backend."""
    dist.Backend.backend_capability["fake"] = ["cpu", NAME]
    dist.Backend.default_device_backend_map[NAME] = "fake"
    make = dist.new_group

    def new_group(ranks: Any = None, **options: Any) -> Any:
        _machine().groups.append(dist.get_world_size() if ranks is None else len(ranks))
        return make(ranks, **(options | {"backend": "fake"}))

    begin = dist.init_process_group

    def init_process_group(backend: Any = None, rank: int | None = None, world_size: int = 0, **_: Any) -> None:
        """Whatever the backend; by default as a launcher says."""
        if rank is None:
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        begin("fake", rank=rank, world_size=world_size, store=fake_pg.FakeStore())

    _put(dist, new_group=new_group, init_process_group=init_process_group)
    _put(
        Group,
        all_gather_object=lambda self, value: [value] * self.size,
        gather_object=lambda self, value: [value] * self.size if self.rank == 0 else None,
        broadcast_object=lambda self, value: value,
        on_first=lambda self, call: call(),
    )


def _stub_dispatch() -> None:
    """Tokens are spread evenly over experts and ranks."""
    exchange = AllToAllDispatch.exchange

    def exchange_evenly(
        self: AllToAllDispatch,
        x_TH: Tensor,
        weights_TK: Tensor,
        indices_TK: Tensor,
        experts: Any,
        counts: ExchangeCounts,
        *overlapped: Any,
    ) -> Tensor:
        if is_here(x_TH):
            (tokens, chosen), ranks = weights_TK.shape, self.group.size
            rows = round(tokens * copies(self.experts_per_rank * ranks, ranks, chosen) / ranks)
            all_parts = 1 if self.duplicates else self.parts.size
            counts = ExchangeCounts(
                [rows] * ranks, [rows] * ranks, [rows * ranks] * all_parts, tokens * chosen * all_parts
            )
        return exchange(self, x_TH, weights_TK, indices_TK, experts, counts, *overlapped)

    _put(AllToAllDispatch, exchange=exchange_evenly)
    choices_here = AllGatherDispatch.choices_here

    def even_choices(self: AllGatherDispatch, local_AK: Tensor) -> int:
        read = choices_here(self, local_AK)
        return local_AK.numel() // self.group.size if is_here(local_AK) else read

    _put(AllGatherDispatch, choices_here=even_choices)


def _stub_message_driven() -> None:
    """Messages arrive in an order that can be."""

    def choose(self: MessageDrivenExecutor) -> Any:
        """As the first rank of its team does."""
        while (action := self._ready.choose()) is None:
            self._take_in()
        return action

    execute = MessageDrivenExecutor.run

    def execute_in_order(self: MessageDrivenExecutor) -> Any:
        """No gradient comes for what has not been computed."""
        links, trace = self._links, self._computing.trace
        start = links.start_receive

        def start_receive(receive: Action, room: Message) -> Callable[[], Message]:
            finish, needed = start(receive, room), (Kind.FORWARD, *receive[1:])

            def wait() -> Message:
                while receive.kind is Kind.RECEIVE_BACKWARD and not any(each[:3] == needed for each in trace):
                    time.sleep(1e-3)
                return finish()

            return wait

        _put(links, start_receive=start_receive)
        return execute(self)

    _put(MessageDrivenExecutor, run=execute_in_order, _as_chosen=choose)


@contextmanager
def fake_accelerator(
    chip: str = "H200", *, devices: int = 1, ranks: int = 1, rank: int = 0
) -> Iterator[FakeAccelerator]:
    """Inside, this process has `devices` of this chip (of `PROPERTIES`), and is one of so many ranks."""
    install()
    chips._chip.cache_clear()
    machine = FakeAccelerator(PROPERTIES[chip], devices)
    _entered().machines.append(machine)
    if dist.is_initialized():
        dist.destroy_process_group()
    try:
        if ranks > 1:
            dist.init_process_group(rank=rank, world_size=ranks)
        plain = mock.patch.object(
            adamw, "_compiled", return_value=None
        )  # the host's update: a compiler has other modes
        with _with_flash(chip not in _NO_FLASH), plain, machine, resizes(machine.memory, machine.memory.knows):
            yield machine
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        _entered().machines.remove(machine)


class _Flash(torch.autograd.Function):
    """Attention by the operators of flash attention, as torch makes of it on such a device."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        out, lse_BNS = attention._flash(q, k, v, causal)
        ctx.save_for_backward(q, k, v, out, lse_BNS)
        ctx.causal = causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse_BNS = ctx.saved_tensors
        return *attention._flash_backward(grads[0], q, k, v, out, lse_BNS, ctx.causal), None


@contextmanager
def _with_flash(of_blocks: bool) -> Iterator[None]:
    """torch's choice of attention, which asks for devices that it knows; `of_blocks`, too, whose log-sum-exps are needed."""

    def fits(q: Tensor, *_: Any) -> bool:
        return of_blocks and q.device.type == NAME and q.shape[-1] % 8 == 0

    def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        made: Tensor = _Flash.apply(q, k, v, is_causal)
        return made

    plain = nn.functional.scaled_dot_product_attention
    with (
        mock.patch.object(attention, "flash_fits", fits),
        mock.patch.object(
            nn.functional,
            "scaled_dot_product_attention",
            lambda q, k, v, **options: (attend if is_here(q) else plain)(q, k, v, **options),
        ),
    ):
        yield
