"""Pictures of timelines, their files, and `optimus schedule`."""

import json
import sys
from pathlib import Path

import pytest

from optimus import cli
from optimus.errors import UserError
from optimus.pipeline import Costs, make_schedule, simulate
from optimus.pipeline.draw import draw, shade, text_timeline
from optimus.pipeline.schedule import Kind
from optimus.pipeline.timeline import Event, Timeline, read_timeline, write_timeline


def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: object
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["optimus", "schedule", *map(str, words)])
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return (int(caught.value.code or 0), *capsys.readouterr())


def test_text() -> None:
    assert text_timeline(simulate(make_schedule("1f1b", 2, 3)), 80) == (
        "rank 0  F0F1....B0--F2B1--..B2--\n"
        "rank 1  ..F0B0--F1B1--F2B2--...."
    )  # fmt: skip
    assert text_timeline(simulate(make_schedule("zbv", 2, 1)), 80) == (
        "rank 0  F0a......F0bI0bW0b...I0aW0a\n"
        "rank 1  ...F0aF0b......I0bI0aW0aW0b"
    )  # fmt: skip
    timeline = simulate(make_schedule("1f1b", 2, 3))
    assert text_timeline(timeline, 32) is not None
    assert text_timeline(timeline, 31) is None


def test_text_keeps_every_label_whole_with_any_times() -> None:
    for seed in range(5):
        timeline = simulate(make_schedule("zb-h1", 3, 11), Costs(jitter=0.5, seed=seed))
        text = text_timeline(timeline, 10_000)
        assert text is not None
        for line in text.splitlines():
            assert all(line.count(f"{kind}{number}") >= 1 for kind in "FIW" for number in range(11))


def test_a_picture_of_a_simulated_and_a_measured_timeline(tmp_path: Path) -> None:
    path = tmp_path / "t.png"
    measured = Timeline.from_events(
        [Event(0, Kind.FORWARD, 0, 0, 7.0, 8.0), Event(1, Kind.BACKWARD, 1, 0, 8.0, 9.5)], 2
    )
    draw({"simulated": simulate(make_schedule("zbv", 3, 4))}, path)
    alone = path.read_bytes()
    draw({"simulated": simulate(make_schedule("zbv", 3, 4)), "measured": measured}, path)
    both = path.read_bytes()
    assert alone[:4] == both[:4] == b"\x89PNG"
    heights = [int.from_bytes(content[20:24], "big") for content in (alone, both)]
    assert heights[1] > heights[0] + 100  # a second panel


def test_no_two_computations_look_alike() -> None:
    """Each kind of computation has its own shades for a rank's first and last stage, and all differ from white."""
    shades = {(kind, turn): shade(kind, turn, 2) for kind in Kind if kind.computes for turn in (0, 1)}
    for one in shades:
        assert 1 - min(shades[one]) > 0.15
        for other in shades:
            apart = max(abs(a - b) for a, b in zip(shades[one], shades[other]))
            assert one == other or apart > 0.08, (one, other)


def test_a_timeline_is_written_and_read(tmp_path: Path) -> None:
    timeline = simulate(make_schedule("1f1b", 2, 3), Costs(jitter=0.1, link=0.1))
    write_timeline(tmp_path / "t.json", timeline)
    again = read_timeline(tmp_path / "t.json")
    assert again == timeline
    assert isinstance(again.events[0].kind, Kind)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        ("[", "holds no timeline"),
        ('{"ranks": 1, "events": [[0, "walk", 0, 0, 0, 1]]}', "'walk' is not a valid Kind"),
        ('{"ranks": 1, "events": [[0, "forward", 0, 0, 0]]}', "holds no timeline"),
        ("[]", "holds no timeline"),
        ('{"ranks": 1, "events": [[1, "forward", 0, 0, 0, 1]]}', "has a rank outside 0 to 0"),
        ('{"ranks": 1, "events": [[0, "forward", 0, 0, NaN, 1]]}', "has a time that is not finite"),
        ('{"ranks": 1, "events": [[0, "forward", 0, 0, 0, 1e999]]}', "has a time that is not finite"),
        ('{"ranks": Infinity, "events": []}', "holds no timeline"),
    ],
)
def test_a_file_that_is_no_timeline(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError) as caught:
        read_timeline(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    code, out, _ = command(capsys, monkeypatch, "1f1b", "--stages", 4, "--microbatches", 8, "--output", path)
    assert code == 0
    assert "1f1b, simulated: bubble 37.5% of the computing time, makespan 33" in out
    assert "rank 1: stage 1; bubble 37.5%; peak activations 3" in out
    assert "\nrank 3  ......F0B0--F1B1--" in out
    found = json.loads(path.read_text())
    assert found["bubble"] == pytest.approx(3 / 8)
    assert found["peak_activations"] == [4, 3, 2, 1]
    # `Kind` is a string enum: a kind equals its name.
    assert found["actions"] == [[[*action] for action in actions] for actions in make_schedule("1f1b", 4, 8).actions]


def test_the_command_with_every_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trace, plot = tmp_path / "trace.json", tmp_path / "t.png"
    write_timeline(trace, simulate(make_schedule("gpipe", 2, 2)))
    words = ["interleaved-1f1b", "--stages-per-rank", 3, "--jitter", 0.2, "--link", 0.1, "--blocking", "--seed", 3]
    code, out, _ = command(capsys, monkeypatch, *words, "--measured", trace, "--plot", plot)
    assert code == 0
    assert "rank 0: stages 0, 4, 8; " in out
    assert "the timeline needs more than 100 columns" in out
    assert f"{trace}, measured: bubble 50.0%" in out
    assert plot.stat().st_size > 10_000
    expected = simulate(make_schedule("interleaved-1f1b", 4, 8, 3), Costs(jitter=0.2, link=0.1, blocking=True, seed=3))
    assert f"interleaved-1f1b, simulated: bubble {expected.bubble:.1%}" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["1f1"], "did you mean '1f1b'?"),
        (["interleaved-1f1b", "--microbatches", 3], "use at least 4 smaller microbatches"),
        (["1f1b", "--stages", 0], "0 ranks; give at least one"),
        (["1f1b", "--jitter", -1], "jitter is -1.0; give zero or more"),
        (["1f1b", "--jitter", 0.1, "--seed", -1], "seed is -1; give zero or more"),
        (["1f1b", "--jitter", "nan"], "jitter is nan; give zero or more, and a finite number"),
        (["1f1b", "--link", "inf"], "link is inf; give zero or more, and a finite number"),
        (["1f1b", "--output-layer", "nan"], "output_layer is nan; give zero or more, and a finite number"),
        (["1f1b", "--output-layer", -0.5], "output_layer is -0.5; give zero or more"),
        (["1f1b", "--warmup-factor", "nan"], "the warm-up factor cannot be nan; give a finite number of at least 1"),
        (["1f1b", "--warmup-factor", "inf"], "the warm-up factor cannot be inf"),
        (
            ["1f1b", "--vocabulary-algorithm", 2],
            "--vocabulary-algorithm 2 needs --vocabulary: add it, or leave both out",
        ),
        (["1f1b", "--plot", "t.svg"], "name a .png file"),
        (["1f1b", "--output", "no-such-folder/s.json"], "cannot write no-such-folder/s.json"),
        (["1f1b", "--measured", "no-such-file.json"], "cannot read no-such-file.json"),
    ],
)
def test_the_command_fails_in_one_line(
    words: list[object], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = command(capsys, monkeypatch, *words)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
