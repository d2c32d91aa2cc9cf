"""The program `optimus`: all commands, in the order of its help."""

import io
import re
import sys

import typer

from optimus.cli.common import app
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
        sys.stderr.write(f"error: {with_options(str(error))}\n")  # at once: other ranks write there too
        sys.exit(error.code)


def with_options(message: str) -> str:
    """A message of a function, which names its arguments as `resume=True` or `workers`, with the options for them."""
    group = typer.main.get_command(app)
    commands = [each for each in group.commands.values() if not hasattr(each, "commands")]  # type: ignore[attr-defined]
    options = {param.name: param.opts[0] for command in commands for param in command.params}

    def option(match: re.Match[str]) -> str:
        name, value = match.groups()
        if not options.get(name, "").startswith("--"):
            return match[0]
        return options[name] if value in (None, "True") else f"{options[name]} {value}"

    return re.sub(r"`(\w+)(?:=([^`]*))?`", option, message)
