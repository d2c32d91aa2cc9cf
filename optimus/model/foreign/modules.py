"""The base classes that modules of a `ForeignModel` get.

`become` changes the class of a module in place, as FSDP2 does.

Legend: B batch, S sequence, T tokens, H hidden, L inputs and N outputs of a weight.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from optimus.kernels.backend import compute_dtype
from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.kernels.linear import MatrixProduct, TransposedMatrixProduct
from optimus.model.foreign.columns import Columns
from optimus.model.foreign.full_norms import epsilon_of
from optimus.model.foreign.passing import ModelHost
from optimus.model.head import OutputHead
from optimus.model.linear import Factored, Product
from optimus.model.parameters import Dim, declaration
from optimus.model.units import Unit
from optimus.model.vocabulary import Vocabulary


def become(module: nn.Module, *kinds: type, **attributes: Any) -> None:
    """Puts the classes `kinds` before the module's own class, and sets the `attributes`."""
    was = type(module)
    module.__class__ = type(f"{kinds[0].__name__}{was.__name__}", (*kinds, was), {})
    module.__dict__.update(attributes)


class Calls(nn.Module):
    """Lets a `Unit` run a `call` of `module` that the caller passes as an argument."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, call: Callable[[Tensor], Any]) -> Any:
        return call(x)


class _Staged:
    """A module that runs as its `unit`, unless a subclass overrides `_run`."""

    host: ModelHost
    unit: Unit
    _modules: dict[str, nn.Module | None]

    def _run(self, x: Tensor, call: Callable[[Tensor], Any]) -> Any:
        return self.unit(x, self._within(call))

    def _within(self, call: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """Returns a function that runs `call` with the present `Passing` of the model, also during
        recomputation."""
        host, passing = self.host, self.host.passing

        def run(x: Tensor) -> Any:
            with host.running(passing):
                return call(x)

        return run


class Storage:
    """A module whose `get_parameter` ignores computed attributes."""

    def get_parameter(self, target: str) -> nn.Parameter:
        """Raises `AttributeError` if there is no parameter `target`."""
        owner, _, leaf = target.rpartition(".")
        found = self.get_submodule(owner)._parameters.get(leaf)  # type: ignore[attr-defined]
        if found is None:
            raise AttributeError(f"no parameter {target}")
        return cast(nn.Parameter, found)


class StagedBlock(_Staged, Storage):
    """A block of the author's model. The first block of a later stage takes the received residual stream."""

    number: int
    outputs: int  # entries of the returned tuple or list; 0 for a tensor

    def __call__(self, *args: Any, **options: Any) -> Any:
        passing = self.host.current
        x, rest = _first(self.forward, args, options)  # type: ignore[attr-defined]
        if not passing.blocks:  # a stage without blocks
            x = x if passing.received_BSH is None else passing.received_BSH
            passing.stream_BSH = x
        if self.number not in passing.blocks:
            return (x, *[None] * (self.outputs - 1)) if self.outputs else x
        if self.number == passing.blocks.start and passing.received_BSH is not None:
            x = passing.received_BSH

        def call(x: Tensor) -> Any:
            made = super(StagedBlock, self).__call__(x, *rest, **options)  # type: ignore[misc]
            return tuple(made) if isinstance(made, list) else made

        made = self._run(x, call)
        if self.outputs and not isinstance(made, tuple):  # a unit unpacks a tuple of one element
            made = (made,)
        passing.stream_BSH = made[0] if self.outputs else made
        return made


class BlockOfParts(StagedBlock):
    """A block whose children are units. `again` runs the block, with or without recomputation."""

    again: Callable[..., Any]

    def _run(self, x: Tensor, call: Callable[[Tensor], Any]) -> Any:
        return self.again(self._within(call), x)


class StagedPart(_Staged):
    """A module that runs as a unit inside a block."""

    outputs: int  # entries of the returned tuple; 0 for a tensor

    def __call__(self, *args: Any, **options: Any) -> Any:
        x, rest = _first(self.forward, args, options)  # type: ignore[attr-defined]
        made = self._run(x, lambda x: super(StagedPart, self).__call__(x, *rest, **options))  # type: ignore[misc]
        # A unit unpacks a tuple of one element.
        return (made,) if self.outputs and not isinstance(made, tuple) else made


class StagedModule(_Staged):
    """A module that has parameters and is outside the blocks. `before` is True if the module runs before the blocks."""

    before: bool

    def __call__(self, *args: Any, **options: Any) -> Any:
        passing = self.host.current
        x, rest = _first(self.forward, args, options)  # type: ignore[attr-defined]
        if not (passing.first if self.before else passing.last):
            received = passing.received_BSH
            if isinstance(self, nn.Embedding) and received is not None:
                return received.new_zeros(()).expand(*x.shape, self.embedding_dim)
            return x
        return self._run(x, lambda x: super(StagedModule, self).__call__(x, *rest, **options))  # type: ignore[misc]


