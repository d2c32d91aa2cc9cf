"""Time to target: the whole command for a few steps, and its statistics on curves made by hand."""

import math
from pathlib import Path

import pytest

from benchmarks import time_to_target
from benchmarks.time_to_target import (
    CONTESTANTS,
    MODELS,
    QUICK,
    Curve,
    found_of,
    profile,
    rates,
    read_text,
    settings_of,
    versus,
)
from optimus.config import load_config
from optimus.errors import UserError


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {number} of {number % 7} words\n" for number in range(4000)))
    return path


@pytest.mark.in_turn(1, 5)
def test_rows_ratios_and_profiles(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call takes the saved runs from the file, trains nothing and gives the same result."""
    kept = tmp_path / "runs.jsonl"
    found = time_to_target.run(text, kept, quick=True)
    rows, ratios, profiles = found.rows, found.ratios, found.more["profiles"]
    assert [(row["model"], row["contestant"]) for row in rows] == [(m, name) for m in MODELS for name in CONTESTANTS]
    expected = {
        f"{name}.{model}.{kind}_vs_adamw"
        for name in ("muon", "lion", "schedule_free", "wsd")
        for model in ("dense", "moe")
        for kind in ("tokens", "seconds")
    }
    assert ratios.keys() == expected
    for row in rows:
        assert row["learning_rate"] == rates(CONTESTANTS[row["contestant"]], row["model"])[row["of_five"] - 1]
        assert (row["tokens"] is None) == (row["reached"] == 0)
        if row["contestant"] == "adamw":
            assert row["tokens"] <= QUICK.steps * time_to_target.BATCH * time_to_target.CONTEXT
            assert row["tokens_vs_adamw"] == row["seconds_vs_adamw"] == 1
    assert profiles.keys() == {"tokens", "seconds"}
    assert len(kept.read_text().splitlines()) == len(MODELS) * len(CONTESTANTS) * 5 * QUICK.seeds
    monkeypatch.setattr(time_to_target, "train", None)
    assert time_to_target.run(text, kept, quick=True) == found


def test_runs_of_a_seed_have_the_same_beginning_and_repeat(text: Path) -> None:
    read = read_text(text, QUICK.held_out)

    def losses(name: str, seed: int = 0) -> list[float]:
        settings = settings_of("dense", CONTESTANTS[name], 1e-3, seed, QUICK)
        return time_to_target.train(load_config(settings), read, QUICK.every).losses

    adamw, muon, other = losses("adamw"), losses("muon"), losses("adamw", seed=1)
    assert losses("adamw") == adamw
    assert muon[0] == adamw[0] != other[0]
    assert muon[-1] < muon[0]
    assert muon[-1] != adamw[-1]


def test_measuring_changes_nothing(text: Path) -> None:
    """Validation changes no loss, even where the evaluated weights differ from the trained ones (schedule-free AdamW)."""
    read = read_text(text, QUICK.held_out)
    settings = settings_of("dense", CONTESTANTS["schedule_free"], 1e-3, 0, QUICK)
    often, seldom = (time_to_target.train(load_config(settings), read, every).losses for every in (1, 2))
    assert often[::2] == seldom


def test_held_out_sequences_are_not_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number:15d}\n" for number in range(20_000)))  # all sequences are different
    read = read_text(path, held_out=20)
    assert read.held_out_NS.shape == (20, 128)
    trained = {bytes(row) for row in read.train_NS.numpy()}
    assert not trained & {bytes(row) for row in read.held_out_NS.numpy()}
    with pytest.raises(UserError, match=r"320,000 bytes of text are too few: give at least 1,310,720"):
        read_text(path, held_out=500)


def test_tokens_to_a_target() -> None:
    curve = Curve([0, 100, 200, 300], [5.0, 3.0, 3.5, 2.0], 1.0)
    assert curve.reaches(4.0) == 50
    assert curve.reaches(3.0) == 100
    assert curve.reaches(2.75) == 250
    assert math.isinf(curve.reaches(1.9))


def test_the_best_rate_is_that_of_the_fewest_tokens() -> None:
    """The best rate needs the fewest tokens; the lowest final loss decides for the baseline and where no rate reaches
    the targets."""
    ends = {"adamw": [4.0, 3.5, 3.0, 3.2, 5.0], "muon": [2.0, 2.5, 2.6, 2.7, 2.8], "lion": [4.0, 3.9, 3.1, 3.3, 3.4]}
    middles = {"adamw": 4.5, "muon": 3.3, "lion": 4.5}
    curves = {
        ("dense", name, rate, seed): Curve([0, 50, 100], [6.0, middles[name] - 0.1 * place, end], 1.0 + place)
        for name, by_rate in ends.items()
        for place, (rate, end) in enumerate(zip(rates(CONTESTANTS[name], "dense"), by_rate))
        for seed in range(3)
    }
    adamw = found_of(curves, "dense", "adamw", None)
    assert (adamw.place, adamw.final, adamw.tokens) == (3, [3.0] * 3, [100.0] * 3)
    muon, lion = (found_of(curves, "dense", name, adamw.final) for name in ("muon", "lion"))
    # At rate 5 the loss reaches 2.9 after 50 tokens, before all other rates, though others end lower.
    assert (muon.place, muon.final) == (5, [2.8] * 3)
    assert muon.tokens == pytest.approx([50 * 3.0 / 3.1] * 3)
    assert muon.step_seconds == 1.0  # the least over all rates
    assert (lion.place, lion.tokens) == (3, [math.inf] * 3)


def test_profile() -> None:
    needed = {
        ("dense", "adamw"): [100.0, 100.0],
        ("dense", "fast"): [50.0, math.inf],
        ("moe", "adamw"): [120.0, 300.0],
        ("moe", "fast"): [100.0, 100.0],
    }
    adamw, fast = profile(needed)
    shares = ("within_1", "within_1.1", "within_1.25", "within_1.5", "within_2")
    assert [adamw[tau] for tau in shares] == [0.25, 0.25, 0.5, 0.5, 0.75]
    assert [fast[tau] for tau in shares] == [0.75] * 5
    assert adamw["area"] == pytest.approx((2 / 3 + 1 + 2.8 / 3 + 1 / 3) / 4)
    assert fast["area"] == pytest.approx(0.75)
    assert versus(needed)["moe", "fast"] == pytest.approx([100 / 120, 1 / 3])
