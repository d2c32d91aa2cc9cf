"""The cures that errors propose are possible."""

import sys
from pathlib import Path

import pytest

from optimus import errors
from optimus.errors import first_line, how_to_install, said


def test_how_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message never proposes `optimus[...]`, which is another project on the public index."""
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "optimus" / "errors.py"))
    assert how_to_install("wandb") == "pip install 'optimus-pretrain[wandb]'"
    (tmp_path / "pyproject.toml").touch()
    assert how_to_install("wandb") == f"pip install --editable '{tmp_path}[wandb]'"
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert how_to_install("wandb") == "make install-wandb"


def test_the_first_line_of_an_error() -> None:
    assert first_line(RuntimeError("no memory\nat 0x7f")) == "no memory"
    assert first_line(RuntimeError()) == "RuntimeError"


def test_the_make_targets_that_errors_name_are_there() -> None:
    root = Path(__file__).resolve().parents[1]
    targets = next(
        line
        for line in (root / "Makefile").read_text(encoding="utf-8").splitlines()
        if line.startswith(".PHONY: install-e")
    )
    extras = (
        "evaluate",
        "wandb",
        "mlflow",
        "dedup",
        "remote",
        "s3",
        "gcs",
        "hf",
        "plot",
        "tensorboard",
        "ray",
        "bench",
        "all",
    )
    assert targets.split()[1:] == [f"install-{extra}" for extra in extras]


def test_errors_of_users_code_are_one_line() -> None:
    assert said(ValueError("one\n  two `x`")) == "ValueError: one two 'x'"
    assert said(SystemExit()) == "SystemExit"
