"""Selective activation checkpointing (the Optimus paper, section 1): chosen modules keep only their input.

Their forward pass is run again in the backward pass. The router's statistics are outputs like any other, so running it
again counts nothing twice.
"""

from collections.abc import Collection
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

_MODULES = {
    "norm": ("attention_norm", "mlp_norm"),
    "attention": ("attention",),
    "mlp": ("mlp",),
    "moe": ("moe",),
}


def recompute(blocks: nn.ModuleList, kinds: Collection[str]) -> None:
    """Make the modules of `kinds` (norm, attention, mlp, moe) in every block recompute their activations."""
    names = [name for kind in kinds for name in _MODULES[kind]]
    for block in blocks:
        for name in names:
            _wrap(block.get_submodule(name))


def _wrap(module: nn.Module) -> None:
    forward = module.forward

    def run_again_in_backward(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)

    module.forward = run_again_in_backward
