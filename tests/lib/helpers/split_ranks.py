"""Ranks of tensor parallelism as threads, with the collectives that facts of a foreign model name."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from optimus.model.foreign.facts import ModelFacts, Split
from optimus.model.foreign.splits import rank_part
from optimus.model.foreign.twin import arguments_of


class Exchange:
    """The collectives of some threads."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.barrier = ranks, threading.Barrier(ranks, timeout=60)
        self.slots: list[Any] = [None] * ranks

    def all(self, rank: int, x: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks."""
        self.slots[rank] = x.detach()
        self.barrier.wait()
        found = [*self.slots]
        self.barrier.wait()
        return found

    def sum(self, rank: int, x: Tensor) -> Tensor:
        """Returns the sum over the ranks."""
        return torch.stack(self.all(rank, x)).sum(0)


def function(forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Returns a differentiable function of both."""

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return forward(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return backward(gradient)

    return Made.apply


class Rank:
    """One rank's model: sliced, with collectives around its modules."""

    def __init__(self, whole: nn.Module, facts: ModelFacts, exchange: Exchange, rank: int) -> None:
        self.exchange, self.rank, self.ways = exchange, rank, exchange.ranks
        inside = {name: split for name, split in facts.splits.items() if name.startswith(f"{facts.blocks}.")}
        made = rank_part(whole, inside, facts.divided, rank, self.ways)
        assert made is not None
        self.model = made
        total = lambda x: exchange.sum(rank, x)  # noqa: E731
        same = lambda x: x.clone()  # noqa: E731
        own = lambda x: x.chunk(self.ways, -1)[rank].contiguous()  # noqa: E731
        every = lambda x: torch.cat(exchange.all(rank, x), -1)  # noqa: E731
        self.copy, self.reduce, self.both = function(same, total), function(total, same), function(total, total)
        self.gather, self.scatter = function(every, own), function(own, every)
        for name, style in facts.styles.items():
            getattr(self, f"_{style}")(made.get_submodule(name))

    def _column(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda m, args: (self.copy(args[0]), *args[1:]))

    def _row(self, module: nn.Module) -> None:
        bias = getattr(module, "bias", None)
        rest = 0 if bias is None else bias
        module.register_forward_hook(lambda m, args, out: self.reduce(out - rest) + rest)

    def _gather(self, module: nn.Module) -> None:
        self._column(module)
        module.register_forward_hook(lambda m, args, out: self.gather(out))

    def _scatter(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda m, args: (self.scatter(args[0]), *args[1:]))
        self._row(module)

    def _sums(self, module: nn.Module) -> None:
        def copied(m: nn.Module, args: Any, kwargs: Any) -> Any:
            copy = lambda x: self.copy(x) if x.requires_grad else x  # noqa: E731
            return pytree.tree_map_only(Tensor, copy, (args, kwargs))

        module.register_forward_pre_hook(copied, with_kwargs=True)
        reduced = lambda out: (self.reduce(out[0]), *out[1:]) if isinstance(out, tuple) else self.reduce(out)  # noqa: E731
        module.register_forward_hook(lambda m, args, out: reduced(out))

    _experts = _sums

    def _share(self, module: nn.Module) -> None:
        module.register_forward_hook(lambda m, args, out: out / self.ways)

    def _norm_all(self, module: nn.Module) -> None:
        eps = next(value for key, value in vars(module).items() if "eps" in key)

        def forward(x: Tensor) -> Tensor:
            square = self.both(x.float().pow(2).sum(-1, keepdim=True))
            return (x * torch.rsqrt(square / (x.shape[-1] * self.ways) + eps)).to(x.dtype) * module.weight

        module.forward = forward  # type: ignore[method-assign]


def loss_of(model: nn.Module, tokens_BS: Tensor) -> Tensor:
    """Returns the loss of all tokens."""
    logits = model(input_ids=tokens_BS, **arguments_of(model)).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens_BS[:, 1:].flatten())


def gradients(whole: nn.Module, facts: ModelFacts, tokens_BS: Tensor, ways: int) -> tuple[list[Tensor], list[Rank]]:
    """Returns the losses of all ranks, and the ranks with gradients, each of which ran in its own thread."""
    exchange = Exchange(ways)
    ranks = [Rank(whole, facts, exchange, rank) for rank in range(ways)]
    losses: list[Any] = [None] * ways
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            losses[rank] = loss_of(ranks[rank].model, tokens_BS)
            losses[rank].backward()
        except BaseException as error:
            errors.append(error)
            exchange.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ways)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return losses, ranks


def worst_difference(whole: nn.Module, facts: ModelFacts, tokens_BS: Tensor, ways: int) -> dict[str, float]:
    """Returns the differences from one process: of the loss and of each parameter's gradient, relative to its largest."""
    whole.zero_grad()
    loss = loss_of(whole, tokens_BS)
    loss.backward()
    losses, ranks = gradients(whole, facts, tokens_BS, ways)
    found = {"loss": max(float((each - loss).abs() / loss.abs()) for each in losses)}
    norm = float(torch.nn.utils.get_total_norm([each.grad for each in whole.parameters() if each.grad is not None]))
    for name, parameter in whole.named_parameters():
        if parameter.grad is None:
            continue
        split = facts.splits.get(name, Split()) if name.startswith(f"{facts.blocks}.") else Split()
        local = [rank.model.get_parameter(name).grad for rank in ranks]
        local = [
            torch.zeros_like(rank.model.get_parameter(name)) if each is None else each
            for each, rank in zip(local, ranks)
        ]
        if split.dim is not None:
            pieces = split.pieces or (parameter.shape[split.dim],)
            parts = [each.split([piece // ways for piece in pieces], split.dim) for each in local]
            total = torch.cat(
                [torch.cat([part[n] for part in parts], split.dim) for n in range(len(pieces))], split.dim
            )
            differences = [total - parameter.grad]
        elif split.partial:
            differences = [sum(local) / (ways if split.share else 1) - parameter.grad]
        else:
            differences = [each - parameter.grad for each in local]
        scale = float(parameter.grad.abs().max()) + 1e-4 * norm
        found[name] = max(float(each.abs().max()) for each in differences) / scale
    return found
