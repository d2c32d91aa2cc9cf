"""Options and helpers of the commands."""

import json
import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from optimus.config.completion import complete_key
from optimus.version import __version__


class CommandGroup(TyperGroup):
    """A command group that lists the first sentence of each command's help in full."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(limit=1000)) for name, each in commands if each])


app = typer.Typer(
    cls=CommandGroup,
    name="optimus",
    help="Pretrain dense and Mixture-of-Experts language models, from raw text to an evaluated checkpoint.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, Option("--json", help="Print the result as JSON.")]
Overrides = Annotated[
    list[str] | None,
    Argument(metavar="KEY.PATH=VALUE", help="Override keys of the configuration.", autocompletion=complete_key),
]
Settings = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY.PATH=VALUE", help="Same as KEY.PATH=VALUE; repeatable.", autocompletion=complete_key),
]
Verbose = Annotated[
    bool, Option("--verbose", help="Also print the placement of ranks and the form (NN, NT or TN) of each matmul.")
]
ParseSpecial = Annotated[
    bool,
    Option("--parse-special", help="Parse special tokens in the text; by default, their spelling is ordinary text."),
]

Plugins = Annotated[
    list[str] | None,
    Option(
        "--plugin",
        metavar="NAME",
        help="Load this plugin: a module, an entry point, or a folder with a model's code; repeated.",
    ),
]


def _version(asked: bool) -> None:
    if asked:
        print(f"optimus {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, Option("--version", help="Print the version.", callback=_version, is_eager=True)] = False,
) -> None:
    """Options of `optimus` itself."""


def show_ready(config: Path, ready: dict[str, Any], as_json: bool, *, verbose: bool) -> None:
    """Shows the result of `--check` for a run that has passed the checks."""
    where = f"\n{ready['placement']}" if ready["ranks"] > 1 and verbose else ""
    nodes = f" of {ready['nodes']} node(s), with {ready['spares']} spare(s)" if "nodes" in ready else ""
    text = f"{config} is ready to run: {ready['steps']} steps on {ready['ranks']} rank(s){nodes}"
    held = f"\n{ready['held']}" if ready["held"] else ""
    about = "\n".join(ready.pop("summary"))
    show(ready, as_json, f"{text}\n{about}{where}{held}")


def but(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    """Returns the arguments of a command except `names`."""
    return {name: value for name, value in arguments.items() if name not in names}


def show(result: Any, as_json: bool, text: str) -> None:
    """Prints a result as JSON if `as_json`, otherwise `text` unless `text` is empty."""
    if as_json or text:
        print(json.dumps(result, indent=2, default=str) if as_json else text)


def folded(line: str, indent: int) -> str:
    """Wraps an output line between words if stdout is a terminal."""
    if not sys.stdout.isatty():
        return line
    columns = shutil.get_terminal_size().columns
    begin = " " * min(indent, columns // 2)
    return textwrap.fill(line, columns, subsequent_indent=begin, break_on_hyphens=False, break_long_words=False)


def with_options(message: str) -> str:
    """Replaces function arguments in backticks, such as `resume=True` or `workers`, by command-line options."""
    group = typer.main.get_command(app)
    commands = [each for each in group.commands.values() if not hasattr(each, "commands")]  # type: ignore[attr-defined]
    options = {param.name: param.opts[0] for command in commands for param in command.params}

    def option(match: re.Match[str]) -> str:
        name, value = match.groups()
        if not options.get(name, "").startswith("--"):
            return match[0]
        return options[name] if value in (None, "True") else f"{options[name]} {value}"

    return re.sub(r"`(\w+)(?:=([^`]*))?`", option, message)
