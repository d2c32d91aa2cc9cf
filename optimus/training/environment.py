"""Records a run's starts in the run folder. `config.yaml` and `decisions.yaml` belong to the latest start, and
`environment.jsonl` has a line for each start. Do not record environment variables, which may hold secrets."""

import json
import platform
import subprocess
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from itertools import chain, count
from pathlib import Path
from typing import Any

import psutil
import yaml

from optimus.config import dump_config
from optimus.errors import naming_disk_errors
from optimus.model.count import count_parameters
from optimus.observe.machine import describe_machine, device_name, versions
from optimus.plugins import load_plugins
from optimus.training.collectives import keep
from optimus.training.run import Run

_GIT_SECONDS = 10.0


def record_start(run: Run, step: int) -> None:
    """Writes the configuration, decisions and any measurements of collectives; appends a line to `environment.jsonl`.

    Renames the file of an earlier, different configuration. Raises `UserError` when a file cannot be written.
    """
    path, text = run.folder / "config.yaml", dump_config(run.resolved.record)
    with naming_disk_errors(path, "Make room or choose another train.output"):
        run.folder.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.read_bytes() != text.encode():
            names = (f"config.until-step-{step}{more}.yaml" for more in chain([""], (f"-{n}" for n in count(2))))
            path.rename(next(earlier for name in names if not (earlier := path.with_name(name)).exists()))
        path.write_text(text, encoding="utf-8")
        decisions = [decision.written for decision in run.resolved.decisions]
        (run.folder / "decisions.yaml").write_text(yaml.safe_dump(decisions, sort_keys=False), encoding="utf-8")
        keep(run.groups.measured, run.folder)
    _record_environment(run, step)


def _record_environment(run: Run, step: int) -> None:
    path, mesh, counted = run.folder / "environment.jsonl", run.groups.mesh, count_parameters(run.config.model)
    record = {
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "step": step,
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
        "plugins": [asdict(plugin) for plugin in load_plugins(run.config.plugins)],
    }
    with naming_disk_errors(path, "Make room or choose another train.output"), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def command_line() -> list[str]:
    """Returns the command line of this process, or of its parent if the library's launcher started this rank."""
    process = psutil.Process()
    parent = process.parent() if hasattr(sys.modules["__main__"], "run_as_rank") else None
    return (parent or process).cmdline()


def git_commit(folder: Path) -> dict[str, Any] | None:
    """Returns a mapping with `commit` and `clean` for the checkout that contains `folder`, or None if git names no
    commit. `clean` is True if no tracked file differs from the commit, and None if git cannot tell."""
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None else {"commit": commit, "clean": None if changes is None else changes == ""}


def _package_commit() -> dict[str, Any] | None:
    """Returns the commit of this library, like `git_commit`; None if git does not track the library's files."""
    file = Path(sys.modules["optimus"].__file__ or "")
    return None if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None else git_commit(file.parent)


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=_GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
