"""The device of the fake accelerator: its operators with their counts, and the interface that torch requires.

`fake_accelerator.py` describes the purpose.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from optimus.testing.memory import Allocations

NAME = "fakegpu"


# Properties of a rank's device as torch reports them, with the same gaps as torch's for a maker's devices.
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


class Wait(NamedTuple):
    """A wait of the host for the device."""

    what: str
    place: str  # line in this package
    phase: str


class Upload(NamedTuple):
    """A copy of host data to the device."""

    place: str  # line in this package
    beside: bool  # asynchronous, from pinned memory


class ReleasedMemoryError(Exception):
    """The use of device memory after its release."""


class _FakeTensors(FakeTensorMode):
    """A FakeTensorMode for several threads: tensors keep their device in other threads while one is inside a kernel."""

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
    """Records the events on the fake devices of this process while active, as the module's docstring describes.

    `waits`, `uploads`, `launches` by (phase, kernel or operator), `collectives` and `touched` (the devices) count from
    the last `forget`. Comparisons of its numbers are true if it `agrees`.
    """

    def __init__(self, properties: dict[str, Any], devices: int = 1, agrees: bool = False) -> None:
        super().__init__()
        self.properties, self.devices = SimpleNamespace(**properties), devices
        self._agrees = agrees
        self.memory = Allocations()
        self.waits: list[Wait] = []
        self.uploads: list[Upload] = []
        self.launches: Counter[tuple[str, str]] = Counter()
        self.collectives: Counter[str] = Counter()
        self.touched: set[int] = set()
        self.groups: list[int] = []  # sizes of the process groups made
        self.now = 0  # index of the selected device
        self.phase = ""
        self._fake = _FakeTensors()
        self._pinned: set[int] = set()  # storages of host memory
        self._lock = threading.RLock()  # FakeTensorMode is for one thread at a time, but autograd has its own

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def forget(self) -> None:
        """Resets all counts."""
        self.waits, self.uploads, self.touched = [], [], set()
        self.launches.clear()
        self.collectives.clear()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Names the phase of the work inside the context."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def waited(self, what: str) -> None:
        """Records that the host has waited."""
        self.waits.append(Wait(what, _place(), self.phase))

    def launched(self, kernel: str, tensors: Sequence[Any]) -> None:
        """Records a Triton kernel's launch; asserts that all its tensors are on the selected device and have memory."""
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
            if torch.is_inference_mode_enabled() and function._can_decompose():  # otherwise autograd has decomposed
                with self:
                    return function.decompose(*args, **kwargs)
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
        """Returns an operator's result on the device, and counts its memory."""
        if "generator" in kwargs:  # no number is drawn
            kwargs = kwargs | {"generator": None}
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
        """Returns a tensor without numbers on the device of `like`."""
        make = torch.ops.aten.empty.memory_format
        made: Tensor = self.run(make, list(shape), dtype=dtype or like.dtype, device=like.device)
        return made

    # ---- Between host and device ----

    def _read_number(self, function: Any, args: Any, kwargs: Any) -> Any:
        self.waited("a number is read")
        dtype = args[0].dtype
        return self._agrees if dtype == torch.bool else 1.0 if dtype.is_floating_point else 0

    def _equal(self, function: Any, args: Any, kwargs: Any) -> bool:
        self.waited("a number is read")
        return self._agrees

    def _counted(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Returns the result of an operator whose size only the device knows: half of the largest size, so that loops
        end."""
        x = args[0]
        self.waited(str(function))
        if function is torch.ops.aten.nonzero.default:
            return self.empty([x.numel() // 2, x.dim()], x, torch.int64)
        if function is torch.ops.aten._unique2.default:  # numbers, positions, counts
            half = [x.numel() // 2]
            return self.empty(half, x), self.empty(x.shape, x, torch.int64), self.empty(half, x, torch.int64)
        if function is torch.ops.aten.masked_select.default:
            return self.empty([x.numel() // 2], x)
        if function is torch.ops.aten.bincount.default:
            return self.empty([kwargs.get("minlength", args[2] if len(args) > 2 else 0)], x, torch.int64)
        return self.empty([16 * x.numel()], x)  # repeat_interleave

    def _indexed(self, function: Any, args: Any, kwargs: Any) -> Tensor:
        x, indices = args[0], args[1]
        masks = [each for each in indices if each is not None and each.dtype in (torch.bool, torch.uint8)]
        if not masks:
            self.launches[self.phase, str(function)] += 1
            result: Tensor = self.run(function, *args, **kwargs)
            return result
        self.waited("boolean index")
        return self.empty([masks[0].numel() // 2, *x.shape[masks[0].dim() :]], x)

    def _copied_to(self, function: Any, args: Any, kwargs: Any) -> Any:
        x, to = args[0], kwargs.get("device")
        there = x.device if to is None else torch.device(to)
        dtype = kwargs.get("dtype") or x.dtype
        if there.type == NAME and is_here(x):
            self.launches[self.phase, str(function)] += 1
            return self.run(function, *args, **kwargs)
        if there.type == NAME:  # a host tensor; the host continues once its memory is read
            beside = kwargs.get("non_blocking", False) and x.untyped_storage()._cdata in self._pinned
            self.uploads.append(Upload(_place(), beside))
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
        """Stands in for an operator without a shape rule on the CPU's torch."""
        for each in (*args[:3], kwargs["out"]):
            _check_memory(str(function), each)
        self.launches[self.phase, str(function)] += 1
        out: Tensor = kwargs["out"]
        return out

    # ---- The machine ----

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Returns (free, total) bytes, as a device module does."""
        self.touched.add(self.now if device is None else torch.device(device).index or 0)
        return self.properties.total_memory - self.memory.current, self.properties.total_memory


_READ: dict[str, Callable[..., Any]] = {
    "aten._local_scalar_dense.default": FakeAccelerator._read_number,
    "aten.equal.default": FakeAccelerator._equal,
    "aten.nonzero.default": FakeAccelerator._counted,
    "aten._unique2.default": FakeAccelerator._counted,
    "aten.masked_select.default": FakeAccelerator._counted,
    "aten.bincount.default": FakeAccelerator._counted,
    "aten.repeat_interleave.Tensor": FakeAccelerator._counted,
    "aten.index.Tensor": FakeAccelerator._indexed,
    "aten.addmm.dtype_out": FakeAccelerator._added_wide,
    "aten._to_copy.default": FakeAccelerator._copied_to,
    "aten.copy_.default": FakeAccelerator._copied_into,
}


def is_here(x: Tensor) -> bool:
    """Returns whether a tensor is on a fake device."""
    return x.device.type == NAME


def _check_memory(what: str, x: Tensor) -> None:
    if x.numel() and not x.untyped_storage().nbytes():
        raise ReleasedMemoryError(f"{what}: a tensor of shape {tuple(x.shape)} has been released ({_place()})")


@cache
def _gives_views(function: Any) -> bool:
    """Returns whether an operator only makes views."""
    schema = function._schema
    writes = any(each.is_write for each in schema.arguments)
    return not writes and any(each.alias_info is not None for each in schema.returns)


def _place() -> str:
    """Returns the innermost line of this package in the call stack."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/optimus/" in file and "/optimus/testing/" not in file:
            return f"{file.split('/optimus/')[-1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


# ---- What torch asks of a device ----


class _Stream:
    """A stream without any order."""

    stream_id = 0

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = torch.device(NAME, machine().now) if device is None else torch.device(device)

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None: ...

    def record_event(self, event: Any = None) -> "_Event":
        return event or _Event()

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None:
        machine().waited("stream.synchronize")


class _Generator(torch.Generator):
    """A generator from which no number is drawn."""

    def __new__(cls, device: Any = "cpu") -> "_Generator":
        return super().__new__(cls, "cpu" if torch.device(device).type == NAME else device)  # type: ignore[call-arg]


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        machine().waited("event.synchronize")


class _Module:
    """The module `torch.fakegpu`."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...

    def device_count(self) -> int:
        return machine().devices

    def current_device(self) -> int:
        return machine().now

    def set_device(self, device: Any) -> None:
        machine().now = device if isinstance(device, int) else torch.device(device).index or 0

    def get_device_name(self, device: Any = None) -> str:
        return str(machine().properties.name)

    def get_device_properties(self, device: Any = None) -> Any:
        return machine().properties

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return machine().mem_get_info(device)

    def empty_cache(self) -> None: ...

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None: ...

    def synchronize(self, device: Any = None) -> None:
        machine().waited("synchronize")

    def current_stream(self, device: Any = None) -> _Stream:
        return _Stream(device)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def device(self, device: Any) -> Any:
        return nullcontext()


@cache
def entered() -> list[FakeAccelerator]:
    """Returns the fake accelerators of this process; the last one is in use."""
    return []


def machine() -> FakeAccelerator:
    """Returns the fake accelerator in use."""
    return entered()[-1]


@cache
def install_device() -> None:
    """Gives this process the device for the rest of its life."""
    module = _Module()
    _setup_privateuseone_for_python_backend(NAME, backend_module=module)
    torch.set_num_threads(1)
    torch._C._set_only_lift_cpu_tensors(True)  # otherwise torch.tensor([...], device=...) escapes all modes
    # Functions of torch that this package calls by their module.
    put(torch, Stream=_Stream, Event=_Event, Generator=_Generator)
    put(
        torch.accelerator,
        device_count=module.device_count,
        current_device_index=module.current_device,
        set_device_index=module.set_device,
        current_stream=module.current_stream,
        synchronize=module.synchronize,
        memory_allocated=lambda device=None: machine().memory.current,
        max_memory_allocated=lambda device=None: machine().memory.peak,
        reset_peak_memory_stats=lambda device=None: machine().memory.reset_peak(),
    )
    put(FakeTensor, tolist=lambda self: self.cpu().tolist())  # one copy, as on any device
    put(Tensor, record_stream=lambda self, stream: None)
    _operators().impl("addmm.dtype_out", lambda *_, **__: None, "PrivateUse1")  # the real device has this operator
    _stub_triton()
    run = threading.Thread.run

    def run_in_mode(self: threading.Thread) -> None:  # modes belong to a thread
        with machine() if entered() else nullcontext():
            run(self)

    put(threading.Thread, run=run_in_mode)


def put(owner: Any, **functions: Any) -> None:
    """Replaces functions of a module or a class."""
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
        machine().launched(self.fn.__name__, list(given.items()))

    put(jit.JITFunction, run=run)
    put(interpreter.InterpretedFunction, run=run)
