"""Every run tests enough of swept cases, and the turns of all commits together cover all cases."""

import itertools
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import ways
from helpers.sweep import (
    PARTS,
    TURNS,
    Part,
    chosen,
    commit_number,
    covered,
    in_random_order,
    in_turns,
    limit_time,
    part_of_sweep,
    skip_late,
)

CASES = [
    {"ranks": ranks, "shard": shard, "overlap": overlap}
    for ranks, shard, overlap in itertools.product((1, 2, 4), ("none", "optimizer", "gradients", "parameters"), (0, 1))
]


def test_every_value() -> None:
    found = [CASES[number] for number in covered(CASES)]
    assert len(found) <= 4
    for name in CASES[0]:
        assert {case[name] for case in found} == {case[name] for case in CASES}


def test_every_pair() -> None:
    found = [CASES[number] for number in covered(CASES, together=2)]
    assert {(case["ranks"], case["shard"]) for case in found} == {(case["ranks"], case["shard"]) for case in CASES}
    assert len(found) <= 14


def test_only_what_is_named_is_covered() -> None:
    assert len(covered(CASES, "overlap")) <= 2


@dataclass(eq=False)
class Item:
    """Stands in for pytest's collected test."""

    originalname: str
    number: int
    marks: tuple[tuple[str, Any], ...] = ()
    path: str = "test_file.py"

    @property
    def callspec(self) -> Any:
        return SimpleNamespace(params=CASES[self.number])

    def get_closest_marker(self, name: str) -> Any:
        return dict(self.marks).get(name)


SWEPT = SimpleNamespace(args=(), kwargs={})
ITEMS = [
    Item("plain", 0),
    *(Item("swept", number, (("swept", SWEPT),)) for number in range(len(CASES))),
    *(Item("turns", i, (("in_turn", row.marks[0]),)) for i, row in enumerate(in_turns([*range(6)], 3))),
]


def test_what_has_no_turn_is_run_without_a_sweep_and_the_rest_in_turn() -> None:
    always = chosen(ITEMS, None)
    assert {item.originalname for item in always} == {"plain", "swept"}
    assert {item.number for item in always if item.originalname == "swept"} == covered(CASES)
    turns = [chosen(ITEMS, f"{commit}/{TURNS}") for commit in range(3 * PARTS)]
    assert {*always}.union(*turns) == {*ITEMS} == {*chosen(ITEMS, "all")}
    for begin in range(2 * PARTS):
        assert {*ITEMS} == {item for turn in turns[begin : begin + PARTS] for item in turn}
    for turn in turns:
        assert len([item for item in turn if item.originalname == "turns"]) == 2
        assert len([item for item in turn if item.originalname == "swept" and item not in always]) in (2, 3)
        assert len({*turn} & {*always}) <= 1  # a tenth of tests without turns, in another way than `make test`


def test_rows_and_values_in_turns() -> None:
    rows = in_turns([(1, "a"), (2, "b")], 2)
    assert [row.values for row in rows] == [(1, "a"), (2, "b")]
    assert [row.values for row in in_turns(["ab", [1]])] == [("ab",), ([1],)]
    assert [row.marks[0].args for row in rows] == [(0, 2), (1, 2)]
    some = in_turns([*range(5)], 3, always=2)
    assert [[mark.args for mark in row.marks] for row in some] == [[], [], [(0, 3)], [(1, 3)], [(2, 3)]]


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 10, TURNS])
def test_parts_together_are_all(parts: int) -> None:
    """The parts together are all tests; a commit's tests lie in the reported part, which selects the same tests again."""
    found = [chosen(ITEMS, f"{number}/{parts}") for number in range(parts)]
    assert {*chosen(ITEMS, None)}.union(*found) == {*ITEMS}
    assert part_of_sweep(None) == part_of_sweep("turn") == Part(commit_number() % TURNS, TURNS)
    assert {*chosen(ITEMS, "turn")} <= {*found[commit_number() % TURNS % parts]} or TURNS % parts
    assert chosen(ITEMS, "turn") == chosen(ITEMS, f"{commit_number() % TURNS}/{TURNS}")


