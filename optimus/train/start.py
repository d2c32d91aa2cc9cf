"""Where training starts: what a run is to do is read before torch is imported, so a mistake in it costs no waiting."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from optimus.config import RunConfig
from optimus.errors import UserError
from optimus.train.reading import read_run


def train(
    config: str | Path | Mapping[str, Any] | RunConfig,
    overrides: Iterable[str] = (),
    *,
    ranks: int | None = None,
    resume: bool = False,
    check: bool = False,
) -> dict[str, Any]:
    """Train as `config` (a YAML file, a mapping or a `RunConfig`) says; returns a summary of the run.

    `ranks` processes on this machine share every global batch (default: as many as `parallel` asks for); under a launcher
    that sets WORLD_SIZE, such as torchrun, this process is one of its ranks. `resume` continues from the newest checkpoint
    in `train.output`. `check` validates everything, every checksum of the data included, and runs nothing.

    Raises `UserError` for anything that the user can mend, before any process is started wherever that is possible; it is a
    `HeldError` when another run holds the folder. When another rank is lost under such a launcher, it is a
    `CollectiveError`, after which this process cannot train again: it ignores SIGTERM, by which the launcher would cut the
    message short, and exits with code 75 without waiting for anything.

    Ranks are programs of their own: a script needs no `__main__` guard.

    Example:
        optimus.train("first.yaml", ["train.steps=500"], ranks=2)
        optimus.train("first.yaml", ["train.steps=500"], ranks=2, resume=True)["loss"]
    """
    if ranks is not None and ranks < 1:
        raise UserError(f"`ranks` is {ranks}: a run has at least 1 rank")
    tree, shards = read_run(config, overrides, resume=resume)
    from optimus.train.launch import run_here

    return run_here(tree, shards, ranks, resume=resume, check=check)
