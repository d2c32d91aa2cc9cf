"""Runs a small model to find out if the children of its blocks can run as units."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from optimus.model.foreign.records import BlockPart


@dataclass
class _Child:
    """A child module of a block, and facts about its calls in one forward pass."""

    name: str
    module: nn.Module
    calls: int = 0
    fits: bool = True  # False if the arguments or the result do not suit a unit
    outputs: int = 0
    x: Tensor | None = None
    y: Tensor | None = None


def parts_of_blocks(
    layers: Sequence[nn.Module], cut: int, run: Callable[[], Tensor]
) -> Mapping[int, tuple[BlockPart, ...]]:
    """Returns the parts of the suitable blocks of `layers`, by number. `run` runs the model and returns its logits.

    A block is suitable if each parameter is in exactly one child, and if each of these children runs once and `fits`.
    Returns no parts if the model uses a child's parameters outside the child. `cut` is the position at which `_mixes`
    divides sequences.
    """
    children = {number: found for number, layer in enumerate(layers) if (found := _children(layer))}
    order: list[_Child] = []
    with ExitStack() as stack:
        for each in children.values():
            for child in each:
                stack.enter_context(_recorded(child, order))
        expected = run().detach()
    children = {n: found for n, found in children.items() if all(each.calls == 1 and each.fits for each in found)}
    kinds = {id(child): _kind(child, cut) for found in children.values() for child in found}
    with ExitStack() as stack, torch.no_grad():
        for found in children.values():
            for child in found:
                stack.enter_context(_hidden(child.module))
        if not torch.equal(run(), expected):
            return {}
    return {
        number: tuple(
            BlockPart(child.name, kinds[id(child)], child.outputs)
            for child in order
            if any(child is own for own in found)
        )
        for number, found in children.items()
    }


def _children(layer: nn.Module) -> list[_Child]:
    """Returns the children with parameters; none unless each parameter of the block is in exactly one child."""
    children = [
        _Child(name, module) for name, module in layer.named_children() if next(module.parameters(), None) is not None
    ]
    counted = [id(parameter) for child in children for parameter in child.module.parameters()]
    alone = len({*counted}) == len(counted) and {*counted} == {id(each) for each in layer.parameters()}
    return children if alone else []


@contextmanager
def _recorded(child: _Child, order: list[_Child]) -> Iterator[None]:
    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        child.calls += 1
        order.append(child)
        name = next(iter(kwargs), "")
        first = args[0] if args else kwargs.get(name)
        named = name == next(iter(inspect.signature(module.forward).parameters), None)
        child.fits &= isinstance(first, Tensor) and (bool(args) or named)
        child.x = first if isinstance(first, Tensor) else None

    def leave(module: nn.Module, args: Any, made: Any) -> None:
        first, *rest = made if isinstance(made, tuple) and made else (made,)
        child.outputs = len(made) if isinstance(made, tuple) else 0
        child.y = first if isinstance(first, Tensor) else None
        trained = any(isinstance(each, Tensor) and each.requires_grad for each in rest)
        child.fits &= child.y is not None and not trained

    handles = [
        child.module.register_forward_pre_hook(enter, with_kwargs=True),
        child.module.register_forward_hook(leave),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _hidden(module: nn.Module) -> Iterator[None]:
    """Makes the parameters of a module NaN inside the `with` block, except while the module runs."""
    values = [(each, each.data) for each in module.parameters()]

    def show(*_: Any) -> None:
        for parameter, value in values:
            parameter.data = value

    def hide(*_: Any) -> None:
        for parameter, value in values:
            parameter.data = torch.full_like(value, torch.nan)

    handles = [module.register_forward_pre_hook(show), module.register_forward_hook(hide)]
    hide()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        show()


def _kind(child: _Child, cut: int) -> Literal["norm", "attention", "mlp"]:
    if "norm" in type(child.module).__name__.lower() and all(each.ndim == 1 for each in child.module.parameters()):
        return "norm"
    return "attention" if _mixes(child, cut) else "mlp"


def _mixes(child: _Child, cut: int) -> bool:
    """Returns True if the child's output from position `cut` on depends on its input before `cut`, or if this is
    unknown."""
    x, y = child.x, child.y
    if x is None or y is None or not (x.requires_grad and y.requires_grad) or x.ndim < 3 or x.shape[:2] != y.shape[:2]:
        return True
    (gradient,) = torch.autograd.grad(y[:, cut:].square().sum(), x, retain_graph=True, allow_unused=True)
    return gradient is not None and bool((gradient[:, :cut] != 0).any())
