"""Does units of work that several processes share through a folder.

A unit is done once its result exists. A process claims a unit with a file lock, which ends with the process. Units are
deterministic and replace their results atomically, so it does no harm if two processes do the same unit.
"""

import fcntl
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimus.data.helpers import Served
from optimus.disk import parse_json
from optimus.errors import UserError

CLAIMS = "claims"
PATIENCE = 60.0  # seconds after which a process also does a unit that another process has claimed
_PAUSE = 0.2  # seconds between looks at the claims of others


class WorkUnit(NamedTuple):
    result: Path
    arguments: tuple[Any, ...]  # the function's, in a helper process


class EndedElsewhereError(Exception):
    """Raised when another process has finished the output."""


def do_units(
    folder: Path,
    units: Sequence[WorkUnit],
    function: Served,
    first: int = 0,
    is_finished: Callable[[], bool] = lambda: False,
    done: Callable[[WorkUnit], None] = lambda unit: None,
) -> None:
    """Does the missing units in helper processes that serve `function`, and waits for the units of other processes.

    Begins with unit number `first`, and calls `done` after each unit. Raises `EndedElsewhereError` if `is_finished`
    becomes true.
    """
    missing = [unit for unit in [*units[first:], *units[:first]] if not unit.result.exists()]
    if not missing:
        return
    (folder / CLAIMS).mkdir(exist_ok=True)
    with ExitStack() as claims:
        running, patience = dict[Future[Any], tuple[WorkUnit, ExitStack]](), time.monotonic() + PATIENCE
        while missing or running:
            if is_finished():
                raise EndedElsewhereError
            claimed = None
            for unit in [*missing] if len(running) < function.count else ():
                if unit.result.exists():  # by another process
                    missing.remove(unit)
                    done(unit)
                elif (claim := _claim(_claim_of(folder, unit), time.monotonic() > patience)) is not None:
                    claimed = unit, claims.enter_context(claim)
                    break
            if claimed is not None:
                missing.remove(claimed[0])
                running[function.submit(*claimed[0].arguments)] = claimed
                patience = time.monotonic() + PATIENCE
            elif running:
                wait(running, _PAUSE, FIRST_COMPLETED)
            elif missing:
                time.sleep(_PAUSE)
            for future in [future for future in running if future.done()]:
                unit, claim = running.pop(future)
                _take(future, unit)
                claim.close()
                done(unit)


def _claim_of(folder: Path, unit: WorkUnit) -> Path:
    """Returns the lock of a unit. Results of the same name in the folders of several tasks are separate units."""
    return folder / CLAIMS / "-".join(unit.result.relative_to(folder).parts)


@contextmanager
def naming_damage(path: Path, marker: Path) -> Iterator[None]:
    """Raises `UserError` if the block finds that the file at `path` is damaged. Without `marker`, the next call does the
    unit again."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing. Delete {marker} and run again.") from error
    except (ValueError, TypeError, KeyError, AttributeError, EOFError) as error:
        raise UserError(f"{path} is damaged ({error}). Delete {marker} and run again.") from error


def read_marker(path: Path, *names: str) -> list[int]:
    """Returns the numbers of these names in the JSON file that ends a unit. Raises `UserError` for a damaged file."""
    with naming_damage(path, path):
        stored = parse_json(path.read_bytes())
        return [int(stored[name]) for name in names]


def read_array(path: Path, marker: Path) -> NDArray[Any]:
    """Opens an array that the unit with this `marker` wrote. Raises `UserError` for a damaged file."""
    with naming_damage(path, marker):
        return np.load(path, mmap_mode="r")


def _take(future: "Future[Any]", unit: WorkUnit) -> None:
    """Raises the exception of a failed unit, unless another process has done it and gone on."""
    try:
        future.result()
    except (UserError, OSError):
        if not unit.result.exists():
            raise


def _claim(path: Path, anyway: bool) -> ExitStack | None:
    """Claims a unit until the result is closed. Returns None if another process has claimed it, unless `anyway`."""
    with ExitStack() as stack:
        file = stack.enter_context(path.open("w"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not anyway:
                return None
        return stack.pop_all()
