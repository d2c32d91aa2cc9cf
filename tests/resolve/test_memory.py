"""Activations of a pipeline take the bytes of the account in a step."""

from typing import Any, NamedTuple

import pytest

from helpers.sweep import in_turns
from optimus.resolve.memory import live
from optimus.testing import run_ranks
from optimus.testing.memory import tracking
from optimus.testing.steps import Steps

MODEL = {"family": "olmo", "layers": 8, "hidden": 64, "heads": 4, "intermediate": 256, "vocab": 256}
MICRO_BATCH, CONTEXT = 2, 128
MESSAGE = MICRO_BATCH * CONTEXT * 64 * 4  # bytes of a stage's output or of the output's gradient
SETS: list[list[str]] = [[], ["mlp"], ["norm", "attention"], ["block"]]


class Peak(NamedTuple):
    found: int
    said: int
    stages: int


def peak(source: dict[str, Any]) -> Peak:
    steps = Steps(source)
    steps.train()  # allocates what later steps reuse
    with tracking() as allocations:
        steps.train()
    rank = steps.groups.rank
    return Peak(allocations.peak, sum(live(steps.resolved, rank)), len(steps.resolved.partition(rank).local_stages))


def peaks(sources: list[dict[str, Any]]) -> list[Peak]:
    return [peak(source) for source in sources]


@pytest.mark.parametrize("schedule", in_turns(["1f1b", "interleaved-1f1b", "zb-h1", "zbv"], 3, always=1))
@pytest.mark.usefixtures("warm_ranks")
def test_what_is_live_in_a_pipeline_is_what_is_there(schedule: str) -> None:
    """A split backward pass keeps recomputed activations of its first part for the second part.

    Messages take additional bytes: each stage's input and output, their gradients, and copies of two.
    """
    per_rank = 1 if schedule in ("1f1b", "zb-h1") else 2
    train = {"output": "-", "steps": 2, "global_batch": 8, "micro_batch": MICRO_BATCH, "sequence_length": CONTEXT}
    source = {
        "model": MODEL,
        "data": {"path": "-"},
        "train": train | {"precision": "float32"},
        "parallel": {"pipeline": 2, "schedule": schedule, "stages_per_rank": per_rank},
    }
    for of_rank in run_ranks(peaks, 2, [source | {"recompute": kinds} for kinds in SETS]):
        for found, said, stages in of_rank:
            assert 0.99 * said <= found <= said + 6 * stages * MESSAGE
