"""Open values of a run, such as its length and warm-up, are decided before its start, and likely mistakes are reported."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import optimus
from helpers.planned import resolved
from optimus.config import RunConfig, load_config
from optimus.config.renamed import with_new_names
from optimus.config.tree import ValidationConfig
from optimus.data.shards import Shards
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.observe.metrics import read_metrics
from optimus.training.reading import read_run
from optimus.training.resolving import resolve_run
from optimus.training.summary import summarise, summary_lines, warnings


def edited(run: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    return run | {name: {**run.get(name, {}), **values} for name, values in sections.items()}


def settled(run: Any, instances: int) -> RunConfig:
    """Returns the resolved configuration for data of so many sequences."""
    return resolved(run, sequences=instances).config


def in_epochs(run: dict[str, Any], epochs: float, **train: Any) -> dict[str, Any]:
    return edited(run, train={"steps": None, "epochs": epochs, **train})


def test_a_length_in_epochs_is_the_whole_steps_of_the_data(small_run: dict[str, Any]) -> None:
    batch = small_run["train"]["global_batch"]
    for epochs, instances, steps in ((1.0, 80, 10), (1.0, 87, 10), (2.5, 80, 25), (0.1, 80, 1), (3.0, 81, 30)):
        found = settled(load_config(in_epochs(small_run, epochs)), instances)
        assert (found.train.steps, found.train.epochs, found.train.tokens) == (steps, None, None)
        assert found.train.total_steps * batch <= epochs * instances
    with pytest.raises(UserError, match=r"train.epochs 0.05 of the 80 sequences in .* is less than one step"):
        settled(load_config(in_epochs(small_run, 0.05)), 80)
    with pytest.raises(UserError, match=r"train.stop_at 11 is beyond the 10 steps"):
        settled(load_config(in_epochs(small_run, 1.0, stop_at=11)), 80)


def test_a_run_of_some_tokens(small_run: dict[str, Any]) -> None:
    run = edited(small_run, train={"steps": None, "tokens": 500}, lr_schedule={"warmup_steps": None})
    assert optimus.train(run)["step"] == 2  # steps of 256 tokens
    saved = yaml.safe_load((Path(run["train"]["output"]) / "config.yaml").read_text())
    assert (saved["train"]["steps"], saved["train"]["tokens"], saved["lr_schedule"]["warmup_steps"]) == (2, None, 0)


def warmup_of(run: dict[str, Any], *overrides: str, resume: bool = False) -> int:
    found = resolve_run(load_config(run, overrides), torch.device("cpu"), Mesh(), resume=resume).config
    assert found.lr_schedule.warmup_steps is not None
    return found.lr_schedule.warmup_steps


def test_a_resumed_run_keeps_its_warm_up(small_run: dict[str, Any]) -> None:
    """A resumed run keeps its warm-up; a longer run's default would be longer, and the learning rate would jump."""
    run = edited(small_run, train={"steps": 40, "stop_at": 1}, lr_schedule={"warmup_steps": None})
    optimus.train(run)
    optimus.train(run, ["train.steps=80", "train.stop_at=3"], resume=True)
    rates = [record["lr"] for record in read_metrics(Path(run["train"]["output"]))]
    assert rates[:2] == [pytest.approx(1.5e-3), pytest.approx(3e-3)]
    assert warmup_of(run, "train.steps=80") == 4
    assert warmup_of(run, "train.steps=80", resume=True) == 2
    assert warmup_of(run, "lr_schedule.warmup_steps=9", resume=True) == 9


