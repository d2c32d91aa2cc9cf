"""The parts that modules are given when they are made: how each does its work where its model may lie on several devices.

A module takes what it needs from the `Parts` in its constructor, and knows one device only. `LOCAL` has the parts of one
device; those of a mesh are made in `parallel.build`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.kernels.linear import MatrixProduct, linear
from optimus.model.moe.dispatch import Dispatch, local_dispatch
from optimus.model.moe.tokens import LocalTokens, TokenSplit
from optimus.model.norms import LocalNorms, Norms
from optimus.model.parameters import Dim
from optimus.model.sequence import LocalSequence, SequenceSplit
from optimus.model.vocabulary import LocalVocabulary, Vocabulary
from optimus.step_context import StepContext


class Product(Protocol):
    """How a projection is carried out: `inner` multiplies what is here."""

    inner: MatrixProduct

    def around(self, inner: MatrixProduct) -> "Product":
        """The same with another `inner`."""

    def __call__(self, x: Tensor, weight: nn.Parameter, buffer: GradientBuffer | None) -> Tensor:
        """[..., inputs] to [..., outputs of `weight`, its leading dims laid end to end].

        With a `buffer`, the gradient of the weight goes there.
        """


class LocalProduct:
    """The whole weight is here; `inner` multiplies."""

    def __init__(self, inner: MatrixProduct) -> None:
        self.inner = inner

    def around(self, inner: MatrixProduct) -> "LocalProduct":
        return LocalProduct(inner)

    def __call__(self, x: Tensor, weight: nn.Parameter, buffer: GradientBuffer | None) -> Tensor:
        return linear(x, weight.flatten(0, -2), buffer, self.inner)


def run_unit(modules: Sequence[nn.Module], function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, which runs `modules`: their parameters are here."""
    return function(*args)


class Runner:
    """How modules are run: as units, a unit being a module that is run, or several that are run in a row.

    `unit` has the parameters of a unit here while it runs, and once more for its backward pass. All activations are saved.
    `number` counts the blocks in a row of them, from 0.
    """

    def __init__(self, unit: Callable[..., Any] = run_unit) -> None:
        self.unit = unit

    def run(self, module: nn.Module, x: Tensor, *args: Any) -> Any:
        """`module(x, *args)`, a unit of its own."""
        return self.unit((module,), module, x, *args)

    def modules(self, number: int, x: Any, *modules: tuple[Any, ...]) -> Any:
        """What these modules of a block make of `x` in turn; each is (kind, module, its further arguments...)."""
        return self.row(modules, x)

    def row(self, modules: Sequence[tuple[Any, ...]], x: Any, by: Callable[..., Any] | None = None) -> Any:
        """The same as one unit: `by(function, x, args...)` calls a function that runs it, by default as it is."""
        in_turn = partial(_in_turn, [(module, len(args)) for _, module, *args in modules])
        args = [arg for _, _, *own in modules for arg in own]
        return self.unit(tuple(module for _, module, *_ in modules), partial(by, in_turn) if by else in_turn, x, *args)

    def segments(self, blocks: int) -> Sequence[range]:
        """A row of `blocks` divided into what `segment` runs at a time."""
        return [range(blocks)]

    def segment(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, which runs a segment."""
        return function(*args)


def _in_turn(calls: Sequence[tuple[Callable[..., Any], int]], x: Any, *args: Any) -> Any:
    """Each call takes what the one before has made, and so many of the further arguments."""
    for call, number in calls:
        x, args = call(x, *args[:number]), args[number:]
    return x


_PRODUCT = LocalProduct(MatrixProduct())


@dataclass(frozen=True)
class Parts:
    """What the modules of one model are made with."""

    product: Callable[[Dim, Dim], Product] = lambda outputs, inputs: _PRODUCT  # of a weight with these dims last
    norms: Callable[[Dim], Norms] = lambda columns: LocalNorms()
    vocabulary: Vocabulary = field(default_factory=LocalVocabulary)
    sequence: SequenceSplit = field(default_factory=LocalSequence)
    tokens: TokenSplit = field(default_factory=LocalTokens)
    dispatch: Callable[[int], Dispatch] = lambda experts: local_dispatch  # of a layer with so many
    # From the rows of the residual stream here, those for this device's heads.
    all_rows: Callable[[Tensor], Tensor] = lambda x: x
    # Of parameters whose gradients do not accumulate by autograd; filled when the modules have been made.
    gradient_buffers: Mapping[nn.Parameter, GradientBuffer] = field(default_factory=dict)
    runner: Runner = field(default_factory=Runner)
    step: StepContext = field(default_factory=StepContext)


LOCAL = Parts()
