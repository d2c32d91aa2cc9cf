"""Runs a rank's modules on tensors without floating-point data; counts live bytes, and records collectives.

Floating-point tensors are on the meta device. Integers and booleans are on the CPU: routes and counts determine the
lengths of other tensors.
"""

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from optimus.comm import DONE, Group, Groups, Handle, PlannedGroups
from optimus.comm.algorithms import CollectiveKind
from optimus.comm.group import Shared
from optimus.mesh import Mesh, RankPartition

_META, _CPU = torch.device("meta"), torch.device("cpu")


class Sent(NamedTuple):
    """A collective. `nbytes` is the size of the input; for an all-gather, of the output."""

    kind: CollectiveKind
    ranks: tuple[int, ...]
    nbytes: int


@dataclass
class _Shared(Shared):
    sent: list[Sent] = field(default_factory=list)


class ShapeGroups(Groups):
    """The groups of the first rank of `mesh`, without process groups."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self._shared: _Shared = _Shared(**vars(self._shared))

    @property
    def sent(self) -> list[Sent]:
        """The collectives in groups with two or more ranks, in order, without shifts and collectives of objects."""
        return self._shared.sent

    def make(self, planned: Iterable[PlannedGroups]) -> None:
        """Does nothing: there are no process groups to create."""

    def group_of(self, partition: RankPartition) -> Group:
        return ShapeGroup(partition.group(0), 0, shared=self._shared)


class ShapeGroup(Group):
    """A group in which all-gathers and all-to-alls repeat this rank's data; reductions and shifts do nothing."""

    shared: _Shared

    def _send(self, kind: CollectiveKind, tensor: Tensor) -> None:
        if self.size > 1:
            self.shared.sent.append(Sent(kind, tuple(self.ranks), tensor.nbytes))

    def all_reduce_async(self, tensor: Tensor, beside: bool = True) -> Handle:
        self._send("all_reduce", tensor)
        return DONE

    def reduce_scatter_async(
        self, tensor: Tensor, out: Tensor, lengths: Sequence[int] | None = None, beside: bool = True
    ) -> Handle:
        self._send("reduce_scatter", tensor)
        return DONE

    def all_gather_async(
        self, tensor: Tensor, part: Tensor, lengths: Sequence[int] | None = None, beside: bool = True
    ) -> Handle:
        self._send("all_gather", tensor)
        if not tensor.is_meta:
            tensor.view(self.size, *part.shape).copy_(part)
        return DONE

    def shift_async(self, tensor: Tensor, out: Tensor) -> Handle:
        return DONE

    def all_to_all_async(
        self, rows: Tensor, send: Sequence[int] | None = None, receive: Sequence[int] | None = None
    ) -> tuple[Tensor, Handle]:
        self._send("all_to_all", rows)
        each = [len(rows) // self.size] * self.size
        send, receive = send or each, receive or each
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        if not rows.is_meta:
            first = sum(send[: self.rank])
            out.view(self.size, receive[0], *rows.shape[1:]).copy_(rows[first : first + send[self.rank]])
        return out, DONE

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value] * self.size