def test_what_a_run_of_an_earlier_version_has_written(small_run: dict[str, Any]) -> None:
    """The configuration of an earlier version has other names for some keys."""
    run = edited(small_run, train={"steps": 40}, lr_schedule={"warmup_steps": None})
    folder = Path(run["train"]["output"])
    folder.mkdir(parents=True)
    before = {"schedule": {"warmup_steps": 7}, "train": {"context": 32, "precision": "float32"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(before))
    assert warmup_of(run, resume=True) == 7
    assert with_new_names(before) == {
        "lr_schedule": {"warmup_steps": 7},
        "train": {"sequence_length": 32, "precision": "float32"},
    }
    text = {"text": "held-out", "every": 100, "max_bytes": 65536}
    other = {"name": "rows", "path": "rows"}
    assert with_new_names({"evaluate": text | {"prompts": ["def"]}, "validation": [other]}) == {
        "evaluate": {"prompts": ["def"]},
        "validation": [text, other],
    }
    read = ValidationConfig.model_validate(text)
    assert read.tokens >= 65536 + 1  # bytes alone limit the text
    assert ValidationConfig.model_validate(read.model_dump()) == read
    never = {"evaluate": {"text": None, "every": None, "max_bytes": 262_144}}
    assert with_new_names(never) == {"evaluate": {}, "validation": []}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, []),
        ({"train": {"steps": 50}}, []),  # 8 sequences a step: 4 epochs of 100 sequences
        ({"train": {"steps": 51}}, [r"reads its data 4.08 times"]),
        ({"train": {"steps": 51, "stop_at": 50}}, []),
        ({"lr_schedule": {"warmup_steps": 3}}, []),
        ({"lr_schedule": {"warmup_steps": 4}}, [r"more than half of the run, 4 of 6 steps"]),
        ({"lr_schedule": {"warmup_steps": 2500}}, [r"2,500 of 6 steps .* ends at 7.2e-06 of lr_schedule.lr 0.003"]),
        (
            {"model": {"norm": "layer"}},
            [r"model.norm is layer, but rms in all models of OlmoeForCausalLM .* cannot be exported"],
        ),
        ({"train": {"global_batch": 104}}, [r"6.24 times", r"104 sequences .* the data has 100"]),
    ],
)
def test_what_is_likely_not_meant_is_said(
    small_run: dict[str, Any], sections: dict[str, dict[str, Any]], expected: list[str]
) -> None:
    import re

    found = warnings(settled(load_config(edited(small_run, **sections)), 100), 100)
    assert len(found) == len(expected)
    assert all(re.search(pattern, text) for pattern, text in zip(expected, found))


def test_an_epoch_reads_all_sequences_of_each_row(small_run: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    """A row of prepared data has two sequences of half its context."""
    run = in_epochs(small_run, 1.0, sequence_length=16, global_batch=512)
    instances = Shards(run["data"]["path"]).instances
    config, data = read_run(run)
    assert data.sequences == 2 * instances
    optimus.train(run, ["train.stop_at=1"])
    assert f"length: {2 * instances // 512:,} steps" in capfd.readouterr().err
    about = resolve_run(config, torch.device("cpu"), Mesh.from_sizes(1), sequences=data.sequences)
    assert about.config.train.steps == 2 * instances // 512
    assert summarise(about, data.sequences)["epochs"] == pytest.approx(2 * instances // 512 * 512 / (2 * instances))


def test_train_begins_with_a_summary_and_says_when_it_ends(
    small_run: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    run = edited(small_run, lr_schedule={"warmup_steps": 5})
    instances = Shards(run["data"]["path"]).instances
    expected = summary_lines(
        summarise(
            resolve_run(load_config(run), torch.device("cpu"), Mesh.from_sizes(1), sequences=instances), instances
        )
    )
    assert expected[0] == "model: olmoe, 41.5 K parameters, 35.4 K active"
    assert expected[1].startswith("length: 6 steps, 1.54 K tokens: ")
    optimus.train(run)
    said = capfd.readouterr().err.splitlines()
    assert said[: len(expected)] == expected
    assert said[len(expected) - 1].startswith("warning: the warm-up takes more than half of the run")
    assert said[len(expected)].startswith("memory per rank: ")
    assert sum(line.startswith("time: about ") and " left, until " in line for line in said) == 1


def test_check_warns_as_the_run_does(small_run: dict[str, Any]) -> None:
    found = optimus.train(edited(small_run, lr_schedule={"warmup_steps": 2500}), check=True)
    assert len(found["warnings"]) == 1
    assert f"warning: {found['warnings'][0]}" in found["summary"]


def test_the_configuration_that_an_earlier_version_has_written_goes_on(small_run: dict[str, Any]) -> None:
    """`optimus train RUN/config.yaml --resume` accepts a configuration of an earlier version.

    The same keys in a user's own file are refused with their new names.
    """
    run = edited(small_run, train={"steps": 2, "stop_at": 1})
    optimus.train(run)
    path = Path(run["train"]["output"]) / "config.yaml"
    written = yaml.safe_load(path.read_text())
    del written["validation"]
    written["evaluate"] |= {"text": __file__, "every": 1, "max_bytes": 500}
    path.write_text(yaml.safe_dump(written))
    optimus.train(path, ["train.stop_at=null"], resume=True)
    assert read_metrics(path.parent)[-1]["bits_per_byte"] > 0
    own = path.with_name("own.yaml")
    own.write_text(yaml.safe_dump(written))
    with pytest.raises(optimus.UserError, match=r"unknown key 'evaluate\.max_bytes': use validation: \["):
        optimus.train(own, resume=True)
