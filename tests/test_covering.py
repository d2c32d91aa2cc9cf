"""Covering arrays are nearly as small as known optimal ones."""

import itertools
import random

from helpers.covering import covering


def pairs(case: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    return list(itertools.combinations(enumerate(case), 2))


def test_pairs_of_many_options_need_few_cases() -> None:
    """All pairs of seven options with two values need 6 of 128 cases at least (Kleitman and Spencer 1973); the greedy
    choice takes at most 8."""
    cases = list(itertools.product(range(2), repeat=7))
    chosen = covering([pairs(case) for case in cases])
    assert {pair for index in chosen for pair in pairs(cases[index])} == {
        pair for case in cases for pair in pairs(case)
    }
    assert 6 <= len(chosen) <= 8


def test_all_that_some_case_meets_is_met() -> None:
    choice = random.Random(0)
    cases = [[choice.randrange(300) for _ in range(choice.randrange(20))] for _ in range(500)]
    chosen = covering(cases)
    assert {element for index in chosen for element in cases[index]} == {element for case in cases for element in case}
    assert chosen == covering(cases)
    assert len(set(chosen)) == len(chosen) < 100


def test_nothing_needs_no_case() -> None:
    assert covering([]) == covering([[], []]) == []
