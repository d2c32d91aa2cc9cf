"""The program `optimus`: all commands, in the order of its help."""

import io
import sys

from optimus.cli.common import app, with_options
from optimus.disk import printable
from optimus.errors import UserError

# isort: off
from optimus.cli import data, train, evaluate, checkpoint, launch, config, plan, runs, bench

_GROUPS = (
    data,
    train,
    evaluate,
    checkpoint,
    launch,
    config,
    plan,
    runs,
    bench,
)  # each registers its commands when imported


def main() -> None:
    """Runs the program; a `UserError` becomes one line and its exit code (2 by default), never a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # folder names need not be Unicode; stderr escapes by default
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except UserError as error:
        # A name in the message must not send commands to the terminal.
        said = printable(with_options(str(error)), keep="\n\t")
        sys.stderr.write(f"error: {said}\n")  # a single write: other ranks write there too
        sys.exit(error.code)
