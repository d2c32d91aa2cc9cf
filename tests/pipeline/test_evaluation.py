"""Every rank of a pipeline gets the scores of one process, and evaluation does not change the training that follows."""

from typing import Any

import pytest

from optimus.comm import Groups
from optimus.config import load_config
from optimus.evaluation.score import Score, Window, score
from optimus.pipeline.staged import PipelineStages
from optimus.resolve.ranks import mesh_of
from optimus.testing import run_ranks
from optimus.testing.steps import build
from optimus.testing.traffic import counting

MODEL = {"hidden": 16, "layers": 4, "heads": 2, "vocab": 52, "intermediate": 24}
EXPERTS = {"family": "olmoe", "experts": 4, "experts_per_token": 2}
WINDOWS = [Window([1, 2, 3], [4, 5]), Window([1], [9, 8, 7, 6]), Window([2, 2, 2, 2, 2], [3])]


def config_of(model: dict[str, Any], **sections: Any) -> dict[str, Any]:
    train = {
        "output": "",
        "steps": 1,
        "global_batch": 8,
        "micro_batch": 1,
        "sequence_length": 12,
        "precision": "float32",
    }
    return {"model": MODEL | model, "data": {"path": ""}, "train": train, **sections}


def model_of(config: dict[str, Any], ranks: int) -> PipelineStages:
    tree = load_config(config)
    model, state = build(tree, Groups(mesh_of(tree, ranks)))
    state.initialize(0, 0.2)
    return model


def scores(config: dict[str, Any], ranks: int) -> list[Score]:
    return score(model_of(config, ranks), WINDOWS, tokens_per_batch=8)


@pytest.mark.parametrize(
    ("model", "ranks", "parallel"),
    [
        (EXPERTS | {"tie_embeddings": True}, 2, {}),
        (EXPERTS, 2, {"vocabulary": True}),
        (EXPERTS, 4, {"vocabulary": True, "tensor": 2, "schedule": "zbv", "stages_per_rank": 2}),
        ({"family": "olmo"}, 4, {"context": 2, "schedule": "interleaved-1f1b", "stages_per_rank": 2}),
        ({"family": "olmo"}, 4, {"tensor": [1, 2], "executor": "message-driven"}),
        (EXPERTS, 4, {"expert": 2, "pipeline": 2}),
    ],
    ids=str,
)
def test_scores_are_those_of_one_process(model: dict[str, Any], ranks: int, parallel: dict[str, Any]) -> None:
    shard = {"shard": "parameters"} if parallel.get("expert") else {}
    right = scores(config_of(model), 1)
    for found in run_ranks(scores, ranks, config_of(model, parallel={"pipeline": 2, **parallel}, state=shard), ranks):
        assert [each.greedy for each in found] == [each.greedy for each in right]
        assert [each.log_likelihood for each in found] == pytest.approx([e.log_likelihood for e in right], rel=1e-5)


def broadcast(config: dict[str, Any], ranks: int) -> int:
    model = model_of(config, ranks)
    with counting() as traffic:
        score(model, WINDOWS, tokens_per_batch=8)
    return traffic.bytes["broadcast"]


@pytest.mark.parametrize("vocabulary", [False, True])
def test_no_more_is_sent_than_scores_need(vocabulary: bool) -> None:
    """Ranks broadcast two numbers for each of the 7 scored tokens, or the hidden states if all ranks share the output
    layer."""
    tokens = sum(len(window.continuation) for window in WINDOWS)
    config = config_of({"family": "olmo"}, parallel={"pipeline": 2, "vocabulary": vocabulary})
    each = MODEL["hidden"] if vocabulary else 2
    assert run_ranks(broadcast, 2, config, 2) == [4 * tokens * each] * 2
