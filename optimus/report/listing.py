"""Lists the runs in a folder and its subfolders."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from optimus.copies import local_runs
from optimus.disk import printable, user_path
from optimus.errors import UserError, naming_read_errors, nearest
from optimus.report.folder import is_run, read_folder
from optimus.report.page import facts

_DEPTH = 4  # levels of subfolders in which `runs` searches
STATES = ("running", "finished", "stopped", "failed")  # states of a run whose folder is readable
COLUMNS = (
    "name", "state", "step", "steps", "loss", "bits_per_byte", "tokens_per_second", "parameters", "model", "why",
)  # fmt: skip


def runs(
    folder: str | Path, *, state: str | None = None, match: str | None = None, sort: str = "name", reverse: bool = False
) -> list[dict[str, Any]]:
    """Lists the runs in `folder` and in up to four levels of subfolders.

    Each run is a dictionary with the keys `name`, `state`, `step`, `steps`, `loss`, `bits_per_byte`,
    `tokens_per_second`, `parameters`, `model`, `why`, `tokens`, `path` and `skipped_lines`. `state` selects runs that
    are running, finished, stopped, failed or unreadable. `match` selects runs whose path or model contains this text.
    The result is in the order of the column `sort`, with NaN, infinite and missing values at the end.

    Example:
        [(run["name"], run["loss"]) for run in api.runs("runs", state="finished")]
    """
    root = user_path(local_runs(folder))
    known = (*STATES, "unreadable")
    if state is not None and state not in known:
        raise UserError(f"--state {state}: {nearest(state, known)}")
    if sort not in COLUMNS:
        raise UserError(f"--sort {sort}: {nearest(sort, COLUMNS)}")
    if not root.is_dir():
        raise UserError(f"{root} is not a folder: name a folder that contains run folders")
    rows = [_row(path, root) for path in _run_folders(root, _DEPTH)]
    if not rows:
        raise UserError(
            f"{root} contains no run folder, which is the train.output of a run and has a metrics.jsonl: name another folder"
        )
    chosen = [row for row in rows if state in (None, row["state"]) and _matches(row, match)]
    there, missing = [r for r in chosen if r[sort] is not None], [r for r in chosen if r[sort] is None]
    there.sort(key=lambda row: (isinstance(row[sort], str), row[sort]), reverse=reverse)
    # NaN and infinity are strings in `rows`, and come after the numbers.
    return [*sorted(there, key=lambda row: isinstance(row[sort], str)), *missing]


def table_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns rows for a printed table: merges `steps` into `step`, and `why` into `state`."""
    shown = []
    for row in rows:
        step = f"{row['step']:,}" + (f" of {row['steps']:,}" if row["steps"] is not None else "")
        rest = {key: row[key] for key in COLUMNS if key not in ("name", "state", "step", "steps", "why")}
        state = row["state"] + (f": {row['why']}" if row["why"] else "")
        shown.append({"run": row["name"], "step": step, **rest, "state": state})
    return shown


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    try:
        if is_run(folder):
            yield folder
            return
        inside = sorted(folder.iterdir()) if depth else []
    except OSError:  # `_row` reports the folder as unreadable
        yield folder
        return
    for path in inside:
        if path.is_dir() and not path.is_symlink():
            yield from _run_folders(path, depth - 1)


def _row(path: Path, root: Path) -> dict[str, Any]:
    below = path.relative_to(root).as_posix()
    name = printable(path.resolve().name if below == "." else below)
    about: dict[str, Any] = {"name": name, "path": printable(str(path))}
    try:
        with naming_read_errors(path):
            run = read_folder(path)
        state, why = run.state
        about |= {**facts(run), "state": state, "why": printable(why), "skipped_lines": run.skipped_lines}
    except UserError as error:
        about |= {"state": "unreadable", "step": 0, "why": printable(str(error)), "skipped_lines": {}}
    return {key: about.get(key) for key in (*COLUMNS, "tokens", "path", "skipped_lines")}


def _matches(row: dict[str, Any], match: str | None) -> bool:
    return match is None or match in row["path"] or match in (row["model"] or "")
