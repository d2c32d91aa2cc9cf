"""Validation on several ranks: one rank reads the text, and a text that it cannot read ends the run on all ranks."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.sweep import in_turns
from helpers.trained import train_here
from optimus import load_model, train
from optimus.config import load_config
from optimus.data.packing import documents_BS
from optimus.data.preparation import prepare
from optimus.data.shards import Shards
from optimus.data.training import TrainingData
from optimus.errors import UserError
from optimus.launch.here import check_run
from optimus.model.batch import Batch
from optimus.observe.metrics import read_metrics
from optimus.resolve.ranks import mesh_of
from optimus.testing import run_ranks

TEXT = Path(__file__)


def train_rank(config: dict[str, Any], texts: list[str], data: list[str]) -> str:
    """Runs one rank, on a node with its own paths of text and data; returns the error or "done"."""
    rank = dist.get_rank()
    config["validation"][0]["text"], config["data"]["path"] = texts[rank], data[rank]
    try:
        train_here(config)
    except UserError as error:
        return str(error)
    return "done"


@pytest.fixture
def config(small_run: dict[str, Any]) -> dict[str, Any]:
    small_run["train"] |= {"steps": 2, "precision": "float32"}
    small_run["validation"] = [{"every": 1, "max_bytes": 2000}]
    return small_run


@pytest.mark.parametrize("shard", ["optimizer", "parameters"])  # rank 0 validates alone; all ranks validate together
def test_text_on_the_first_rank_s_node_suffices(config: dict[str, Any], tmp_path: Path, shard: str) -> None:
    config["state"] = {"shard": shard}
    data = [config["data"]["path"]] * 2
    assert run_ranks(train_rank, 2, config, [str(TEXT), str(tmp_path / "absent")], data) == ["done", "done"]
    assert all(0 < record["bits_per_byte"] < 10 for record in read_metrics(Path(config["train"]["output"])))


@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_text_that_the_first_rank_cannot_read_ends_all(config: dict[str, Any], tmp_path: Path, shard: str) -> None:
    config["state"] = {"shard": shard}
    data = [config["data"]["path"]] * 2
    ended = run_ranks(train_rank, 2, config, [str(tmp_path / "absent"), str(TEXT)], data)
    absent = f"input not found: {tmp_path / 'absent'} (no such file or folder, and no file matches it as a glob)"
    assert ended == [f"validation.0.text: {absent}"] * 2
    assert (Path(config["train"]["output"]) / "checkpoints" / "step-00000001").is_dir()  # the finished step is saved


def test_only_the_first_rank_is_asked_for_the_text(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rank 0 checks the text: a refusal on another node would leave rank 0 waiting."""
    config["validation"][0]["text"] = str(tmp_path / "absent")
    tree = load_config(config)
    data = TrainingData(tree)
    monkeypatch.setenv("RANK", "1")
    check_run(tree, data, mesh_of(tree, 2, 2), False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match=r"validation\.0\.text: input not found: .*absent"):
        check_run(tree, data, mesh_of(tree, 2, 2), False)


def test_data_missing_on_one_node_ends_all(config: dict[str, Any], tmp_path: Path) -> None:
    other = tmp_path / "data"
    shutil.copytree(config["data"]["path"], other)
    (other / "tokenizer.json").unlink()
    ended = run_ranks(train_rank, 2, config, [str(TEXT)] * 2, [config["data"]["path"], str(other)])
    assert [text.split(" is missing")[0] for text in ended] == [str(other / "tokenizer.json")] * 2


def test_data_damaged_on_one_node_is_named_by_all(config: dict[str, Any], tmp_path: Path) -> None:
    other = tmp_path / "data"
    shutil.copytree(config["data"]["path"], other)
    content = bytearray((other / "shard-00000.npy").read_bytes())
    content[128 + 5 * 32 * 2] ^= 1  # instance 5, which the second rank reads in the first step
    (other / "shard-00000.npy").write_bytes(content)
    ended = run_ranks(train_rank, 2, config, [str(TEXT)] * 2, [config["data"]["path"], str(other)])
    assert [text.split(" at instance")[0] for text in ended] == [
        f"{other / 'shard-00000.npy'} is corrupted: its checksum differs from sums.npy"
    ] * 2


def validate_rank(config: dict[str, Any]) -> None:
    """Trains one rank of a run."""
    train_here(config)


@pytest.fixture
def sets(config: dict[str, Any], prepared: Path) -> dict[str, Any]:
    config["train"]["steps"] = 3
    config["validation"] = [
        {"name": "files", "text": str(TEXT), "every": 2, "tokens": 500},
        {"name": "rows", "path": str(prepared), "tokens": "0.1K"},
    ]
    return config


