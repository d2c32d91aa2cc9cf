"""Names of the nodes excluded from a run, one per line of `excluded.txt` in the run folder."""

import os
from pathlib import Path

from optimus.disk import sync

_FILE = "excluded.txt"


def excluded(run: str | Path) -> list[str]:
    """Returns the names of the nodes that are excluded from `run`."""
    path = Path(run) / _FILE
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    return [name for line in lines if (name := line.strip())]


def exclude(run: str | Path, node: str) -> None:
    """Excludes `node` from later launches of `run`."""
    if node not in excluded(run):
        path = Path(run) / _FILE
        with path.open("a+b") as file:
            # A text editor may have left the last line without a newline.
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            newline = b"" if file.read(1) in (b"", b"\n") else b"\n"
            file.write(newline + f"{node}\n".encode())
        sync(path)