@pytest.mark.parametrize("sweep", ["most", "10/10", "-1/10", "a/10", "3/", "/", "1/0", "1.5/3"])
def test_another_sweep_is_refused(
    sweep: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(pytest.UsageError, match=rf"SWEEP={sweep}: (say turn, .* or all|parts are numbered)"):
        chosen(ITEMS, sweep)
    monkeypatch.setenv("SWEEP", sweep)
    if "/" in sweep:
        assert ways.main([sys.executable, "-c", SHOW]) == 2
        assert f"SWEEP={sweep}: parts are numbered" in capfd.readouterr().err


SHOW = "import os, torch; print(torch.backends.cpu.get_cpu_capability(), len(os.sched_getaffinity(0)))"


@pytest.mark.parametrize("way", in_turns(["as-it-is", "avx2", "one-core"], 2, always=1))
def test_the_ways_in_which_tests_run(
    way: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WAY", way)
    assert ways.main([sys.executable, "-c", SHOW]) == 0
    said, found = capfd.readouterr().out.splitlines()
    assert said.startswith(f"{way}: ")
    capability, cores = (
        torch.backends.cpu.get_cpu_capability(),
        1 if way == "one-core" else len(os.sched_getaffinity(0)),
    )
    # Tests may run in a way that emulates a smaller processor.
    expected = {"AVX2"} | {capability} - {"AVX512"} if way == "avx2" else {capability}
    assert found in {f"{each} {cores}" for each in expected}


def test_a_part_is_run_in_each_way_in_turn_and_the_way_is_said(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    names = [ways.name_of_turn(commit) for commit in range(7 * PARTS)]
    assert {*names} == {*ways.ways()}
    assert {(name, commit % PARTS) for commit, name in enumerate(names)} == {*itertools.product(names, range(PARTS))}
    monkeypatch.delenv("WAY", raising=False)
    monkeypatch.setenv("SWEEP", "turn")
    assert ways.main([sys.executable, "-c", "raise SystemExit(3)"]) == 3
    name, number = ways.name_of_turn(commit_number()), commit_number() % TURNS
    said = capfd.readouterr().out
    assert said.startswith(f"{name}: ")
    assert said.endswith(f"; SWEEP={number}/{TURNS} WAY={name} repeats it\n")
    monkeypatch.setenv("WAY", "upside-down")
    assert ways.main([]) == 2
    assert "WAY=upside-down: say one of as-it-is, avx2" in capfd.readouterr().err


def test_a_sweep_has_an_order_of_files_of_its_own() -> None:
    items = [Item("plain", number, path=f"test_{number % 12}.py") for number in range(24)]
    orders = {tuple((item.path, item.number) for item in in_random_order(items, f"{part}/1200")) for part in range(5)}
    assert len(orders) == 5
    for order in orders:
        assert {*order} == {(item.path, item.number) for item in items}
        assert len([*itertools.groupby(path for path, _ in order)]) == 12
        assert all(first < second for (_, first), (_, second) in zip(order[::2], order[1::2]))


@pytest.mark.parametrize(
    ("environment", "ends"),
    [
        ({"SWEEP": "turn", "SWEEP_MINUTES": "-1"}, True),
        ({"SWEEP": "turn", "SWEEP_MINUTES": "5"}, False),
        ({"SWEEP": "turn"}, False),
        ({"SWEEP": "3/10", "SWEEP_MINUTES": "-1"}, False),
    ],
)
def test_a_sweep_ends(environment: dict[str, str], ends: bool) -> None:
    """Only a sweep of turns has an end, after which its tests are skipped."""
    with mock.patch.dict(os.environ, environment):
        for name in {"OPTIMUS_TESTS_SWEEP_ENDS", "SWEEP_MINUTES"} - {*environment}:
            os.environ.pop(name, None)
        limit_time()
        with pytest.raises(pytest.skip.Exception, match="SWEEP_MINUTES") if ends else nullcontext():
            skip_late()
