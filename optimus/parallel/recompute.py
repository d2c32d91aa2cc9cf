"""Activation checkpointing: what is chosen keeps its input, and its forward pass is run again in the backward pass.

Chosen are modules (selective activation checkpointing, the Optimus paper, section 1) of every n-th block, or segments of n
whole blocks (the dissertation on AxoNN, section 3.3.1, where n is called ac). A norm and the module that it feeds are run
again together where both are chosen, so that what goes from one to the other is not kept either.

The router's statistics are outputs like any other, so running it again counts nothing twice. The state of the random
generators is that of the first time. What collectives gave the first time is kept as well and given again, unless memory
is dearer than communication (communication-aware checkpointing, TED, section 7.3).
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from optimus.comm.functional import Kept
from optimus.model.attention import Places
from optimus.model.moe.router import RouterStats
from optimus.model.transformer import Blocks, KVCache

_FED = {"attention": "attention_norm", "mlp": "mlp_norm", "moe": "mlp_norm"}  # module -> the norm before it


class Recomputation(NamedTuple):
    """What is run again: norm, attention, mlp or moe of every `every`-th block; or block: segments of `every` blocks."""

    kinds: tuple[str, ...] = ()
    every: int = 1

    def __str__(self) -> str:
        every = f", recompute_every: {self.every}" if self.every > 1 else ""
        return f"recompute: [{', '.join(self.kinds)}]{every}"


def recompute(blocks: nn.ModuleList, kinds: Collection[str], every: int = 1, *, keep_collectives: bool = True) -> None:
    """Have what is chosen of `blocks`, as `Recomputation` says, recompute its activations.

    Without `keep_collectives` the collectives in it are issued again, which all ranks then do together. What is run again
    with kept results can be run again once only: no second backward pass through the same graph.
    """
    if "block" in kinds:
        blocks.forward = _in_segments(blocks, every, keep_collectives)  # type: ignore[arg-type]
        return
    for block in blocks[every - 1 :: every]:
        _recompute_modules(block, kinds, keep_collectives)


def _recompute_modules(block: nn.Module, kinds: Collection[str], keep: bool) -> None:
    present = [name for name in _FED if name in dict(block.named_children())]
    for name in present:
        module = block.get_submodule(name)
        if name in kinds and "norm" in kinds:
            norm = block.get_submodule(_FED[name])
            module.forward = _checkpointed(_one_after_the_other(norm.forward, module.forward), keep)
            norm.forward = _identity
        elif name in kinds:
            module.forward = _checkpointed(module.forward, keep)
        elif "norm" in kinds:
            norm = block.get_submodule(_FED[name])
            norm.forward = _checkpointed(norm.forward, keep)


def _in_segments(blocks: Blocks, length: int, keep: bool) -> Callable[..., tuple[Tensor, RouterStats | None]]:
    segments = [blocks[start : start + length].forward for start in range(0, len(blocks), length)]
    checkpointed = [_checkpointed(segment, keep) for segment in segments]
    whole = blocks.forward

    def forward(
        x_TH: Tensor, places: Places, cache: KVCache | None = None, stats: RouterStats | None = None
    ) -> tuple[Tensor, RouterStats | None]:
        if cache is not None:  # generation, which has no backward pass
            return whole(x_TH, places, cache, stats)
        for segment in checkpointed:
            x_TH, stats = segment(x_TH, places, None, stats)
        return x_TH, stats

    return forward


def _checkpointed(forward: Callable[..., Any], keep: bool) -> Callable[..., Any]:
    contexts = _keeping if keep else noop_context_fn

    def run_again_in_backward(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, context_fn=contexts)

    return run_again_in_backward


def _keeping() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of the first run and of the second; of one call, as others may come before its backward pass."""
    kept = Kept()
    return kept.recording(), kept.repeating()


def _one_after_the_other(first: Callable[..., Any], second: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *others: second(first(x), *others)


def _identity(x: Any) -> Any:
    return x
