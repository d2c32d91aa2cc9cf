"""Compares the loss and the gradients of a small model under tensor parallelism with those of the undivided model.

Each rank is a thread.
"""

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from optimus.autograd import once_differentiable
from optimus.model.foreign.full_norms import epsilon_of, offset_of
from optimus.model.foreign.records import Split, Style
from optimus.model.foreign.slicing import rank_part
from optimus.model.foreign.twin import arguments_of

_Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TensorPartition:
    """The partition of a small model: splits by parameter, styles and divided attributes by module."""

    splits: Mapping[str, Split]
    styles: Mapping[str, Style]
    divided: Mapping[str, tuple[str, ...]]


class _Exchange:
    """Collectives between threads of one process."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.barrier = ranks, threading.Barrier(ranks, timeout=30)
        self.slots: list[Any] = [None] * ranks

    def gather(self, rank: int, x: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks, detached."""
        self.slots[rank] = x.detach()
        self.barrier.wait()
        found = [*self.slots]
        self.barrier.wait()
        return found

    def sum(self, rank: int, x: Tensor) -> Tensor:
        return torch.stack(self.gather(rank, x)).sum(0)


class _Applied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: _Change, backward: _Change) -> Tensor:
        ctx.change = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.change(gradients[0]), None, None


def _differentiable(forward: _Change, backward: _Change) -> _Change:
    return lambda x: _Applied.apply(x, forward, backward)


class _SummedNorm(nn.Module):
    """An RMS norm whose mean of squares is over the columns of all ranks."""

    def __init__(self, norm: nn.Module, sum_over_ranks: _Change, ways: int) -> None:
        super().__init__()
        self.weight, self.eps, self.plus = norm.get_parameter("weight"), epsilon_of(norm), offset_of(norm)
        self.sum_over_ranks, self.ways = sum_over_ranks, ways

    def forward(self, x: Tensor) -> Tensor:
        total = self.sum_over_ranks(x.pow(2).sum(-1, keepdim=True))
        return x * torch.rsqrt(total / (x.shape[-1] * self.ways) + self.eps) * (self.weight + self.plus)


class _Rank:
    """One rank's small model: sliced, with collectives around its modules."""

    def __init__(self, twin: nn.Module, partition: TensorPartition, exchange: _Exchange, rank: int) -> None:
        self.ways = exchange.ranks
        made = rank_part(twin, partition.splits, partition.divided, rank, self.ways)
        if made is None:
            raise ValueError("a parameter or an attribute does not divide")
        self.model = made

        def total(x: Tensor) -> Tensor:
            return exchange.sum(rank, x)

        def local(x: Tensor) -> Tensor:
            return x.chunk(self.ways, -1)[rank].contiguous()

        def every(x: Tensor) -> Tensor:
            return torch.cat(exchange.gather(rank, x), -1)

        self.copy = _differentiable(Tensor.clone, total)
        self.reduce = _differentiable(total, Tensor.clone)
        self.sum_over_ranks = _differentiable(total, total)
        self.join, self.scatter = _differentiable(every, local), _differentiable(local, every)
        for name, style in partition.styles.items():
            getattr(self, f"_{style}")(name, made.get_submodule(name))

    def _column(self, name: str, module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda m, args: (self.copy(args[0]), *args[1:]))

    def _row(self, name: str, module: nn.Module) -> None:
        bias: Any = getattr(module, "bias", None)
        rest = 0 if bias is None else bias
        module.register_forward_hook(lambda m, args, out: self.reduce(out - rest) + rest)

    def _gather(self, name: str, module: nn.Module) -> None:
        self._column(name, module)
        module.register_forward_hook(lambda m, args, out: self.join(out))

    def _scatter(self, name: str, module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda m, args: (self.scatter(args[0]), *args[1:]))
        self._row(name, module)

    def _sums(self, name: str, module: nn.Module) -> None:
        def copied(m: nn.Module, args: Any, kwargs: Any) -> Any:
            return pytree.tree_map_only(Tensor, lambda x: self.copy(x) if x.requires_grad else x, (args, kwargs))

        def reduced(m: nn.Module, args: Any, out: Any) -> Any:
            return (self.reduce(out[0]), *out[1:]) if isinstance(out, tuple) else self.reduce(out)

        module.register_forward_pre_hook(copied, with_kwargs=True)
        module.register_forward_hook(reduced)

    _experts = _sums

    def _share(self, name: str, module: nn.Module) -> None:
        module.register_forward_hook(lambda m, args, out: out / self.ways)

    def _norm_all(self, name: str, module: nn.Module) -> None:
        owner, _, leaf = name.rpartition(".")
        self.model.get_submodule(owner)._modules[leaf] = _SummedNorm(module, self.sum_over_ranks, self.ways)


