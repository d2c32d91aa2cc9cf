"""Counts the operations of a model's blocks by running the blocks on tensors without floating-point data.

Stand-ins replace attention and the experts' kernels, because the operations of both depend on the device.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from optimus.autograd import once_differentiable
from optimus.kernels.attention import PLAIN, Scoring
from optimus.model.sequence import SequenceSplit
from optimus.model.units import units_of
from optimus.parallel.module_bytes import ModuleSetting, ShapeStage
from optimus.parallel.parallelize import always, replace_all
from optimus.parallel.shapes import Sent, effect_of, leaves_of


class MatmulSizes(NamedTuple):
    """`number` matmuls [m, k] x [k, n]."""

    m: float
    n: float
    k: float
    number: float = 1.0


class AttentionSizes(NamedTuple):
    """The attention of `queries` queries with this rank's heads.

    `query` and `value` are the columns per head of the queries and of the values.
    """

    queries: float
    heads: int
    kv_heads: int
    query: int
    value: int
    window: int | None


class Operations(NamedTuple):
    """The operations of one pass, except attention.

    `products` are the matmuls, and `sent` are the collectives. `kernels` is the number of other operations, without
    views and allocations. These operations read and write `moved` bytes.
    """

    products: tuple[MatmulSizes, ...]
    moved: float
    kernels: float
    sent: tuple[Sent, ...]


class UnitOperations(NamedTuple):
    """The operations of one unit of a block, in the forward pass."""

    kind: str
    forward: Operations
    attended: tuple[AttentionSizes, ...]


class BlockOperations(NamedTuple):
    """The operations of a block.

    `weights` are the weight gradients that a step can defer; `backward` is the rest of the backward pass. `attended`
    is the attention of the forward pass, and `units` are parts of the forward pass.
    """

    forward: Operations
    backward: Operations
    weights: Operations
    attended: tuple[AttentionSizes, ...]
    units: tuple[UnitOperations, ...]


@lru_cache(maxsize=4096)
def block_operations(setting: ModuleSetting, layer: int, sequences: int) -> BlockOperations:
    """Returns the operations of block `layer` on `sequences` sequences, without expert parallelism.

    For more than 2 sequences, extrapolates from 1 and 2 sequences, unless their numbers of matmuls differ.
    """
    if sequences <= 2:
        return _measured(setting, layer, sequences)
    one, two = _measured(setting, layer, 1), _measured(setting, layer, 2)
    if any(len(few.products) != len(more.products) for few, more in zip(one[:3], two[:3])):
        return _measured(setting, layer, sequences)
    return cast(BlockOperations, _grown(one, two, sequences))


def _grown(one: Any, two: Any, sequences: int) -> Any:
    if isinstance(one, tuple):
        grown = [_grown(*both, sequences) for both in zip(one, two)]
        return type(one)(*grown) if hasattr(one, "_fields") else tuple(grown)
    return one + (sequences - 1) * (two - one) if isinstance(one, float | int) else one


@lru_cache(maxsize=1024)
def _measured(setting: ModuleSetting, layer: int, sequences: int) -> BlockOperations:
    stage = _stage(setting.without_experts)
    model, counting = stage.model, stage.counting
    counting.clear()
    with stage.shapes(), counting:
        batch, number = setting.batch(sequences), stage.numbers[layer]
        positions_S, positions = model.local_positions(batch)
        x_TH = setting.stream(sequences).requires_grad_()
        run = model.stage(range(number, number + 1), first=False, last=False)
        counting.clear()
        y_TH, _ = run(batch, positions_S, positions, x_TH * 1, None)
        units, attended, forward = tuple(counting.units), tuple(counting.attended), counting.taken()
        with stage.step.deferring() as deferred:
            y_TH.backward(torch.empty_like(y_TH))
        backward, later = counting.taken(), counting.later
        for add in deferred:
            add()
        weights = counting.taken()
    model.zero_grad()
    return BlockOperations(forward, backward, weights._replace(products=(*weights.products, *later)), attended, units)


class _CountingStage(ShapeStage):
    def __init__(self, setting: ModuleSetting) -> None:
        super().__init__(setting)
        self.counting = Counting(self.sent)
        replaced = {
            "sequence": always(_CountedSequence(self.model.sequence, self.counting)),
            "kernel": always(_CountedExperts(self.counting)),
        }
        replace_all(self.model, replaced)
        for unit in (unit for block in self.model.blocks for unit in units_of(block)):
            ((kind, module),) = unit.steps
            unit.run_by(partial(self.counting.within, kind, unit.row([module])))


_stage = lru_cache(maxsize=32)(_CountingStage)


class Counting(TorchDispatchMode):
    """A context that counts operations on tensors without data.

    `sent` is the list of collectives of the model's `ShapeGroups`. `taken` and `clear` empty this list.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False to save time. The context must not enclose compiled functions."""
        return False

    def __init__(self, sent: list[Sent]) -> None:
        super().__init__()
        self.attended: list[AttentionSizes] = []
        self.units: list[UnitOperations] = []
        self.later: list[MatmulSizes] = []  # weight gradients of stand-ins
        self._sent, self._products, self._moved, self._kernels = sent, list[MatmulSizes](), 0.0, 0

    def clear(self) -> None:
        """Forgets all operations."""
        self.attended, self.units, self.later = [], [], []
        self.taken()

    def taken(self) -> Operations:
        """Returns the operations since the last call of `taken` or `clear`."""
        found = self._since((0, 0.0, 0, 0))
        self._sent.clear()
        self._products, self._moved, self._kernels = [], 0.0, 0
        return found

    def within(self, kind: str, run: Callable[..., Any], *args: Any) -> Any:
        """Returns `run(*args)`, and counts the call's operations also as a unit of this kind."""
        mark, attended = (len(self._products), self._moved, self._kernels, len(self._sent)), len(self.attended)
        made = run(*args)
        self.units.append(UnitOperations(kind, self._since(mark), tuple(self.attended[attended:])))
        return made

    def _since(self, mark: tuple[int, float, int, int]) -> Operations:
        products, moved, kernels, sent = mark
        return Operations(
            tuple(self._products[products:]), self._moved - moved, self._kernels - kernels, tuple(self._sent[sent:])
        )

    def add(self, products: Iterable[MatmulSizes], moved: float, kernels: int) -> None:
        """Counts the operations of a stand-in."""
        self._products += products
        self._moved += moved
        self._kernels += kernels

    def add_later(self, products: Iterable[MatmulSizes]) -> None:
        """Counts weight gradients of a stand-in."""
        self.later += products

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [each for each in leaves_of([*args, *(kwargs or {}).values(), result]) if isinstance(each, Tensor)]
        name = function.overloadpacket.__name__
        if not any(each.is_meta for each in tensors) or name in _FREE or effect_of(function)[0] == "view":
            return result
        if name.startswith("_scaled_dot_product"):
            if "backward" not in name:
                self._attend(*args[:3])
            return result
        products = _PRODUCTS.get(name)
        found = () if products is None else tuple(products(args, result))
        if found:
            self._products += found
        else:
            self._moved += sum(each.nbytes for each in tensors)
            self._kernels += 1
        return result

    def _attend(self, q_BNSD: Tensor, k_BMSD: Tensor, v_BMSD: Tensor) -> None:
        (batch, heads, length, query), value = q_BNSD.shape, v_BMSD.shape[-1]
        self.attended.append(AttentionSizes(batch * length, heads, k_BMSD.shape[1], query, value, None))


