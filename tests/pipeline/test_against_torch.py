"""Losses and gradients of every schedule equal those of torch.distributed.pipelining on the same stages."""

import pytest
import torch
from torch import Tensor

from benchmarks.pipeline_rival import TORCH, make_stages, ours, torchs
from helpers.sweep import in_turns
from optimus.config import RunConfig, load_config
from optimus.pipeline.schedules import schedules
from optimus.testing import run_ranks

SEQUENCES, CONTEXT, VOCAB = 16, 12, 50


def config_of(schedule: str, ranks: int) -> RunConfig:
    tree = {
        "model": {"family": "olmo", "hidden": 16, "layers": 8, "heads": 2, "intermediate": 48, "vocab": VOCAB},
        "data": {"path": ""},
        "train": {
            "output": "",
            "steps": 1,
            "global_batch": SEQUENCES,
            "micro_batch": 2,
            "sequence_length": CONTEXT,
            "precision": "float32",
        },
        "parallel": {
            "pipeline": ranks,
            "schedule": schedule,
            "stages_per_rank": 2 if schedule in ("interleaved-1f1b", "zbv") else 1,
        },
    }
    return load_config(tree)


def train(config: RunConfig) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Returns, for us and for torch, this rank's gradients and, on the last stage, the losses of the microbatches."""
    staged = make_stages(config)
    draws = torch.Generator().manual_seed(3)
    tokens_BS = torch.randint(VOCAB, (SEQUENCES, CONTEXT), generator=draws)
    found = []
    for side in (ours, torchs):
        step = side(staged, config)
        for _ in range(2):  # torch's first step differs from the others: it infers shapes
            for parameter in staged.parameters():
                assert parameter.grad is not None
                parameter.grad.zero_()
            losses = step(tokens_BS)
        found.append((losses, {name: each.grad.clone() for name, each in staged.named_parameters()}))
    return found


def test_torch_has_each_of_our_schedules() -> None:
    assert set(schedules()) - set(TORCH) == {"v-half", "v-min"}


@pytest.mark.parametrize("ranks", in_turns([2, 4], 2))
@pytest.mark.parametrize("schedule", TORCH)
def test_losses_and_gradients_are_those_of_torch(schedule: str, ranks: int) -> None:
    by_rank = run_ranks(train, ranks, config_of(schedule, ranks))
    for (_, gradients), (_, expected) in by_rank:
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            assert expected[name].abs().max() > 0, name
            torch.testing.assert_close(gradient, expected[name], rtol=2e-5, atol=1e-8)
    last = [rank for rank in by_rank if len(rank[0][0])]
    assert len(last) == 1
    (losses, _), (expected_losses, _) = last[0]
    assert len(losses) == SEQUENCES // 2
    torch.testing.assert_close(losses, expected_losses, rtol=2e-5, atol=0)
