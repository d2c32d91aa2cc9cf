"""Prompts that a run continues at its validations give the text of `optimus.generate` in every layout.

Samples do not change the run.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.sweep import in_turns
from helpers.trained import train_here
from optimus import generate, train
from optimus.observe.metrics import read_metrics
from optimus.testing import run_ranks

PROMPTS = ["def train(", "import", ""]


@pytest.fixture
def config(small_run: dict[str, Any]) -> dict[str, Any]:
    small_run["train"] |= {"steps": 5, "precision": "float32"}
    small_run["validation"] = [{"text": __file__, "every": 2, "max_bytes": 500}]
    small_run["evaluate"] = {"prompts": PROMPTS}
    return small_run


def found(config: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config["train"]["output"]) / "samples.jsonl").read_text().splitlines()]


def train_rank(config: dict[str, Any]) -> None:
    train_here(config)


def test_samples_are_what_the_model_writes_and_change_nothing(config: dict[str, Any], tmp_path: Path) -> None:
    train(config)
    samples = found(config)
    assert [record["step"] for record in samples] == [2, 4, 5]
    assert all([each["prompt"] for each in record["samples"]] == PROMPTS for record in samples)
    # the context of 32 tokens leaves 16 new ones
    written = [generate(config["train"]["output"], prompt, max_tokens=16) for prompt in PROMPTS]
    assert [each["text"] for each in samples[-1]["samples"]] == written
    assert any(written)
    without = {
        **config,
        "evaluate": {},
        "validation": [],
        "train": {**config["train"], "output": str(tmp_path / "without")},
    }
    train(without)
    losses = [[record["loss"] for record in read_metrics(Path(c["train"]["output"]))] for c in (config, without)]
    assert losses[0] == losses[1]
    assert not (tmp_path / "without" / "samples.jsonl").exists()


@pytest.mark.parametrize(
    ("sections", "ranks"),
    in_turns(
        [
            ({"state": {"shard": "optimizer"}}, 2),  # rank 0 generates alone
            ({"state": {"shard": "parameters"}}, 2),
            ({"parallel": {"pipeline": 2}}, 2),
            ({"parallel": {"pipeline": 2, "vocabulary": True}}, 2),
            ({"parallel": {"tensor": 2}}, 2),
            ({"parallel": {"context": 2}}, 2),
            ({"parallel": {"expert": 2}}, 2),
        ],
        3,
        always=2,
    ),
    ids=str,
)
def test_every_layout_writes_what_one_process_writes(
    config: dict[str, Any], tmp_path: Path, sections: dict[str, Any], ranks: int
) -> None:
    config["moe"] = {"balance_coefficient": 0.0}
    train(config)
    other = config | sections | {"train": config["train"] | {"output": str(tmp_path / "other")}}
    run_ranks(train_rank, ranks, other)
    assert found(other) == found(config)


def test_a_long_prompt_loses_its_beginning_and_a_resumed_run_its_later_samples(config: dict[str, Any]) -> None:
    config["evaluate"] |= {"prompts": [100 * "words " + "def train("]}
    config["checkpoint"] = {"every": 2}
    train(config)
    first = found(config)
    assert len(first) == 3
    folder = Path(config["train"]["output"])
    with (folder / "samples.jsonl").open("a") as file:  # as a run leaves the file that died before its next checkpoint
        file.write('{"step": 6, "samples": []}\n')
    config["train"] |= {"steps": 7}
    train(config, resume=True)
    assert found(config)[:3] == first
    assert [record["step"] for record in found(config)] == [2, 4, 5, 6, 7]
    assert len(found(config)[-2]["samples"]) == 1


def test_prompts_without_text_are_continued_at_the_end(config: dict[str, Any]) -> None:
    config["validation"] = []
    train(config)
    assert [record["step"] for record in found(config)] == [5]
