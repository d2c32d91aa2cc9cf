"""Counts the bytes of the tensors that code allocates, to compare memory with theory on any machine.

Counts the requested bytes of storages: a view shares its base's storage, and an in-place operation creates none.

The counter does not count:
- memory that an operator allocates and frees internally, for example the workspace of a matmul;
- memory that compiled code allocates;
- storages created without an operator: by `torch.UntypedStorage(n)`, and so by `torch.load` and `copy.deepcopy`;
- memory that torch has not allocated: of NumPy arrays, of mapped files, of a communication library;
- operators that other Python threads call.
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
    """Bytes allocated inside the context of `tracking` and still alive: the current number and the peak."""

    def __init__(self) -> None:
        self.current = 0
        self.peak = 0
        self._alive: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}  # (storage, bytes) by address
        self._lock = RLock()  # a storage may be freed in another thread, or in this thread while the lock is held

    def allocated(self, storage: UntypedStorage) -> None:
        """Counts the current memory of `storage`.

        A resize copies the contents, so the previous memory also counts for the peak.
        """
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
        """Returns True if `current` includes `storage`."""
        return storage._cdata in self._alive

    def reset_peak(self) -> None:
        """Starts a new measurement of the peak."""
        self.peak = self.current

    def _end(self) -> None:
        with self._lock:
            self._alive.clear()  # also drops the weak references, which would report later frees


@contextmanager
def tracking() -> Iterator[Allocations]:
    """Counts the bytes allocated inside the context."""
    allocations = Allocations()
    with _Mode(allocations), resizes(allocations):
        try:
            yield allocations
        finally:
            allocations._end()


class _Mode(TorchDispatchMode):
    """Intercepts the operators that this thread calls."""

    def __init__(self, allocations: Allocations) -> None:
        super().__init__()
        self.allocations = allocations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # the wrapper (like DTensor) calls the mode again with the wrapped tensors
        given = _storages((args, kwargs))
        before = {storage._cdata: storage.nbytes() for storage in given}
        if func is torch.ops.aten.lift_fresh.default:  # `torch.tensor` returns a new tensor through this operator
            before = {}
        result = func(*args, **kwargs)
        for storage in {storage._cdata: storage for storage in _storages(result) + given}.values():
            known = storage._cdata in before or self.allocations.knows(storage)
            resized = before.get(storage._cdata, storage.nbytes()) != storage.nbytes()
            if resized or (not known and storage.resizable()):  # memory from outside torch is not resizable
                self.allocations.allocated(storage)
        return result


def _storages(values: Any) -> list[UntypedStorage]:
    """Returns the storages in the nested structure `values`, except meta storages and storages of sparse tensors."""
    leaves = tree_leaves(values)
    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout == torch.strided)
    storages = [tensor.untyped_storage() for tensor in tensors]
    storages += [leaf for leaf in leaves if isinstance(leaf, UntypedStorage)]
    return [storage for storage in storages if storage.device.type != "meta"]


@contextmanager
def resizes(
    allocations: Allocations, counts: Callable[[UntypedStorage], bool] = lambda storage: storage.device.type != "meta"
) -> Iterator[None]:
    """Counts the calls of `UntypedStorage.resize_` on storages that `counts` accepts. The method is no operator, so a
    dispatch mode does not see the calls.
    """
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
    """Returns the current bytes of the chunks' buffers by kind, without gradients on the host and buffers on a disk. A
    storage counts once.
    """
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
