"""Cases of which each commit tests a part: too many for every run of the tests, and alike.

Of a list of cases, `part_of` gives a part. Of cases that pytest makes of several parameters, the marker `swept` keeps a
covering array, which has each value of each parameter, and of the others a part. Long tests that are alike are marked
`in_turn`. SWEEP in the environment, as `make sweep` has it, keeps all.
"""

import itertools
import os
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from helpers.covering import covering

T = TypeVar("T")
PARTS = 10  # of what no covering array has


def part_of(cases: Sequence[T], parts: int = PARTS) -> Sequence[T]:
    """One in `parts` of the cases, others with each commit; all with SWEEP in the environment."""
    return cases if os.environ.get("SWEEP") else part(cases, parts, _commit())


def part(cases: Sequence[T], parts: int, commit: int) -> Sequence[T]:
    """Those that a commit tests."""
    return cases[commit % parts :: parts]


def without_other_parts(items: list[Any]) -> list[Any]:
    """Of the collected tests, those of this commit: see the markers `swept` and `in_turn` in pyproject.toml."""
    if os.environ.get("SWEEP"):
        return items
    by_function: dict[Any, list[Any]] = {}
    left_out: set[Any] = set()
    for item in items:
        if item.get_closest_marker("swept") is not None:
            by_function.setdefault((item.path, item.originalname), []).append(item)
        turn = item.get_closest_marker("in_turn")
        if turn is not None and _commit() % turn.args[1] != turn.args[0]:
            left_out.add(item)
    for cases in by_function.values():
        mark = cases[0].get_closest_marker("swept")
        values = [{name: repr(value) for name, value in case.callspec.params.items()} for case in cases]
        left_out |= {*cases} - {cases[number] for number in swept(values, *mark.args, **mark.kwargs, commit=_commit())}
    return [item for item in items if item not in left_out]


def swept(cases: Sequence[Mapping[str, Any]], *names: str, together: int = 1, commit: int) -> set[int]:
    """Numbers of the cases that a commit tests: a covering array, and one in `PARTS` of the others.

    The array has every value of the parameters `names`, by default of all; of so many `together`, where some case has them.
    """
    asked = [[(name, case[name]) for name in names or sorted(case)] for case in cases]
    chosen = {*covering([[*itertools.combinations(values, min(together, len(values)))] for values in asked])}
    return chosen | {*part([number for number in range(len(cases)) if number not in chosen], PARTS, commit)}


@cache
def _commit() -> int:
    """Its number; without git 0."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return int(subprocess.run(git, capture_output=True, text=True, check=True).stdout, 16)
    except (OSError, subprocess.CalledProcessError):
        return 0
