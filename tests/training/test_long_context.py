"""A long sequence, of which each rank holds a part."""

from typing import Any

import pytest
import torch

from helpers.equality import train_steps
from optimus.comm import Groups
from optimus.config import load_config
from optimus.resolve.ranks import mesh_of
from optimus.testing import run_ranks
from optimus.testing.steps import build, random_batch

CONTEXT = 16_384


def config(**sections: Any) -> dict[str, Any]:
    train = {
        "output": "",
        "steps": 10,
        "global_batch": 1,
        "micro_batch": 1,
        "sequence_length": CONTEXT,
        "precision": "float32",
    }
    return {"model": "mula-tiny", "data": {"path": ""}, "train": train, "recompute": ["block"], **sections}


@pytest.mark.slow
@pytest.mark.in_turn(0, 3)
def test_sixteen_thousand_tokens_train_on_four_ranks_of_a_ring() -> None:
    """The loss is that of one process without the backward pass, which would take minutes; a step lowers the loss."""
    tree = load_config(config())
    model, state = build(tree, Groups(mesh_of(tree, 1)))
    state.initialize(tree.train.seed, tree.model.init_std)
    with torch.no_grad():
        right = model.model.losses(random_batch(tree, 1)).cross_entropy.item()
    schedule = {"lr": 3e-3, "min_lr": 3e-4, "warmup_steps": 1}
    found = run_ranks(train_steps, 4, config(parallel={"context": 4}, lr_schedule=schedule), 2, timeout=300)
    for trained in found:
        first, second = trained.steps
        assert first.loss == pytest.approx(right, rel=1e-6)
        assert second.loss < first.loss - 0.01
        assert 0 < second.grad_norm < 10