_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "_unsafe_view", "resize_"}


# ---- Matmuls ----


def _mm(a: Tensor, b: Tensor) -> Iterator[MatmulSizes]:
    count = math.prod(a.shape[:-2])
    yield MatmulSizes(a.shape[-2], b.shape[-1], a.shape[-1], count)


def _grouped_mm(args: Sequence[Any], result: Tensor) -> Iterator[MatmulSizes]:
    """Yields the matmuls of a grouped matmul, as if all groups had equal sizes."""
    a, b = args[:2]
    if a.ndim == b.ndim == 2:
        yield MatmulSizes(a.shape[0], b.shape[1], a.shape[1] / len(result), len(result))
    elif a.ndim == 2:
        yield MatmulSizes(len(a) / len(b), b.shape[-1], a.shape[-1], len(b))
    else:
        yield MatmulSizes(a.shape[-2], b.shape[-1] / (len(a) if b.ndim == 2 else 1), a.shape[-1], len(a))


def _convolution(args: Sequence[Any], result: Any) -> Iterator[MatmulSizes]:
    """Yields the matmuls of a convolution or of its backward pass; none for a depthwise convolution."""
    backward = isinstance(result, tuple)
    x, weight = args[1 if backward else 0], args[2 if backward else 1]
    groups = int(args[9 if backward else 8])
    if groups == x.shape[1]:
        return
    made = args[0] if backward else result
    positions = made.numel() / made.shape[1]
    outputs, inputs = weight.shape[0] / groups, math.prod(weight.shape[1:])
    if not backward:
        yield MatmulSizes(positions, outputs, inputs, groups)
        return
    yield MatmulSizes(positions, inputs, outputs, groups)
    yield MatmulSizes(outputs, inputs, positions, groups)