@pytest.mark.parametrize(
    ("ranks", "sections"),
    in_turns(
        [
            (2, {"state": {"shard": "parameters"}}),
            (2, {"parallel": {"pipeline": 2}}),
            (2, {"parallel": {"pipeline": 2, "vocabulary": True}}),
            (2, {"parallel": {"tensor": 2}}),
            (2, {"parallel": {"context": 2}}),
            (2, {"parallel": {"expert": 2}}),
        ],
        4,
        always=2,
    ),
    ids=str,
)
def test_several_sets_on_every_layout(
    sets: dict[str, Any], tmp_path: Path, ranks: int, sections: dict[str, Any]
) -> None:
    validate = sets | {"moe": {"balance_coefficient": 0.0}}
    train(validate)
    other = validate | sections | {"train": validate["train"] | {"output": str(tmp_path / "other")}}
    run_ranks(validate_rank, ranks, other)
    one, two = (read_metrics(Path(run["train"]["output"])) for run in (validate, other))
    measured = [{key: value for key, value in record.items() if "/" in key} for record in one]
    assert [sorted(each) for each in measured] == [
        [],
        ["bits_per_byte/files", "loss/files"],
        ["bits_per_byte/files", "bits_per_byte/rows", "loss/files", "loss/rows"],
    ]
    for mine, theirs in zip(measured, two, strict=True):
        assert {key: theirs[key] for key in mine} == pytest.approx(mine, rel=1e-4)


@pytest.mark.parametrize("documents", ["ignore", "mask"])
def test_rows_have_the_loss_that_training_has(
    sets: dict[str, Any], prepared: Path, tmp_path: Path, documents: str
) -> None:
    """Rows of several short documents have the loss that the run's `data.documents` gives them."""
    texts, folder = tmp_path / "texts.jsonl", tmp_path / "short"
    texts.write_text("".join(json.dumps({"text": f"{number} words and more"}) + "\n" for number in range(40)))
    prepare([texts], folder, tokenizer=prepared, context=32, workers=1)
    sets["data"]["documents"], sets["validation"][1]["path"] = documents, str(folder)
    train(sets)
    model, shards = load_model(sets["train"]["output"]), Shards(folder)
    tokens_BS = torch.from_numpy(shards.rows(0, 3).astype("int64"))
    document_BS = torch.from_numpy(documents_BS(tokens_BS.numpy(), shards.eos_id))
    assert document_BS.max() > 0
    batch = Batch(tokens_BS, document_BS=document_BS if documents == "mask" else None)
    expected = float(model.losses(batch).cross_entropy)
    record = read_metrics(Path(sets["train"]["output"]))[-1]
    assert record["loss/rows"] == pytest.approx(expected, rel=1e-5)
    index = shards.index
    per_token = index["text_bytes"] / (index["tokens"] + index["dropped_tokens"])
    assert record["bits_per_byte/rows"] == pytest.approx(expected / math.log(2) / per_token, rel=1e-2)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"name": "a"}, "validation.0: a: give one of path .* and text"),
        ({"name": "rows", "text": "absent"}, "validation: two sets are named rows"),
        ({"path": "a", "max_bytes": 9}, "validation.0: a set: max_bytes applies to text only: give tokens"),
        ({"name": "a", "text": "absent.txt"}, "input not found: absent.txt"),
        ({"name": "a", "path": "absent"}, "absent is not a folder of prepared data"),
    ],
)
def test_sets_that_make_no_sense_are_refused(sets: dict[str, Any], wrong: dict[str, Any], expected: str) -> None:
    sets["validation"] = [wrong, sets["validation"][1]]
    with pytest.raises(UserError, match=expected):
        train(sets)


def test_rows_longer_than_the_learned_positions_are_refused_before_the_first_step(
    sets: dict[str, Any], prepared: Path, tmp_path: Path
) -> None:
    prepare([TEXT], tmp_path / "long", tokenizer=prepared, context=64, workers=1)
    sets["model"] = {"family": "gpt2", "hidden": 32, "layers": 2, "heads": 2, "intermediate": 16, "vocab": 320}
    sets["model"]["learned_positions"] = 62
    sets["validation"][1]["path"] = str(tmp_path / "long")
    with pytest.raises(UserError, match=r"validation\.1\.path: .* has rows of 64 tokens, but the model has only 62"):
        train(sets)
    sets["model"]["learned_positions"] = 63
    train(sets)
