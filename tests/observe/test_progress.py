"""A progress bar on a terminal, plain lines elsewhere."""

import os
import pty
import re
import subprocess
import sys

import pytest

from optimus.observe import progress as module
from optimus.observe.progress import ProgressBar


def test_a_line_every_so_many_units_and_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar(every=2) as progress:
        for done in range(1, 6):
            progress.update("training", done, 5, f"loss {done}")
        progress.print("a note")
    out, err = capsys.readouterr()
    assert out == ""  # standard output is for results
    assert err.splitlines() == [
        "training: 2/5 loss 2", "training: 4/5 loss 4", "training: 5/5 loss 5", "a note",
    ]  # fmt: skip


def test_a_line_every_few_seconds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    progress = ProgressBar()
    for second in range(1, 31):
        now = float(second)
        progress.update("tokenise", 1000 * second, None)
    assert capsys.readouterr().err.splitlines() == ["tokenise: 11,000", "tokenise: 22,000"]


def test_how_long_it_will_take(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    progress = ProgressBar(every=10)
    for done in range(41, 101):  # a run resumed after 40 steps
        progress.update("training", done, 100)
        now += 60
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(", until")[0] for line in lines[:2]] == [
        "training: 50/100  about 50 min left", "training: 60/100  about 40 min left",
    ]  # fmt: skip
    assert lines[-1] == "training: 100/100"


NOTE = "loss 6.726  123,456 tokens/s  44.4 GB"


def pretend_terminal(monkeypatch: pytest.MonkeyPatch, columns: int = 80) -> None:
    """Makes standard error look like a terminal."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.delenv("NO_COLOR", raising=False)


def bar_of(err: str) -> str:
    """Returns the last content of the bar's line."""
    return re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", err).rstrip("\n").rpartition("\r")[2]


def test_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_terminal(monkeypatch)
    with ProgressBar() as progress:
        progress.update("shuffle", 1, 2, "halfway")
        progress.print("a note")
        progress.update("shuffle", 2, 2, "done")
    err = capsys.readouterr().err
    assert "a note\n" in err
    assert re.fullmatch("shuffle ━+ 2/2 done \\S+ s elapsed *", bar_of(err))


@pytest.mark.parametrize("columns", [120, 80, 60, 40])
def test_the_bar_fits_its_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """Numbers are complete, and the last columns stay empty: a ^C printed there would start a new line and leave the
    bar behind."""
    pretend_terminal(monkeypatch, columns)
    with ProgressBar() as progress:
        for done in range(100, 125):
            progress.update("training", done, 1_000, NOTE)
    found = bar_of(capsys.readouterr().err)
    assert re.fullmatch(r"training .*124/1,000 loss 6\.7.* left *", found)
    assert len(found) <= columns - 2
    assert ("…" in found) == (columns < 80)
    assert ("━" in found) == (columns > 60)


@pytest.mark.parametrize(
    ("done", "total", "shown"),
    [(5, None, "5"), (999_999, 999_999, "999,999/999,999"), (98_967, 10_844_301, "98,967/10.8 M")],
)
def test_numbers_of_the_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, done: int, total: int | None, shown: str
) -> None:
    pretend_terminal(monkeypatch)
    with ProgressBar() as progress:
        progress.update("read", done, total, "bytes")
    assert f" {shown} bytes " in bar_of(capsys.readouterr().err)


def test_one_bar_at_a_time(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one bar is shown: several would be redrawn over the output of a signal handler below them."""
    pretend_terminal(monkeypatch)
    with ProgressBar() as progress:
        for stage in ("first", "second"):
            progress.update(stage, 1, 2)
            progress.update(stage, 2, 2)
    err = capsys.readouterr().err
    assert "\x1b[1A" not in err
    assert err.rindex("first") < err.index("second")


def test_lines_above_the_bar_are_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_terminal(monkeypatch)
    line = "read [sciq] and :smile: of " + "some/folder/" * 20
    with ProgressBar() as progress:
        progress.update("read", 1, 2)
        progress.print(line)
    assert f"{line}\n" in capsys.readouterr().err


def test_what_is_printed_beside_the_bar_goes_where_it_should(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output printed beside the bar, by a user's hook for instance, goes to standard output, which may be a file."""
    pretend_terminal(monkeypatch)
    with ProgressBar() as progress:
        progress.update("training", 1, 2)
        print("a result")
    assert capsys.readouterr().out == "a result\n"


def test_no_color(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_terminal(monkeypatch)
    for value, coloured in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", value)
        with ProgressBar() as progress:
            progress.update("training", 1, 2)
        assert bool(re.search(r"\x1b\[[34]", capsys.readouterr().err)) == coloured


def test_plain_lines_on_a_terminal_that_knows_no_escape_sequences(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_terminal(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    with ProgressBar(every=2) as progress:
        for done in (1, 2, 3):
            progress.update("training", done, 3)
    assert capsys.readouterr().err.splitlines() == ["training: 2/3", "training: 3/3"]


@pytest.mark.parametrize(("term", "written"), [("xterm", b"\r\x1b[Kstopping\r\n"), ("dumb", b"stopping\r\n")])
def test_a_signals_line_stands_instead_of_the_bar(term: str, written: bytes) -> None:
    ours, theirs = pty.openpty()
    script = "from optimus.observe.terminal import say_at_once; say_at_once('stopping')"
    subprocess.run([sys.executable, "-c", script], stderr=theirs, env={**os.environ, "TERM": term}, check=True)
    assert os.read(ours, 1000) == written
    os.close(theirs)
    os.close(ours)
