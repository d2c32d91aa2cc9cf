"""What a run ran on and what of: a line of `environment.jsonl` in its folder for every start and resume.

Nothing of the environment's variables is recorded: they may hold secrets.
"""

import json
import platform
import subprocess
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

from optimus.errors import naming_disk_errors
from optimus.model.count import count_parameters
from optimus.observe.machine import describe_machine, device_name, versions
from optimus.training.run import Run

_GIT_SECONDS = 10.0


def record_environment(run: Run) -> None:
    """Append the record of this start. On rank 0, whose host and devices it has. Raises `UserError` on a full disk."""
    path, mesh, counted = run.folder / "environment.jsonl", run.groups.mesh, count_parameters(run.config.model)
    record = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "step": run.step,
        "command": command_line(),
        "folder": str(Path.cwd()),
        "versions": versions("numpy", "tokenizers", "safetensors", "triton"),
        "git": {"optimus": _package_commit(), "folder": git_commit(Path.cwd())},
        "host": platform.node(),
        "machine": describe_machine(),
        "device": device_name(run.device),
        "parameters": counted.total,
        "active_parameters": counted.active,
        "tokenizer": run.data.first_folder.index["tokenizer"].get("sha256"),
        "ranks": mesh.size,
        "layout": asdict(mesh),
    }
    with naming_disk_errors(path, "Make room or choose another train.output"), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def command_line() -> list[str]:
    """What was run: this process, or for a rank that our launcher started, the launcher."""
    process = psutil.Process()
    parent = process.parent() if hasattr(sys.modules["__main__"], "run_as_rank") else None
    return (parent or process).cmdline()


def git_commit(folder: Path) -> dict[str, Any] | None:
    """`commit` of the checkout that `folder` is in, and whether it is `clean`: no tracked file differs; None without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None else {"commit": commit, "clean": None if changes is None else changes == ""}


def _package_commit() -> dict[str, Any] | None:
    """Of this library; None where it is installed, perhaps within somebody's checkout."""
    file = Path(sys.modules["optimus"].__file__ or "")
    return None if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None else git_commit(file.parent)


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=_GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
