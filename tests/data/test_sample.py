"""Sample text for a first model, made of files that come with Python."""

from pathlib import Path

import pytest

import optimus
from optimus.errors import UserError


def test_files_to_train_on_and_to_measure_on(tmp_path: Path) -> None:
    made = optimus.sample_text(tmp_path / "text")
    train, held_out = (
        {path.relative_to(tmp_path / "text" / part) for path in (tmp_path / "text" / part).rglob("*.py")}
        for part in ("train", "held-out")
    )
    assert (made["files"], made["held_out"]) == (len(train), len(held_out))
    assert not train & held_out
    assert len(train) > 10 * len(held_out) > 100
    assert made["bytes"] == sum(path.stat().st_size for path in (tmp_path / "text").rglob("*.py"))
    for path in (tmp_path / "text").rglob("*.py"):
        path.read_text(encoding="utf-8")
    with pytest.raises(UserError, match=r"text already exists: choose another folder, or remove it"):
        optimus.sample_text(tmp_path / "text")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write .*: .*\. Choose another folder"):
        optimus.sample_text(tmp_path / "file" / "text")
