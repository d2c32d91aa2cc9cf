"""Selects cases for each commit: sweeps with too many, similar or slow cases for every run of the tests.

The marker `swept` keeps a covering array of a test's parameter values. The other cases, cases of `in_turns`, and tests
marked `in_turn` have turns: each commit tests a fraction of them.

SWEEP in the environment selects: unset (`make test`), everything without a turn; `turn` (`make sweep-part`), this
commit's turns and a part of the rest, in one of the ways of tests/lib/ways.py; `3/10`, the fourth of ten parts of all
turns and a tenth of the rest; `all` (`make test-full`), everything.

A sweep of this commit's turns is a sample, and a slow machine takes a smaller one: its files come in random order, and
tests that would begin after SWEEP_MINUTES are skipped, which the end of the run reports.
"""

import itertools
import math
import os
import random
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from helpers.covering import covering

T = TypeVar("T")
PARTS = 10  # parts of the cases outside a covering array
# Commits after which all turns have come: a multiple of every number of commits per turn.
TURNS = 1200
_ENDS = "OPTIMUS_TESTS_SWEEP_ENDS"  # in the environment of all test processes: seconds since the epoch


class Part(NamedTuple):
    """A part of all turns, tested by commits whose number is congruent to `number` modulo `of`."""

    number: int
    of: int

    def has(self, turn: int, of: int) -> bool:
        """Returns whether some commit of the part tests turn `turn` of `of`."""
        assert TURNS % of == 0, f"choose a divisor of {TURNS}, not {of}"
        return (turn - self.number) % math.gcd(of, self.of) == 0


def part_of_sweep(sweep: str | None) -> Part:
    """Returns the part that a value of SWEEP names, by default this commit's."""
    number, slash, of = (sweep or "").partition("/")
    if not slash:
        return Part(commit_number() % TURNS, TURNS)
    if not (number.isdecimal() and of.isdecimal() and int(number) < int(of)):
        raise pytest.UsageError(f"SWEEP={sweep}: parts are numbered from 0/{of} to one less than {of}/{of}")
    return Part(int(number), int(of))


def limit_time() -> None:
    """Sets the end of a sweep of this commit's turns: SWEEP_MINUTES from now, or 12."""
    if os.environ.get("SWEEP") == "turn":
        os.environ[_ENDS] = str(time.time() + 60 * float(os.environ.get("SWEEP_MINUTES", "12")))


def skip_late() -> None:
    """Skips the test if the time of the sweep is over."""
    if time.time() > float(os.environ.get(_ENDS, "inf")):
        pytest.skip("begins after SWEEP_MINUTES, the time of a sweep")


def in_random_order(items: list[Any], sweep: str | None) -> list[Any]:
    """Returns the tests with their files in this commit's order."""
    files = list(dict.fromkeys(item.path for item in items))
    random.Random(part_of_sweep(sweep).number).shuffle(files)
    return sorted(items, key=lambda item: files.index(item.path))


def in_turns(cases: Sequence[Any], commits: int = PARTS, always: int = 0) -> list[Any]:
    """Returns the cases for `parametrize`; a commit tests one in `commits`, except the first `always`, which have no
    turn."""
    rows = [case if type(case) is tuple else (case,) for case in cases]
    turns = [pytest.mark.in_turn(number % commits, commits) for number in range(len(rows) - always)]
    return [pytest.param(*row, marks=marks) for row, marks in zip(rows, [*[()] * always, *turns])]


def part_of(cases: Sequence[T], parts: int = PARTS) -> Sequence[T]:
    """Returns this commit's part of the cases within one test, one in `parts`; all cases in a sweep of all."""
    sweep = os.environ.get("SWEEP")
    return cases if sweep == "all" else part(cases, parts, part_of_sweep(sweep))


def part(cases: Sequence[T], parts: int, here: Part) -> Sequence[T]:
    """Returns the cases of a part."""
    return [case for number, case in enumerate(cases) if here.has(number % parts, parts)]


def chosen(items: Sequence[Any], sweep: str | None) -> list[Any]:
    """Returns the collected tests that this value of SWEEP selects; see `swept` and `in_turn` in pyproject.toml."""
    if sweep not in (None, "turn", "all") and "/" not in sweep:
        raise pytest.UsageError(
            f"SWEEP={sweep}: say turn, for what this commit has in turn, a part such as 3/10, or all"
        )
    if sweep == "all":
        return [*items]
    own = part_of_sweep(sweep)
    by_function: dict[Any, list[Any]] = {}
    having, here = set[Any](), set[Any]()  # tests with a turn; this commit's tests
    for item in items:
        if (turn := item.get_closest_marker("in_turn")) is not None:
            having.add(item)
            here |= {item} if own.has(*turn.args) else set()
        elif item.get_closest_marker("swept") is not None:
            by_function.setdefault((item.path, item.originalname), []).append(item)
    for cases in by_function.values():
        mark = cases[0].get_closest_marker("swept")
        values = [{name: repr(value) for name, value in case.callspec.params.items()} for case in cases]
        always = covered(values, *mark.args, **mark.kwargs)
        others = [case for number, case in enumerate(cases) if number not in always]
        having |= {*others}
        here |= {*part(others, PARTS, own)}
    rest = [item for item in items if item not in having]
    here |= {*part(rest, PARTS, own)}
    return [item for item in items if item in here] if sweep else rest


def covered(cases: Sequence[Mapping[str, Any]], *names: str, together: int = 1) -> set[int]:
    """Returns the indices of cases in a covering array of all values of the parameters `names` (by default all), or of
    all existing combinations of `together` values."""
    asked = [[(name, case[name]) for name in names or sorted(case)] for case in cases]
    return {*covering([[*itertools.combinations(values, min(together, len(values)))] for values in asked])}


@cache
def commit_number() -> int:
    """Returns the number of the commit, or 0 without git."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return int(subprocess.run(git, capture_output=True, text=True, check=True).stdout, 16)
    except (OSError, subprocess.CalledProcessError):
        return 0
