"""Cases of which each commit tests a part: too many for every run of the tests, and alike, or long.

Of cases that pytest makes of several parameters, the marker `swept` keeps a covering array, which has each value of each
parameter. The others, those of `in_turns`, and tests that are marked `in_turn` have turns: each commit tests one in so many.
SWEEP in the environment says what is run: without it, as `make test` does, whatever has no turn; `turn` (`make sweep-part`)
what this commit has, and a part of the rest, as another machine would run it (tests/lib/ways.py); `all` (`make sweep`) all.
"""

import itertools
import os
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

from helpers.covering import covering

T = TypeVar("T")
PARTS = 10  # of what no covering array has


def in_turns(cases: Sequence[Any], commits: int = PARTS, always: int = 0) -> list[Any]:
    """For `parametrize`: the cases, of which a commit tests one in so many; the first `always` have no turn."""
    rows = [case if type(case) is tuple else (case,) for case in cases]
    turns = [pytest.mark.in_turn(number % commits, commits) for number in range(len(rows) - always)]
    return [pytest.param(*row, marks=marks) for row, marks in zip(rows, [*[()] * always, *turns])]


def part_of(cases: Sequence[T], parts: int = PARTS) -> Sequence[T]:
    """Of what one test goes through, this commit's part: one in so many, others with each commit; all in a sweep of all."""
    return cases if os.environ.get("SWEEP") == "all" else part(cases, parts, commit_number())


def part(cases: Sequence[T], parts: int, commit: int) -> Sequence[T]:
    """Those that a commit tests."""
    return cases[commit % parts :: parts]


def chosen(items: Sequence[Any], sweep: str | None, commit: int | None = None) -> list[Any]:
    """Of the collected tests those that this value of SWEEP asks for: see `swept` and `in_turn` in pyproject.toml."""
    if sweep not in (None, "turn", "all"):
        raise pytest.UsageError(f"SWEEP={sweep}: say turn, for what this commit has in turn, or all")
    if sweep == "all":
        return [*items]
    commit = commit_number() if commit is None else commit
    by_function: dict[Any, list[Any]] = {}
    having, here = set[Any](), set[Any]()  # a turn; and this commit's
    for item in items:
        if (turn := item.get_closest_marker("in_turn")) is not None:
            having.add(item)
            here |= {item} if commit % turn.args[1] == turn.args[0] else set()
        elif item.get_closest_marker("swept") is not None:
            by_function.setdefault((item.path, item.originalname), []).append(item)
    for cases in by_function.values():
        mark = cases[0].get_closest_marker("swept")
        values = [{name: repr(value) for name, value in case.callspec.params.items()} for case in cases]
        always = covered(values, *mark.args, **mark.kwargs)
        others = [case for number, case in enumerate(cases) if number not in always]
        having |= {*others}
        here |= {*part(others, PARTS, commit)}
    rest = [item for item in items if item not in having]
    here |= {*part(rest, PARTS, commit)}
    return [item for item in items if item in here] if sweep else rest


def covered(cases: Sequence[Mapping[str, Any]], *names: str, together: int = 1) -> set[int]:
    """Numbers of the cases of a covering array: it has every value of the parameters `names`, by default of all; of so many
    `together`, where some case has them."""
    asked = [[(name, case[name]) for name in names or sorted(case)] for case in cases]
    return {*covering([[*itertools.combinations(values, min(together, len(values)))] for values in asked])}


@cache
def commit_number() -> int:
    """Its number; without git 0."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return int(subprocess.run(git, capture_output=True, text=True, check=True).stdout, 16)
    except (OSError, subprocess.CalledProcessError):
        return 0