def _first(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """Returns the first argument of a call of `function`, and the other positional arguments.

    Without positional arguments, the first argument is the one in `options` that comes first in the signature, or else
    the first entry of `options`. The function removes this entry from `options`.
    """
    if args:
        return args[0], args[1:]
    named = (name for name in inspect.signature(function).parameters if name in options)
    return options.pop(next(named, next(iter(options)))), ()


class Lookup(nn.Embedding):
    """A token embedding whose rows may be sharded."""

    replaceable: ClassVar[tuple[str, ...]] = ("vocabulary",)
    vocabulary: Vocabulary

    def forward(self, tokens: Tensor) -> Tensor:
        x_TH = self.vocabulary.embed(tokens.flatten(), cast(nn.Parameter, self.weight))
        if self.padding_idx is not None:  # the row of the padding token gets no gradient, as in `nn.Embedding`
            x_TH = torch.where((tokens == self.padding_idx).flatten()[:, None], x_TH.detach(), x_TH)
        return x_TH.view(*tokens.shape, -1)


class HeadModule(OutputHead):
    """The output layer. During a stage's pass, a call stores the input, and returns the first column
    of the input, detached."""

    replaceable: ClassVar[tuple[str, ...]] = ("vocabulary",)
    host: ModelHost
    bias: nn.Parameter | None

    def table(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns x and the weight. A bias becomes a last column of the weight, and x gets a column of ones."""
        if getattr(self, "bias", None) is None:
            return x, self.weight
        ones = x.new_ones(1).expand(*x.shape[:-1], 1)
        return torch.cat([x, ones], -1), torch.cat([self.weight, self.bias[:, None]], -1)  # type: ignore[index]

    def __call__(self, x: Tensor, *args: Any) -> Tensor:
        passing = self.host.passing
        if passing is None:
            return self.forward(x, *args)
        passing.hidden_BSH = x
        return x.detach()[..., :1]


_COMMUNICATES = "column", "row", "gather", "scatter"


class AuthorsLinear(Factored):
    """A linear layer that concatenates the outputs of its weights `pieces`.

    `transposed` is True if the weights are [inputs, outputs].
    """

    replaceable: ClassVar[tuple[str, ...]] = ("product", "gradients")
    host: ModelHost
    product: Product
    gradients: Mapping[nn.Parameter, GradientBuffer]
    style: str
    pieces: tuple[str, ...]
    biases: tuple[str, ...]
    transposed: bool
    shares: bool = False  # True if other products may have the same input

    @property
    def takes_factors(self) -> bool:
        """True unless the weight is transposed or stored in pieces."""
        return not self.transposed and self.pieces == ("weight",)

    @property
    def dims(self) -> tuple[Dim, Dim]:
        """The logical dims of the outputs and of the inputs; `latent` for both if `product` needs no collectives."""
        if self.style not in _COMMUNICATES or self.shares:
            return "latent", "latent"
        *_, outputs, inputs = declaration(self, self.pieces[0]).dims  # type: ignore[arg-type]
        return (inputs, outputs) if self.transposed else (outputs, inputs)

    def forward(self, x: Tensor) -> Tensor:
        columns, x_TL = self.host.columns, (self.host.entered(x) if self.shares else x).reshape(-1, x.shape[-1])
        if self.style == "scatter":
            x_TL = columns.split(x_TL)
        y_TN = self._all_columns(x_TL.contiguous())
        if self.style == "gather":
            y_TN = columns.join(y_TN)
        return y_TN.view(*x.shape[:-1], -1)

    def _all_columns(self, x: Tensor) -> Tensor:
        parameters: dict[str, Any] = self._parameters
        made = [self._multiply(x, parameters[name]) for name in self.pieces]
        y = made[0] if len(made) == 1 else torch.cat(made, -1)
        biases = [
            getattr(self, name.removesuffix("_sum")).flatten() for name in self.biases if parameters[name] is not None
        ]
        return y if not biases else y + (biases[0] if len(biases) == 1 else torch.cat(biases))

    def _multiply(self, x: Tensor, weight: nn.Parameter) -> Tensor:
        product = self.product
        if self.transposed:
            product = product.around(TransposedMatrixProduct(self.host.step))
        return self.multiply(product, x, weight)


class Summed:
    """A module that computes a partial sum on every rank. `forward` all-reduces the first output."""

    host: ModelHost

    def forward(self, *args: Any, **options: Any) -> Any:
        columns = self.host.columns
        args = tuple(map(partial(_entered, columns), args))
        options = {name: _entered(columns, each) for name, each in options.items()}
        made = super().forward(*args, **options)  # type: ignore[misc]
        return (columns.leave(made[0]), *made[1:]) if isinstance(made, tuple) else columns.leave(made)


def _entered(columns: Columns, value: Any) -> Any:
    return columns.enter(value) if isinstance(value, Tensor) and value.requires_grad else value


class ColumnLeaf:
    """A module whose output columns are sharded."""

    host: ModelHost

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        return super().forward(self.host.columns.enter(x), *args, **options)  # type: ignore[misc]


class RowLeaf:
    """A module whose input columns are sharded."""

    host: ModelHost
    bias: Tensor | None

    def forward(self, *args: Any, **options: Any) -> Any:
        made = super().forward(*args, **options)  # type: ignore[misc]
        columns, bias = self.host.columns, getattr(self, "bias", None)
        if columns.size == 1 or bias is None:
            return columns.leave(made)
        return columns.leave(made - bias) + bias


class SharedOut:
    """A module whose output is equal on all ranks. `forward` divides the output by the number of ranks."""

    host: ModelHost

    def forward(self, *args: Any, **options: Any) -> Any:
        made = super().forward(*args, **options)  # type: ignore[misc]
        size = self.host.columns.size
        return made if size == 1 else made / size


class NormOverAll:
    """An RMSNorm over the columns of all ranks."""

    host: ModelHost

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = super().forward(x)  # type: ignore[misc]
        columns = self.host.columns
        if columns.size == 1:
            return made
        eps = epsilon_of(self)  # type: ignore[arg-type]
        own = x.to(compute_dtype(x.dtype)).square().mean(-1, keepdim=True)
        return made * ((own + eps) / (columns.mean(own) + eps)).sqrt().to(made.dtype)


def computed(owner: nn.Module, leaf: str, compute: Callable[[Any], Tensor]) -> None:
    """Makes the attribute `leaf` of a module a property that calls `compute` with the module."""
    owner.__class__ = type(type(owner).__name__, (type(owner),), {leaf: property(compute)})


LOCAL = Product(MatrixProduct())
