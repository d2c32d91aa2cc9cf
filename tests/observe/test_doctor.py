"""The findings of `optimus doctor`, and its proposed cures."""

import errno
import json
from collections import namedtuple
from pathlib import Path

import pytest
from typer.testing import CliRunner

from optimus.cli import app
from optimus.observe import doctor


def statuses(findings: list[doctor.Finding]) -> dict[str, str]:
    return {each.what: each.status for each in findings}


def test_every_part_is_looked_at(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "runs" / "later"), "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    found = {each["what"]: each for each in json.loads(result.output)}
    assert {
        "versions",
        "processor",
        "memory",
        "collectives",
        "network",
        "permissions",
        "room",
        "file system",
        "clock",
    } <= {*found}
    assert str(tmp_path) in found["permissions"]["found"]
    assert all(each["mend"] for each in found.values() if each["status"] != "ok")
    assert not list(tmp_path.iterdir())
    assert "can be written" in CliRunner().invoke(app, ["doctor", str(tmp_path)]).output


def test_what_is_wrong_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage(100, 99, 1))
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (256, 256))
    monkeypatch.setattr(doctor, "file_system_time", lambda folder: doctor.time.time() + 60)
    monkeypatch.setenv("OMP_NUM_THREADS", "999")
    found = statuses(doctor.examine(tmp_path))
    assert {found[what] for what in ("room", "open files", "clock", "threads")} == {"warning"}


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(doctor.os, "access", lambda path, mode: False)
        found = doctor.examine(tmp_path)
    assert statuses(found)["permissions"] == "problem"
    monkeypatch.setattr(doctor, "examine", lambda folder: found)
    result = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert result.exit_code == 1
    assert "you may not write to" in result.output


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", full)
    found = doctor.examine(tmp_path)
    assert {statuses(found)[what] for what in ("file system", "clock")} == {"problem"}
    assert {each.mend for each in found if "No space left" in each.found} == {"make room, or choose another folder"}


def test_interfaces_that_say_their_speed(tmp_path: Path) -> None:
    for name, speed in (("eth0", "100000"), ("lo", ""), ("eth1", "-1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(speed)
    *_, network = doctor._interconnect(tmp_path)
    assert network.found.startswith("eth0 100 Gbit/s")
    assert "eth1" not in network.found
