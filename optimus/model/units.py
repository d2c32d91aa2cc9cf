"""Units: groups of modules that run one after the other."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn


class Unit:
    """Computes `module(x, *args)`, with an optional norm `before` and an optional norm `after`.

    A unit is not an `nn.Module`, so parameter names do not depend on units.
    """

    def __init__(
        self, kind: str, module: nn.Module, before: nn.Module | None = None, after: nn.Module | None = None
    ) -> None:
        steps = ("norm", before), (kind, module), ("norm", after)
        self.module = module
        self.steps = [(kind, step) for kind, step in steps if step is not None]
        self.run_by(self.row([step for _, step in self.steps]))

    def __call__(self, x: Tensor, *args: Any) -> Any:
        """Returns the module's results. The norm `after` applies to the first result only."""
        return self._run(x, *args)

    def run_by(self, run: Callable[..., Any]) -> None:
        """Sets the runner: a call of the unit becomes `run(x, *args)`."""
        self._run = run

    def row(self, modules: Sequence[nn.Module]) -> Callable[..., Any]:
        """Returns a callable that runs the given modules one after the other."""
        return partial(in_turn, [(each, each is self.module) for each in modules])


def in_turn(calls: Sequence[tuple[Callable[..., Any], bool]], x: Any, *args: Any) -> Any:
    """Applies the first call to `x`, and each later call to the first result of the previous call.

    Appends all other results to the final result. A call whose flag is true also gets `args`.
    """
    rest: tuple[Any, ...] = ()
    for call, takes in calls:
        made = call(x, *args) if takes else call(x)
        x, rest = (made[0], (*rest, *made[1:])) if isinstance(made, tuple) else (made, rest)
    return (x, *rest) if rest else x


def replace_all(model: nn.Module, made: Mapping[str, Callable[[Any], Any]]) -> None:
    """Sets each attribute that a module names in `replaceable` to `made[name](module)`, if `made` has the name."""
    for module in model.modules():
        for what in getattr(module, "replaceable", ()):  # the same order on all ranks: functions may run collectives
            if what in made:
                setattr(module, what, made[what](module))


def units_of(module: nn.Module) -> list[Unit]:
    """Returns the units that are attributes of `module`."""
    return [each for each in vars(module).values() if isinstance(each, Unit)]