_PRODUCTS: dict[str, Callable[[Sequence[Any], Any], Iterable[MatmulSizes]]] = {
    "mm": lambda args, _: _mm(*args[:2]),
    "bmm": lambda args, _: _mm(*args[:2]),
    "addmm": lambda args, _: _mm(*args[1:3]),
    "addmm_": lambda args, _: _mm(*args[1:3]),
    "baddbmm": lambda args, _: _mm(*args[1:3]),
    "baddbmm_": lambda args, _: _mm(*args[1:3]),
    "_grouped_mm": _grouped_mm,
    "convolution": _convolution,
    "convolution_backward": _convolution,
}


# ---- Stand-ins ----


class _CountedSequence(SequenceSplit):
    def __init__(self, split: SequenceSplit, counting: Counting) -> None:
        super().__init__()
        self.parts, self.positions, self._counting = split.parts, split.positions, counting  # type: ignore[method-assign]

    def attend(self, q_BSND: Tensor, k_BSMD: Tensor, v_BSMD: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        (batch, length, heads, query), (*_, kv_heads, value) = q_BSND.shape, v_BSMD.shape
        self._counting.attended.append(AttentionSizes(batch * length, heads, kv_heads, query, value, scoring.window))
        return _Shaped.apply((*q_BSND.shape[:-1], value), None, q_BSND, k_BSMD, v_BSMD)


class _CountedExperts:
    """A stand-in for the experts' kernel. Tokens choose all experts equally often."""

    def __init__(self, counting: Counting) -> None:
        self._counting = counting

    def __call__(
        self,
        x_TH: Tensor,
        weights_TK: Tensor,
        indices_TK: Tensor,
        gate_up_EJH: Tensor,
        down_EHI: Tensor,
        *_: Any,
        **options: Any,
    ) -> Tensor:
        """Returns a tensor like `x_TH`; see `expert_mlp` for the arguments."""
        (experts, hidden, inner), outer, counting = down_EHI.shape, gate_up_EJH.shape[1], self._counting
        rows = indices_TK.numel()
        each, moved = rows / experts, rows * (3 * hidden + outer + inner) * x_TH.element_size()
        counting.add([MatmulSizes(each, outer, hidden, experts), MatmulSizes(each, hidden, inner, experts)], moved, 3)

        def back() -> None:
            inputs = MatmulSizes(each, inner, hidden, experts), MatmulSizes(each, hidden, outer, experts)
            counting.add(inputs, 2 * moved, 3)
            counting.add_later([MatmulSizes(outer, hidden, each, experts), MatmulSizes(hidden, inner, each, experts)])

        made: Tensor = _Shaped.apply(x_TH.shape, back, x_TH, weights_TK)
        return made


class _Shaped(torch.autograd.Function):
    """Creates a tensor of the given shape, and calls `back`, if given, in the backward pass."""

    @staticmethod
    def forward(ctx: Any, shape: Sequence[int], back: Callable[[], None] | None, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.back = back
        return tensors[0].new_empty(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.back is not None:
            ctx.back()
        return None, None, *map(torch.empty_like, ctx.saved_tensors)