def loss_of(model: nn.Module, tokens_BS: Tensor) -> Tensor:
    """Returns the mean cross-entropy of the next tokens."""
    logits = model(input_ids=tokens_BS, **arguments_of(model)).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens_BS[:, 1:].flatten())


def largest_difference(twin: nn.Module, partition: TensorPartition, tokens_BS: Tensor, ways: int) -> tuple[float, str]:
    """Compares the ranks' losses and gradients with those of `twin`. Returns (largest relative difference, its origin).

    The origin is the name of a parameter or "the loss".
    """
    named = {name: each for name, each in twin.named_parameters() if each.requires_grad}
    loss = loss_of(twin, tokens_BS)
    expected = dict(zip(named, torch.autograd.grad(loss, [*named.values()], allow_unused=True)))
    losses, gradients = _run_ranks(twin, partition, tokens_BS, ways)
    found = [(_largest((each - loss.detach()).abs() / loss.detach().abs() for each in losses), "the loss")]
    norms = [float(each.norm()) for each in expected.values() if each is not None]
    smallest = 1e-4 * sum(each**2 for each in norms) ** 0.5
    for name, gradient in expected.items():
        own = [each[name] for each in gradients]
        if gradient is None and all(each is None for each in own):
            continue
        gradient = torch.zeros_like(named[name]) if gradient is None else gradient
        local = [torch.zeros(()) if each is None else each for each in own]
        worst = _difference(gradient, local, partition.splits.get(name, Split()))
        found.append((worst / (float(gradient.abs().max()) + smallest), name))
    return max(found)


def _run_ranks(
    twin: nn.Module, partition: TensorPartition, tokens_BS: Tensor, ways: int
) -> tuple[list[Tensor], list[Any]]:
    exchange = _Exchange(ways)
    ranks = [_Rank(twin, partition, exchange, rank) for rank in range(ways)]
    results: list[Any] = [None] * ways
    errors: list[Exception] = []

    def run(number: int) -> None:
        try:
            named = {name: each for name, each in ranks[number].model.named_parameters() if each.requires_grad}
            loss = loss_of(ranks[number].model, tokens_BS)
            gradients = torch.autograd.grad(loss, [*named.values()], allow_unused=True)
            results[number] = loss.detach(), dict(zip(named, gradients))
        except Exception as error:
            errors.append(error)
            exchange.barrier.abort()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(ways)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        first = next((each for each in errors if not isinstance(each, threading.BrokenBarrierError)), errors[0])
        raise RuntimeError(f"a rank of the divided twin fails: {type(first).__name__}: {first}") from first
    return [loss for loss, _ in results], [gradients for _, gradients in results]


def _difference(expected: Tensor, local: list[Tensor], split: Split) -> float:
    """Returns the largest absolute difference between the ranks' gradients and the matching parts of `expected`.

    Combines partial gradients over the ranks first.
    """
    ways = len(local)
    if split.partial:
        return _largest([sum(local) / (ways if split.share else 1) - expected])
    if split.dim is None:
        return _largest(each - expected for each in local)
    pieces = split.pieces or (expected.shape[split.dim],)
    wholes = expected.split([*pieces], split.dim)
    parts = (torch.cat([each.chunk(ways, split.dim)[rank] for each in wholes], split.dim) for rank in range(ways))
    return _largest(gradient - part for gradient, part in zip(local, parts))


def _largest(differences: Iterable[Tensor]) -> float:
    """Returns the largest absolute value of all elements; infinity if an element is NaN."""
    found = [float(each.abs().max()) for each in differences]
    return math.inf if any(map(math.isnan, found)) else max(found)
