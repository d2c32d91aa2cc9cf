"""Tokens travel while the shared experts are computed, and results do not depend on the moment of waiting."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from helpers.drawing import config_of
from helpers.sweep import in_turns
from optimus.comm import DONE, Group, Handle
from optimus.testing import run_ranks
from optimus.testing.steps import Steps

MODEL = {
    "family": "deepseek_v3", "hidden": 16, "layers": 3, "heads": 4, "head_size": 6, "intermediate": 24, "vocab": 59,
    "latent": {"keys": 8, "rotary": 4, "value": 6}, "dense_layers": 1, "experts": 4, "experts_per_token": 2,
    "expert_intermediate": 12, "shared_experts": 1, "expert_groups": 2,
}  # fmt: skip
LAYOUTS: dict[str, tuple[int, list[str], int | None]] = {
    "experts": (2, ["parallel.expert=2"], None),
    "recomputed": (2, ["parallel.expert=2", "recompute=[moe]"], None),
    "recomputed with its collectives": (
        2,
        ["parallel.expert=2", "recompute=[moe]", "recompute_collectives=repeat"],
        None,
    ),
    "two levels": (4, ["parallel.expert=4"], 2),
    "tensor": (4, ["parallel.tensor=2", "parallel.expert=2"], None),
}
usual = Group.all_to_all_async


def at_once(self: Group, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> tuple[Tensor, Handle]:
    out, handle = usual(self, rows, send, receive)
    handle.wait()
    return out, DONE


def trained(overrides: list[str], per_node: int | None, waits_at_once: bool) -> list[Tensor]:
    """Returns the losses of two steps and the weights after them."""
    from optimus.config import load_config

    config: dict[str, Any] = config_of("dense") | {"model": MODEL}
    with mock.patch.object(Group, "all_to_all_async", at_once if waits_at_once else usual):
        steps = Steps(load_config(config, overrides), per_node)
        losses = [torch.tensor(steps.train().loss) for _ in range(2)]
    return [*losses, *(chunk.resident["model"].clone() for chunk in steps.state.chunks)]


@pytest.mark.parametrize("name", in_turns([*LAYOUTS], 3, always=2))
def test_no_bit_depends_on_the_overlap(name: str) -> None:
    ranks, *layout = LAYOUTS[name]
    for ours, without in zip(run_ranks(trained, ranks, *layout, False), run_ranks(trained, ranks, *layout, True)):
        assert len(ours) > 2
        assert all(a.equal(b) for a, b in zip(ours, without, strict=True))
