"""metrics.jsonl is appended to, truncated when a run goes back, and readable after a torn last line."""

import errno
import sys
from pathlib import Path

import pytest

from optimus.config import RunConfig, load_config
from optimus.errors import UserError
from optimus.observe.metrics import MetricsWriter, read_metrics
from optimus.observe.sinks import check_sinks
from optimus.observe.tensorboard import grouped


def config(**observe: object) -> RunConfig:
    train = {"output": "x", "steps": 9, "global_batch": 1, "micro_batch": 1, "sequence_length": 8}
    return load_config(
        {"model": "mula-tiny", "data": {"path": "x"}, "train": train, "observe": {"tensorboard": False, **observe}}
    )


def write(folder: Path, after: int, steps: range, loss: float) -> None:
    writer = MetricsWriter(folder, config(), after)
    for step in steps:
        writer.write({"step": step, "loss": loss})
    writer.close()


def test_append_and_cut(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 6), 1.0)
    write(tmp_path, 5, range(6, 8), 2.0)
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path)] == [(s, 1.0 if s < 6 else 2.0) for s in range(1, 8)]
    write(tmp_path, 3, range(4, 6), 3.0)  # back to the checkpoint of step 3
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path)] == [(s, 1.0 if s < 4 else 3.0) for s in range(1, 6)]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_torn_last_line_is_left_out_and_mended(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 4), 1.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]
    write(tmp_path, 3, range(4, 5), 1.0)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_lines_that_are_no_records_are_left_out_and_mended(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 3), 1.0)
    odd = ["5", "[1]", "{}", '{"step": "one"}', '{"step": null, "loss": 1}', 20_000 * "["]
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write("\n".join(odd).encode() + b"\n\xff\n")
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]
    write(tmp_path, 2, range(3, 4), 1.0)
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 3


def test_every_record_is_on_the_disk_at_once(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, config(), 0)
    writer.write({"step": 1, "loss": float("nan")})
    assert read_metrics(tmp_path)[0]["step"] == 1
    writer.close()


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = MetricsWriter(tmp_path, config(tensorboard=True), 0)
    for step in (1, 2):
        more = {"memory/parameters": 8, "z_loss": 0.1, "own_score": 1.0, "time": 1e9}
        writer.write({"step": step, "loss": step / 2, "model_flops_utilization": None, **more})
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss", "memory/parameters", "router/z_loss", "validation/own_score"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.5), (2, 1.0)]
    assert "_hparams_/session_start_info" in events.summary_metadata
    given = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"optimizer.weight_decay" in given


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, config(), 0)
    writer._file.close()
    writer._file = open("/dev/full", "a")  # noqa: SIM115 (the writer closes it)
    with pytest.raises(UserError, match=r"cannot write /dev/full: No space left on device\. Make room, then run again"):
        writer.write({"step": 1, "loss": 1.0})
    writer.close()  # the error is raised only once


def test_a_full_disk_at_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 0, range(1, 4), 1.0)
    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(UserError, match=r"cannot write .*metrics\.jsonl: No space left on device\. Make room, then"):
        MetricsWriter(tmp_path, config(), 2)
    assert len(read_metrics(tmp_path)) == 3


def test_tensorboard_is_not_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    check_sinks(config(tensorboard=True))
    assert "observe.tensorboard: TensorBoard is not installed, so there are no events" in capsys.readouterr().err
    for tensorboard in (True, False):
        with pytest.raises(
            UserError, match=r"^observe\.sinks: TensorBoard is not installed: .*, or remove 'tensorboard'"
        ):
            check_sinks(config(tensorboard=tensorboard, sinks=["tensorboard"]))


def test_a_full_disk_under_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard's thread raises the disk error in a later call, which may be the last."""
    expected = r"cannot write .*tensorboard: No space left on device\. Make room, then run again with `resume=True`"
    writer = MetricsWriter(tmp_path, config(tensorboard=True), 0)
    (tensorboard,) = (sink._writer for sink in writer.sinks._sinks.values())  # type: ignore[attr-defined]
    tensorboard.close()
    monkeypatch.setattr(tensorboard, "add_scalar", refuse)
    with pytest.raises(UserError, match=expected):
        writer.write({"step": 1, "loss": 1.0})
    monkeypatch.setattr(tensorboard, "close", refuse)
    with pytest.raises(UserError, match=expected):
        writer.close()


class Recording:
    """A sink that keeps its records, and raises `error` in each call."""

    def __init__(self, error: BaseException | None) -> None:
        self.error, self.records, self.closed = error, list[dict[str, object]](), False

    def write(self, record: dict[str, object]) -> None:
        self.records.append(record)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.closed = True
        if self.error is not None:
            raise self.error


def test_a_sink_that_fails_is_closed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = MetricsWriter(tmp_path, config(), 0)
    broken = Recording(ValueError("no link"))
    writer.sinks._sinks = {"broken": broken}
    writer.write({"step": 1})
    writer.write({"step": 2})
    assert (broken.records, broken.closed) == ([{"step": 1}], True)
    assert "the metric sink broken failed (ValueError: no link): from step 1 on" in capsys.readouterr().err


def test_metrics_of_training_are_in_its_group() -> None:
    assert [grouped(name) for name in ("teacher_divergence", "phase")] == ["train/teacher_divergence", "train/phase"]


@pytest.mark.parametrize("error", [UserError("make room"), KeyboardInterrupt()], ids=["user", "interrupt"])
def test_an_error_of_one_sink_leaves_the_others_whole(tmp_path: Path, error: BaseException) -> None:
    """The later sinks get the record and are closed, before the error of the first is raised."""
    writer = MetricsWriter(tmp_path, config(), 0)
    first, second = Recording(error), Recording(None)
    writer.sinks._sinks = {"first": first, "second": second}
    if isinstance(error, UserError):
        with pytest.raises(UserError, match="make room"):
            writer.write({"step": 1})
        assert second.records == [{"step": 1}]
    with pytest.raises(type(error)):
        writer.close()
    assert second.closed
