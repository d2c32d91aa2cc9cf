"""Records the arguments of modules in a forward pass, and runs modules on recorded arguments."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree


class ModuleCall(NamedTuple):
    """The arguments of one call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def fresh(self) -> "ModuleCall":
        """Returns a copy with clones of the tensors that pytree finds. The clones keep `requires_grad`."""
        return ModuleCall(*pytree.tree_map_only(Tensor, _fresh, (self.args, self.kwargs)))

    def trained(self) -> list[Tensor]:
        """Returns the tensors with `requires_grad` that pytree finds."""
        return [each for each in pytree.tree_leaves((self.args, self.kwargs)) if has_gradient(each)]

    def nested(self) -> list[Tensor]:
        """Returns the tensors with `requires_grad` that are inside containers only, such as lists."""
        direct = {id(each) for each in (*self.args, *self.kwargs.values())}
        return [each for each in _tensors((self.args, self.kwargs)) if each.requires_grad and id(each) not in direct]


def _held(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    return [id(each) for each in _tensors((args, kwargs))]


def _tensors(value: Any) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):  # a mapping that pytree does not open
            yield from _tensors([*leaf.values()])


def record_calls(model: nn.Module, names: Iterable[str], arguments: Mapping[str, Any]) -> dict[str, ModuleCall]:
    """Returns the first call of each module of `names` in one forward pass. Leaves out a call that replaces tensors
    inside its arguments, or has tensors with `requires_grad` in containers."""
    found: dict[str, ModuleCall] = {}
    exchanging: set[str] = set()

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in found:
                found[name] = ModuleCall(*pytree.tree_map_only(Tensor, _fresh, (args, kwargs)))
                given[name] = _held(args, kwargs)

        return hook

    def compare(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if found[name].nested() or _held(args, kwargs) != given.get(name, _held(args, kwargs)):
                exchanging.add(name)
            given.pop(name, None)

        return hook

    given: dict[str, list[int]] = {}

    with ExitStack() as stack:
        for name in names:
            module = model.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(note(name), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(compare(name), with_kwargs=True).remove)
        model(**arguments)
    return {name: call for name, call in found.items() if name not in exchanging}


@dataclass
class ModuleRun:
    """One run of a module, with the first input and output tensor of each leaf module."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    result: Any = None
    call: ModuleCall = field(default_factory=lambda: ModuleCall((), {}))


def run_module(module: nn.Module, call: ModuleCall, leaves: Iterable[str], detached: Iterable[str] = ()) -> ModuleRun:
    """Runs a module on a copy of `call`. Detaches the inputs of the leaves in `detached`."""
    trace, detached = ModuleRun(), {*detached}

    def before(leaf: str) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            first = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
            trace.order.append(leaf)
            if first is not None:
                trace.inputs.setdefault(leaf, first)
            if leaf in detached:
                return pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
            return None

        return hook

    def behind(leaf: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                trace.outputs.setdefault(leaf, output)

        return hook

    call = call.fresh()
    with ExitStack() as stack:
        for leaf in leaves:
            inner = module.get_submodule(leaf)
            stack.callback(inner.register_forward_pre_hook(before(leaf), with_kwargs=True).remove)
            stack.callback(inner.register_forward_hook(behind(leaf)).remove)
        result = first_of(module(*call.args, **call.kwargs))
    return replace(trace, result=result, call=call)


def first_of(output: Any) -> Any:
    """Returns the first element of nested lists and tuples; any other value unchanged."""
    while isinstance(output, list | tuple) and output:
        output = output[0]
    return output


def _fresh(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def has_gradient(value: Any) -> bool:
    """Returns True for a tensor with `requires_grad`."""
    return isinstance(value, Tensor) and value.requires_grad
