"""The parts that modules are given when they are made: how each does its work where its model may lie on several devices.

A module takes what it needs from the `Parts` in its constructor, and knows one device only. `LOCAL` has the parts of one
device; those of a mesh are made in `parallel.build`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.kernels.linear import MatrixProduct, linear
from optimus.model.moe.dispatch import Dispatch, local_dispatch
from optimus.model.moe.tokens import TokenSplit, WholeTokens
from optimus.model.norms import LocalNorms, Norms
from optimus.model.parameters import Dim
from optimus.model.sequence import Sequence as TokenSequence
from optimus.model.sequence import WholeSequence
from optimus.model.vocabulary import LocalVocabulary, Vocabulary
from optimus.step_context import StepContext


class Product(Protocol):
    """How a projection is carried out."""

    def __call__(self, x: Tensor, weight: nn.Parameter, buffer: GradientBuffer | None) -> Tensor:
        """[..., inputs] to [..., outputs of `weight`, its leading dims laid end to end].

        With a `buffer`, the gradient of the weight goes there.
        """


class LocalProduct:
    """The whole weight is here; `inner` multiplies."""

    def __init__(self, inner: MatrixProduct) -> None:
        self.inner = inner

    def __call__(self, x: Tensor, weight: nn.Parameter, buffer: GradientBuffer | None) -> Tensor:
        return linear(x, weight.flatten(0, -2), buffer, self.inner)


class Parameters(Protocol):
    """Where the parameters of a model are kept between their uses, and where their gradients accumulate."""

    def use(self, *parameters: nn.Parameter) -> Sequence[GradientBuffer | None]:
        """Have the parameters of a module, which is about to use them, whole on this device.

        Returns the gradient buffer of each; None where autograd accumulates the gradient.
        """


class KeptParameters:
    """All parameters are here."""

    def use(self, *parameters: nn.Parameter) -> Sequence[GradientBuffer | None]:
        return [None] * len(parameters)


class Runner(Protocol):
    """How blocks are run: once, or again in the backward pass as well, for activations that are then not saved.

    `number` counts the blocks in a row of them, from 0.
    """

    def segments(self, blocks: int) -> Sequence[range]:
        """A row of `blocks` divided into what `segment` runs at a time."""

    def segment(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, which runs a segment."""

    def modules(self, number: int, x: Tensor, *modules: tuple[Any, ...]) -> Any:
        """What these modules of a block make of `x` in turn; each is (kind, module, its further arguments...)."""


class RunOnce:
    """All activations are saved."""

    def segments(self, blocks: int) -> Sequence[range]:
        return [range(blocks)]

    def segment(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def modules(self, number: int, x: Any, *modules: tuple[Any, ...]) -> Any:
        for _, module, *others in modules:
            x = module(x, *others)
        return x


_PRODUCT = LocalProduct(MatrixProduct())


@dataclass(frozen=True)
class Parts:
    """What the modules of one model are made with."""

    product: Callable[[Dim, Dim], Product] = lambda outputs, inputs: _PRODUCT  # of a weight with these dims last
    norms: Callable[[Dim], Norms] = lambda columns: LocalNorms()
    vocabulary: Vocabulary = field(default_factory=LocalVocabulary)
    sequence: TokenSequence = field(default_factory=WholeSequence)
    tokens: TokenSplit = field(default_factory=WholeTokens)
    dispatch: Callable[[int], Dispatch] = lambda experts: local_dispatch  # of a layer with so many
    all_rows: Callable[[Tensor], Tensor] = lambda x: (
        x
    )  # from those of the residual stream here, for this device's heads
    parameters: Parameters = field(default_factory=KeptParameters)
    runner: Runner = field(default_factory=RunOnce)
    step: StepContext = field(default_factory=StepContext)


LOCAL = Parts()
