"""A run's checkpoints are listed, verified, shown and converted; runs are rolled back."""

import errno
import json
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import optimus
from optimus.checkpoint import rollback as rollbacks
from optimus.checkpoint.inspect import convert, list_run, show, verify_all
from optimus.checkpoint.reader import Reader
from optimus.checkpoint.rollback import rollback
from optimus.checkpoint.store import load_model, write_model
from optimus.cli import app
from optimus.errors import UserError
from optimus.observe.metrics import read_metrics


@pytest.fixture
def run(small_run: dict[str, Any]) -> Path:
    """A run of 6 steps: full checkpoints at 4 and 6, weights at 3 and 6."""
    small_run["checkpoint"] = {"every": 2, "weights_every": 3}
    optimus.train(small_run)
    return Path(small_run["train"]["output"])


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [Path(row["path"]).name for row in rows]


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def test_a_run_is_listed(run: Path) -> None:
    rows = list_run(run)
    assert names(rows) == ["weights-00000003", "step-00000004", "step-00000006", "weights-00000006"]
    assert [row["resumes"] for row in rows] == [False, False, True, False]
    assert [row["kind"] for row in rows] == ["weights", "full", "full", "weights"]
    (run / "checkpoints" / "step-00000006" / "__0_0.distcp").unlink()
    rows = list_run(run)
    assert "__0_0.distcp is missing" in rows[2]["problem"]
    assert names([row for row in rows if row["resumes"]]) == ["step-00000004"]
    for path, message in (
        (run / "absent", r"absent is not a run folder$"),
        (run.parent, r" is not a run folder$"),
        (
            run / "checkpoints" / "step-00000004",
            r"step-00000004 is not a run folder but a checkpoint: name the folder of its",
        ),
    ):
        with pytest.raises(UserError, match=message):
            list_run(path)


def test_everything_is_verified(run: Path) -> None:
    assert not any(verify_all(run).values())
    damaged = run / "checkpoints" / "weights-00000003"
    flip(damaged / "__0_0.distcp", 3000)
    assert [Path(path).name for path, problems in verify_all(run).items() if problems] == ["weights-00000003"]
    outcome = CliRunner().invoke(app, ["checkpoint", "verify", str(damaged)])
    assert outcome.exit_code == 1
    assert "weights-00000003 is damaged: __0_0.distcp, bytes" in outcome.output
    assert CliRunner().invoke(app, ["checkpoint", "verify", str(run / "checkpoints" / "step-00000006")]).exit_code == 0


def test_what_a_checkpoint_holds(run: Path) -> None:
    full, weights = (show(run / "checkpoints" / name) for name in ("step-00000006", "weights-00000006"))
    assert (full["kind"], weights["kind"]) == ("full", "weights")
    assert full["tensors"] == 3 * weights["tensors"]
    assert full["parameters"] == weights["parameters"]
    assert (full["writers"], list(full["bytes_by_node"])) == (1, [0])
    assert full["progress"] == {"updates": 6, "skipped": 0, "sequences": 48}
    listed = CliRunner().invoke(app, ["checkpoint", "list", str(run), "--json"])
    assert names(json.loads(listed.output)) == names(list_run(run))
    assert "written by 1 of 1 ranks: node 0" in CliRunner().invoke(app, ["checkpoint", "show", str(run)]).output


