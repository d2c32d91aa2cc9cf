"""The program `optimus`."""

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
)  # each module registers its commands when imported


def main() -> None:
    """Runs the program, and prints a `UserError` without a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # the name of a folder can be invalid Unicode
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except UserError as error:
        # A file name in the message must not control the terminal.
        said = printable(with_options(str(error)), keep="\n\t")
        sys.stderr.write(f"error: {said}\n")  # a single write, because other ranks write to the same terminal
        sys.exit(error.code)
