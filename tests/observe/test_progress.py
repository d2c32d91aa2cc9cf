"""Plain lines where there is no terminal."""

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
    for done in range(41, 101):  # of a resumed run: 40 were done before
        progress.update("training", done, 100)
        now += 60
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(", until")[0] for line in lines[:2]] == [
        "training: 50/100  about 50 min left", "training: 60/100  about 40 min left",
    ]  # fmt: skip
    assert lines[-1] == "training: 100/100"


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module.sys.stderr, "isatty", lambda: True)
    with ProgressBar() as progress:
        progress.update("shuffle", 1, 2, "halfway")
        progress.print("a note")
        progress.update("shuffle", 2, 2, "done")
    err = capsys.readouterr().err
    for part in ("shuffle", "2/2", "a note"):
        assert part in err
