"""The end of a test run reports skipped tests and their reasons."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.sweep import in_turns

TESTS = """
import pytest

@pytest.mark.skipif(True, reason="no accelerator here")
def test_decorated(): ...

@pytest.mark.parametrize("number", range(3))
def test_busy(number):
    if number:
        pytest.skip("this machine is too busy")
"""
MODULE = """
import pytest

pytest.skip("nothing to import", allow_module_level=True)
"""


@pytest.mark.parametrize("workers", in_turns(["0", "2"], 2, always=1))
def test_skips_are_counted_by_reason(workers: str, tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_module.py").write_text(MODULE)
    words = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-c", os.devnull, "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "--numprocesses", workers, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).with_name("lib"))},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    first = lines.index("skipped: 4, by reason:")
    assert lines[first + 1] == "     2  this machine is too busy"
    assert set(lines[first + 2 : first + 4]) == {"     1  no accelerator here", "     1  nothing to import"}
