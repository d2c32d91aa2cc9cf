"""Count the bytes of the tensors that a piece of code allocates, to hold its memory to theory on any machine.

What is counted is storages, not tensors: a view has its base's, an in-place operation makes none. Every operator called
from Python, and in the backward pass, goes through a dispatch mode, which finds the storages that its results have and its
arguments had not; each is forgotten when it dies. Bytes are those asked for, before the allocator rounds them up.

Not seen:
- what an operator allocates and frees inside, such as the scratch space of a matrix product, and what compiled code makes;
- storages made without an operator: `torch.UntypedStorage(n)`, and with it `torch.load` and `copy.deepcopy`;
- memory that torch has not allocated: that of NumPy arrays, of mapped files, of a communication library;
- operators called by other threads. (The backward pass on a CPU runs in the thread that asks for it.)
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import RLock
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from optimus.state.chunk import Chunk, TrainedChunk


class Allocations:
    """Bytes allocated inside the context of `tracking` and still alive: now, and the most that there have been.

    Both stay as they are when the context ends.
    """

    def __init__(self) -> None:
        self.current = 0
        self.peak = 0
        self._alive: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}  # by address: storage, bytes
        self._lock = RLock()  # a storage may die in another thread, or in this one while we count

    def allocated(self, storage: UntypedStorage) -> None:
        """Count the memory that `storage` has now. What it had before lives until then: its contents are copied."""
        key, size = storage._cdata, storage.nbytes()
        with self._lock:
            self.current += size
            self.peak = max(self.peak, self.current)
            self._freed(key)
            self._alive[key] = (weakref.ref(storage, lambda _: self._freed(key)), size)

    def _freed(self, key: int) -> None:
        with self._lock:
            _, size = self._alive.pop(key, (None, 0))
            self.current -= size

    def knows(self, storage: UntypedStorage) -> bool:
        """Whether it is counted."""
        return storage._cdata in self._alive

    def reset_peak(self) -> None:
        """The most is what is there now."""
        self.peak = self.current

    def _end(self) -> None:
        with self._lock:
            self._alive.clear()  # the weak references go too, and tell of no more deaths


@contextmanager
def tracking() -> Iterator[Allocations]:
    """Count what is allocated inside the context.

    A storage that is resized counts with the bytes it is given, also where it existed before; those that it had stop
    counting, if they did. So, for a storage of n bytes from before: `resize_(0)` changes nothing, a following `resize_(n)`
    adds n, and another `resize_(0)` takes them away.
    """
    allocations = Allocations()
    with _Mode(allocations), resizes(allocations):
        try:
            yield allocations
        finally:
            allocations._end()


class _Mode(TorchDispatchMode):
    """Sees every operator, after autograd and before the device."""

    def __init__(self, allocations: Allocations) -> None:
        super().__init__()
        self.allocations = allocations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # a tensor that wraps others, such as DTensor: we are called again with those
        given = _storages((args, kwargs))
        before = {storage._cdata: storage.nbytes() for storage in given}
        if func is torch.ops.aten.lift_fresh.default:  # how `torch.tensor` presents what it has made
            before = {}
        result = func(*args, **kwargs)
        for storage in {storage._cdata: storage for storage in _storages(result) + given}.values():
            known = storage._cdata in before or self.allocations.knows(storage)
            resized = before.get(storage._cdata, storage.nbytes()) != storage.nbytes()
            if resized or (not known and storage.resizable()):  # what torch has not allocated cannot be resized
                self.allocations.allocated(storage)
        return result


def _storages(values: Any) -> list[UntypedStorage]:
    """The storages among `values`, at any depth, and those of the tensors. Sparse and meta tensors have none."""
    leaves = tree_leaves(values)
    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout == torch.strided)
    storages = [tensor.untyped_storage() for tensor in tensors]
    storages += [leaf for leaf in leaves if isinstance(leaf, UntypedStorage)]
    return [storage for storage in storages if storage.device.type != "meta"]


@contextmanager
def resizes(
    allocations: Allocations, counts: Callable[[UntypedStorage], bool] = lambda storage: storage.device.type != "meta"
) -> Iterator[None]:
    """Notice `UntypedStorage.resize_`, which is no operator, of what `counts`; of any thread."""
    original: Callable[..., Any] = UntypedStorage.resize_

    @wraps(original)
    def resize_(storage: UntypedStorage, size: int) -> Any:
        counted = counts(storage)
        result = original(storage, size)
        if counted:
            allocations.allocated(storage)
        return result

    inherited = "resize_" not in vars(UntypedStorage)
    UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if inherited:
            del UntypedStorage.resize_
        else:
            UntypedStorage.resize_ = original  # type: ignore[method-assign]


def allocated(chunks: Iterable[Chunk]) -> dict[str, int]:
    """Bytes of the buffers of chunks as they are now, by kind; `master` is zero where the parameters are master weights."""
    counted: set[int] = set()

    def count(*buffers: Tensor) -> int:
        storages = {s._cdata: s for s in (buffer.untyped_storage() for buffer in buffers) if s._cdata not in counted}
        counted.update(storages)
        return sum(storage.nbytes() for storage in storages.values())

    total: Counter[str] = Counter()
    for chunk in chunks:
        total["parameters"] += count(chunk.parameter, chunk.compute_shard)
        total["gradients"] += (
            count(chunk.gradients.gradient, chunk.gradients.reduced) if isinstance(chunk, TrainedChunk) else 0
        )
        total["master"] += count(*(buffer for prefix, buffer in chunk.resident.items() if prefix == "model"))
        total["moments"] += count(*(buffer for prefix, buffer in chunk.resident.items() if prefix != "model"))
        total["mask"] += count(*(buffer for kind, buffer in chunk._made.items() if kind == "mask"))
    return dict(total)