class Shapes(TorchDispatchMode):
    """A context in which floating-point results have no data, and `alive` counts the live bytes.

    `topk` draws distinct columns at random, the first `busy` columns about `load` times as often as the mean. Along the
    rows, the same draws recur `repeats` times.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False to save time. The context must not enclose compiled functions."""
        return False

    def __init__(self, load: float = 1.0, busy: int = 1, repeats: int = 1) -> None:
        super().__init__()
        self.alive = self.made = 0  # live bytes, and number of storages so far, including ignored storages
        self.sizes: dict[int, int] = {}  # bytes of live storages, by number, in order of creation
        self.history: list[int] = []  # `alive` after each operation
        self._load, self._busy, self._repeats = load, busy, repeats
        self._known: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def ignore(self, *tensors: Tensor) -> None:
        """Excludes these tensors from the count; the tensors must outlive the context."""
        for tensor in tensors:
            self._know(tensor.untyped_storage(), 0)

    def number(self, tensor: Tensor) -> int:
        """Returns the number of the tensor's storage, counted from 1 in order of creation."""
        return self._known[tensor.untyped_storage()._cdata][0]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [each for each in leaves_of([*args, *kwargs.values()]) if isinstance(each, Tensor)]
        if any(tensor.is_meta for tensor in given):
            result = self._shapes(function, args, kwargs)
        else:
            if "device" in kwargs:
                kwargs["device"] = _META if not given and _floating(function, args, kwargs) else _CPU
            result = _on_numbers(function, args, kwargs)
            numbers = isinstance(result, Tensor) and result.is_floating_point()
            if numbers and given and not any(tensor.is_floating_point() for tensor in given):
                result = torch.empty_like(result, device=_META)
        for tensor in leaves_of([result]):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._know(storage, storage.nbytes())
        self.history.append(self.alive)
        return result

    def _shapes(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        kind, written = effect_of(function)
        if kind == "view":
            return function(*args, **kwargs)
        if kind == "write":
            found = [kwargs[name] if name in kwargs else args[at] for at, name in written]
            return found[0] if len(found) == 1 else tuple(found)
        made = _outcome(function, _specification(args), _specification(kwargs.items()))
        if isinstance(made, _Specification):
            return self._made(made, None)
        columns = args[0].shape[-1] if function is torch.ops.aten.topk.default else None
        return tuple(self._made(each, columns) for each in made)

    def _made(self, made: "_Specification | None", columns: int | None) -> Tensor | None:
        """Creates a result. Integers are the indices of a `topk` over `columns` columns, or 0 if `columns` is None."""
        if made is None or made.dtype.is_floating_point:
            return (
                None if made is None else torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device=_META)
            )
        if columns is not None:
            return self._drawn(columns, made.shape)
        return torch.zeros(made.shape, dtype=made.dtype)

    def _know(self, storage: torch.UntypedStorage, size: int) -> None:
        self.alive += size
        self.made += 1
        self.sizes[self.made] = size
        forget = partial(self._forget, storage._cdata, self.made)
        self._known[storage._cdata] = self.made, weakref.ref(storage, forget)

    def _forget(self, key: int, number: int, _: object) -> None:
        self._known.pop(key, None)
        self.alive -= self.sizes.pop(number)

    def _drawn(self, columns: int, shape: tuple[int, ...]) -> Tensor:
        """Returns distinct columns, drawn at random, for each row of `shape`."""
        tokens = math.prod(shape[:-1])
        rows = -(-tokens // self._repeats)
        load = self._load if self._busy < columns else 1.0
        drawn = _drawn(rows, columns, shape[-1], load, self._busy if load != 1 else columns)
        return drawn.repeat(self._repeats, 1)[:tokens].contiguous().view(shape)


@lru_cache(maxsize=64)
def _drawn(rows: int, columns: int, count: int, load: float, busy: int) -> Tensor:
    """Returns `count` distinct columns for each row, by weighted sampling without replacement (Efraimidis and Spirakis
    2006)."""
    keys = torch.rand(rows, columns, generator=torch.Generator().manual_seed(0)).log_()
    if load != 1:
        rest = max(columns - load * busy, 1e-3)
        keys[:, :busy] /= load * (columns - busy) / rest
    return keys.topk(count)[1]


class _Specification(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _specification(value: Any) -> Any:
    """Replaces tensors in nested values by specifications, and lists by tuples."""
    if isinstance(value, Tensor):
        return _Specification(tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, list | tuple | type({}.items())):
        return tuple(map(_specification, value))
    return value


def _tensors(value: Any) -> Any:
    if isinstance(value, _Specification):
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=_META)
    return tuple(map(_tensors, value)) if isinstance(value, tuple) else value


@lru_cache(maxsize=1 << 14)
def _outcome(function: Any, args: Any, kwargs: Any) -> Any:
    if function is torch.ops.aten._grouped_mm.default:
        return _grouped(*args)
    named = {key: _META if key == "device" else _tensors(value) for key, value in kwargs}
    return _specification(function(*_tensors(args), **named))


def _grouped(a: _Specification, b: _Specification, ends: _Specification | None = None, *rest: Any) -> _Specification:
    """Returns the specification of the result of a grouped matmul.

    Torch's own meta function accepts only bf16 tensors with aligned strides.
    """
    shape = a.shape[:-1] + b.shape[-1:]
    if len(a.shape) == len(b.shape) == 2 and ends is not None:
        shape = (*ends.shape, *shape)
    return _Specification(shape, torch.empty(shape, device=_META).stride(), a.dtype)


@cache
def effect_of(function: Any) -> tuple[Literal["view", "write", "new"], list[tuple[int, str]]]:
    """Returns (effect of `function`, positions and names of the arguments that `function` writes)."""
    schema = function._schema
    written = [(at, each.name) for at, each in enumerate(schema.arguments) if each.is_write]
    if written:
        return "write", written
    shares = any(each.alias_info is not None for each in schema.returns)
    return "view" if shares or function is torch.ops.aten._unsafe_view.default else "new", []


def leaves_of(values: Sequence[Any]) -> list[Any]:
    """Returns the elements of nested lists and tuples."""
    found: list[Any] = []
    for each in values:
        if isinstance(each, list | tuple):
            found += leaves_of(each)
        else:
            found.append(each)
    return found


def _on_numbers(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Returns the result of `function` on tensors with data. The CPU has no `histc` of integers."""
    if function is not torch.ops.aten.histc.default or args[0].is_floating_point():
        return function(*args, **kwargs)
    return function(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)


_FLOATS = {torch.ops.aten.empty.memory_format, torch.ops.aten.zeros.default, torch.ops.aten.ones.default}


def _floating(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    dtype = kwargs.get("dtype")
    if dtype is None:
        return function in _FLOATS or any(isinstance(each, float) for each in leaves_of(args))
    return bool(dtype.is_floating_point)
