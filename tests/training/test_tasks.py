"""Tasks during training enter the metrics, are equal in every layout and do not change the run."""

import json
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from helpers.sweep import in_turns

pytest.importorskip("lm_eval", reason="needs the extra `evaluate`")

from helpers.trained import train_here
from optimus import evaluate, train
from optimus.errors import UserError
from optimus.evaluation import score
from optimus.evaluation.harness import HarnessModel
from optimus.observe.metrics import read_metrics
from optimus.testing import run_ranks

METRICS = ["acc", "acc_norm", "bits_per_byte", "margin"]


@pytest.fixture
def config(small_run: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "tasks" / "datasets").mkdir(parents=True)
    wrong = {f"distractor{number}": word for number, word in enumerate(("no", "never", "perhaps"), start=1)}
    rows = [{"question": f"Why {n}?", "support": "", "correct_answer": f"because {n}", **wrong} for n in range(6)]
    (tmp_path / "tasks" / "datasets" / "sciq.test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small_run["train"] |= {"steps": 3, "precision": "float32"}
    small_run["evaluate"] = {
        "tasks": ["sciq"], "task_data": str(tmp_path / "tasks"), "tasks_every": 2, "tasks_limit": 5
    }  # fmt: skip
    return small_run


def train_rank(config: dict[str, Any]) -> None:
    train_here(config)


def found(config: dict[str, Any]) -> list[dict[str, float]]:
    records = read_metrics(Path(config["train"]["output"]))
    return [{name: value for name, value in record.items() if name.startswith("tasks/")} for record in records]


def test_tasks_are_in_the_metrics_and_change_nothing(config: dict[str, Any], tmp_path: Path) -> None:
    train(config)
    measured = found(config)
    assert [sorted(each) for each in measured] == [[], *[[f"tasks/sciq/{name}" for name in METRICS]] * 2]
    after = evaluate(config["train"]["output"], tasks=["sciq"], task_data=tmp_path / "tasks", limit=5)["tasks"]["sciq"]
    assert {name: measured[-1][f"tasks/sciq/{name}"] for name in METRICS} == pytest.approx(
        {name: after[name] for name in METRICS}, rel=1e-5
    )
    without = {**config, "evaluate": {}, "train": {**config["train"], "output": str(tmp_path / "without")}}
    train(without)
    losses = [[record["loss"] for record in read_metrics(Path(c["train"]["output"]))] for c in (config, without)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "sections",
    in_turns(
        [{"state": {"shard": "optimizer"}}, {"state": {"shard": "parameters"}}, {"parallel": {"pipeline": 2}}],
        2,
        always=1,
    ),
    ids=str,
)  # rank 0 alone; all ranks together; each rank a part of the model
def test_every_layout_has_the_numbers_of_one_process(
    config: dict[str, Any], tmp_path: Path, sections: dict[str, Any]
) -> None:
    config["moe"] = {"balance_coefficient": 0.0}
    train(config)
    other = config | sections | {"train": config["train"] | {"output": str(tmp_path / "other")}}
    run_ranks(train_rank, 2, other)
    for mine, theirs in zip(found(config), found(other), strict=True):
        assert theirs == pytest.approx(mine, rel=1e-4)


def test_what_the_first_rank_cannot_read_ends_all(config: dict[str, Any], tmp_path: Path) -> None:
    config["state"] = {"shard": "parameters"}
    (tmp_path / "tasks" / "datasets" / "sciq.test.jsonl").unlink()
    assert run_ranks(ended, 2, config)[0] == run_ranks(ended, 2, config)[1] != "done"


def ended(config: dict[str, Any]) -> str:
    try:
        train_rank(config)
    except UserError as error:
        return str(error)
    return "done"


def test_bad_input(config: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="task 'sick' does not exist; did you mean 'sciq'"):
        train({**config, "evaluate": config["evaluate"] | {"tasks": ["sick"]}})
    with pytest.raises(UserError, match="tasks, task_data and tasks_every go together"):
        train({**config, "evaluate": {"tasks": ["sciq"]}})


def test_all_ranks_score_in_batches_of_one_size(config: dict[str, Any]) -> None:
    config["state"] = {"shard": "parameters"}
    sizes = run_ranks(sizes_of_batches, 2, config)
    assert sizes == [{7}, {7}]


def sizes_of_batches(config: dict[str, Any]) -> set[int]:
    """Returns the tokens per batch with which this rank scores, if the harness asks for 7."""
    sizes, own, init = set[int](), score.score, HarnessModel.__init__

    def noted(model: Any, windows: Any, tokens_per_batch: int = score.TOKENS_PER_BATCH) -> Any:
        sizes.add(tokens_per_batch)
        return own(model, windows, 7)

    with (
        patch.object(score, "score", noted),
        patch.object(HarnessModel, "__init__", partialmethod(init, tokens_per_batch=7)),
    ):
        train_rank(config)
    return sizes
