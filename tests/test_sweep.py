"""Of cases that are swept each commit tests enough, and all commits together test all."""

import itertools

from helpers.sweep import PARTS, swept

CASES = [
    {"ranks": ranks, "shard": shard, "overlap": overlap}
    for ranks, shard, overlap in itertools.product((1, 2, 4), ("none", "optimizer", "gradients", "parameters"), (0, 1))
]


def test_every_value_every_time() -> None:
    for commit in range(PARTS):
        found = [CASES[number] for number in swept(CASES, commit=commit)]
        assert len(found) <= 4 + 2
        for name in CASES[0]:
            assert {case[name] for case in found} == {case[name] for case in CASES}


def test_every_pair_every_time() -> None:
    found = [CASES[number] for number in swept(CASES, together=2, commit=3)]
    assert {(case["ranks"], case["shard"]) for case in found} == {(case["ranks"], case["shard"]) for case in CASES}
    assert len(found) <= 14 + 1


def test_only_what_is_named_is_covered() -> None:
    assert len(swept(CASES, "overlap", commit=0)) <= 2 + 3


def test_every_case_has_its_turn() -> None:
    assert set().union(*(swept(CASES, commit=commit) for commit in range(PARTS))) == {*range(len(CASES))}
