"""The program `optimus`: all commands, in the order of its help."""

import io
import sys

from optimus.cli.common import app, with_options
from optimus.disk import printable
from optimus.errors import UserError

# isort: off
from optimus.cli import data, train, evaluate, checkpoint, launch, config, plan, runs, bench

_GROUPS = (data, train, evaluate, checkpoint, launch, config, plan, runs, bench)  # each adds its own as it is imported


def main() -> None:
    """Entry point: a `UserError` is one line and exit code 2, never a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a folder's name need not be Unicode; stderr does so by itself
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except UserError as error:
        # A name in it must not command the terminal.
        said = printable(with_options(str(error)), keep="\n\t")
        sys.stderr.write(f"error: {said}\n")  # at once: other ranks write there too
        sys.exit(error.code)
