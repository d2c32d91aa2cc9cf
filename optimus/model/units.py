"""Units: modules that are run one after the other, all their parameters being there while they run.

What runs a unit gathers its parameters, recomputes what is to be recomputed and reshards (`parallel.recompute`); neither the
unit nor the block that calls it knows of that.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn


class Unit:
    """`module(x, *args)`, with a norm `before` it and one `after`, where there are such.

    It is no module itself and refers to modules that others own, so that no name of a parameter depends on it.
    """

    def __init__(
        self, kind: str, module: nn.Module, before: nn.Module | None = None, after: nn.Module | None = None
    ) -> None:
        steps = ("norm", before), (kind, module), ("norm", after)
        self.module = module
        self.steps = [(kind, step) for kind, step in steps if step is not None]
        self.run_by(self.row([step for _, step in self.steps]))

    def __call__(self, x: Tensor, *args: Any) -> Any:
        """What the module gives; of several results the first is of x and goes through the norm after it."""
        return self._run(x, *args)

    def run_by(self, run: Callable[..., Any]) -> None:
        """Have `run(x, *args)` run it."""
        self._run = run

    def row(self, modules: Sequence[nn.Module]) -> Callable[..., Any]:
        """What runs these of its modules in turn."""
        return partial(in_turn, [(each, each is self.module) for each in modules])


def in_turn(calls: Sequence[tuple[Callable[..., Any], bool]], x: Any, *args: Any) -> Any:
    """Each call takes what the one before has made of x, and the further arguments if it is said to."""
    rest: tuple[Any, ...] = ()
    for call, takes in calls:
        made = call(x, *args) if takes else call(x)
        x, rest = (made[0], (*rest, *made[1:])) if isinstance(made, tuple) else (made, rest)
    return (x, *rest) if rest else x


def replace_all(model: nn.Module, made: Mapping[str, Callable[[Any], Any]]) -> None:
    """Give all modules of `model` what is made for them of what their classes say is `replaceable`, by name."""
    for module in model.modules():
        for what in getattr(module, "replaceable", ()):  # in its order: what is made may be made by all ranks together
            if what in made:
                setattr(module, what, made[what](module))


def units_of(module: nn.Module) -> list[Unit]:
    """Those that `module` itself calls."""
    return [each for each in vars(module).values() if isinstance(each, Unit)]
