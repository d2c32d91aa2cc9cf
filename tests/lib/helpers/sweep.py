"""Cases of which each commit tests a part: too many for every run of the tests, and alike."""

import os
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def part_of(cases: Sequence[T], parts: int) -> Sequence[T]:
    """One in `parts` of the cases, others with each commit; all with SWEEP in the environment, as `make sweep` has it."""
    return cases if os.environ.get("SWEEP") else part(cases, parts, _commit())


def part(cases: Sequence[T], parts: int, commit: int) -> Sequence[T]:
    """Those that a commit tests."""
    return cases[commit % parts :: parts]


@cache
def _commit() -> int:
    """Its number; without git 0."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return int(subprocess.run(git, capture_output=True, text=True, check=True).stdout, 16)
    except (OSError, subprocess.CalledProcessError):
        return 0