def test_weights_are_those_that_the_model_computed_with(run: Path) -> None:
    full, weights = (load_model(run / "checkpoints" / f"{kind}-00000006") for kind in ("step", "weights"))
    for a, b in zip(full.parameters(), weights.parameters()):
        assert torch.equal(a.bfloat16(), b.bfloat16())
        assert torch.equal(b, b.bfloat16().float())


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_conversion(run: Path, tmp_path: Path, dtype: str | None) -> None:
    full = run / "checkpoints" / "step-00000006"
    right = load_model(full)
    found = convert(full, tmp_path / "w", "weights", dtype)
    assert found["tensors"] == len(Reader.open(tmp_path / "w").stored)
    made = load_model(tmp_path / "w")
    kind = torch.bfloat16 if dtype is None else torch.float32
    assert all(torch.equal(a.to(kind).float(), b) for a, b in zip(right.parameters(), made.parameters()))
    assert not Reader.open(tmp_path / "w").description.full
    assert verify_all(tmp_path / "w") == {str(tmp_path / "w"): []}
    convert(full, tmp_path / "all.pt", "torch")
    convert(full, tmp_path / "all.safetensors", "safetensors")
    plain = torch.load(tmp_path / "all.pt", weights_only=True)
    safe = load_file(tmp_path / "all.safetensors")
    assert set(plain) == set(safe) == set(Reader.open(full).stored)
    assert all(torch.equal(plain[key], safe[key]) for key in plain)
    (tmp_path / "ordinary").touch()
    modes = {name: (tmp_path / name).stat().st_mode for name in ("ordinary", "all.pt", "all.safetensors")}
    assert len(set(modes.values())) == 1, modes
    assert torch.equal(plain["model.embedding.weight"], right.embedding.weight)
    with pytest.raises(UserError, match=r"all\.pt exists already"):
        convert(full, tmp_path / "all.pt", "torch")
    for wrong in ("foo", "int8"):
        for to in ("weights", "torch", "safetensors"):
            with pytest.raises(UserError, match=rf"`dtype` is '{wrong}': choose one of float32, bfloat16"):
                convert(full, tmp_path / "other", to, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("to", ["torch", "safetensors"])
def test_conversion_keeps_integers(run: Path, tmp_path: Path, to: Any) -> None:
    full = run / "checkpoints" / "step-00000006"
    model = load_model(full)
    model.register_buffer("count", torch.tensor([(1 << 20) + 1]))
    model.register_buffer("flag", torch.tensor([True]))
    write_model(model, tmp_path / "made", Reader.open(full).description.weights_only("float32"))
    convert(tmp_path / "made", tmp_path / "all", to, "bfloat16")
    found = torch.load(tmp_path / "all", weights_only=True) if to == "torch" else load_file(tmp_path / "all")
    assert found["model.embedding.weight"].dtype == torch.bfloat16
    assert found["model.count"].tolist() == [(1 << 20) + 1]
    assert found["model.flag"].tolist() == [True]


def test_going_back(run: Path, small_run: dict[str, Any]) -> None:
    """A rollback continues from the weights of step 3 with fresh moments and the same data; later checkpoints and
    metrics move aside."""
    before = read_metrics(run)
    result = rollback(run, 3)
    assert result["moved"] == ["step-00000004", "step-00000006", "weights-00000006"]
    assert names([row for row in list_run(run) if row["resumes"]]) == ["weights-00000003"]
    summary = optimus.train(small_run, ["train.stop_at=5"], resume=True)
    assert summary["step"] == 5
    records = read_metrics(run)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert [record["loss"] for record in records[:3]] == [record["loss"] for record in before[:3]]
    assert records[3]["loss"] == pytest.approx(before[3]["loss"], rel=2e-3)  # weights in bf16
    assert records[4]["loss"] != before[4]["loss"]
    assert Reader.open(run / "checkpoints" / "step-00000005").description.progress["updates"] == 2
    abandoned = run / "checkpoints" / "abandoned-1"
    assert [record["loss"] for record in read_metrics(abandoned)] == [record["loss"] for record in before]
    assert not any(problems for each in result["moved"] for problems in verify_all(abandoned / each).values())
    # A checkpoint that is newer than the rollback's step is resumed with its full state.
    assert names([row for row in list_run(run) if row["resumes"]]) == ["step-00000005"]
    assert optimus.train(small_run, resume=True)["step"] == 6


def test_going_back_to_a_full_checkpoint(run: Path, small_run: dict[str, Any]) -> None:
    assert rollback(run, 4)["checkpoint"].endswith("step-00000004")
    optimus.train(small_run, ["train.stop_at=5"], resume=True)
    assert Reader.open(run / "checkpoints" / "step-00000005").description.progress["updates"] == 1


def test_going_back_on_a_failing_disk(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollback that fails leaves the checkpoints and the marker as they were."""
    before = sorted(path.name for path in (run / "checkpoints").iterdir())
    rename, calls = Path.rename, count(1)

    def fail_at_second(path: Path, target: Path) -> Path:
        return rename(path, target) if next(calls) != 2 else fail()

    def fail(*_: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    for owner, name, failing in ((Path, "rename", fail_at_second), (rollbacks, "write_json", fail)):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, failing)
            with pytest.raises(UserError, match="Permission denied"):
                rollback(run, 3)
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before
    assert rollback(run, 3)["moved"] == ["step-00000004", "step-00000006", "weights-00000006"]


def test_going_back_to_nothing(run: Path) -> None:
    with pytest.raises(UserError, match=r"has no checkpoint of step 5: its checkpoints are of steps 3, 4, 6"):
        rollback(run, 5)
    flip(run / "checkpoints" / "weights-00000003" / "__0_0.distcp", 3000)
    before = sorted(path.name for path in (run / "checkpoints").iterdir())
    with pytest.raises(UserError, match=r"weights-00000003 is damaged"):
        rollback(run, 3)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before


@pytest.mark.in_turn(0, 3)
def test_the_commands(run: Path, tmp_path: Path) -> None:
    """The commands as a shell runs them: exit codes and printed output."""

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "optimus", *words], capture_output=True, text=True)

    done = command("rollback", str(run), "--step", "3")
    assert done.returncode == 0
    assert f"optimus train {run}/config.yaml --resume" in done.stdout
    done = command("rollback", str(run), "--step", "4")
    assert (done.returncode, "has no checkpoint of step 4" in done.stderr) == (2, True)
    done = command("checkpoint", "convert", str(run), "--output", str(tmp_path / "w"), "--dtype", "float32")
    assert (done.returncode, "tensors" in done.stdout) == (0, True)
