"""The commands `optimus bench ...`."""

import inspect
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from optimus.cli.common import CommandGroup, app
from optimus.disk import user_path
from optimus.errors import UserError

_CHECKOUT = Path(__file__).parents[2]
_FILE = _CHECKOUT / "benchmarks" / "commands.py"  # exists only in a source checkout


class _Later(TyperCommand):
    """A command that creates its function and options on first use."""

    def __init__(self, name: str, summary: str, function: Callable[[str], Callable[..., Any]]) -> None:
        self._function = function
        super().__init__(name, help=summary, rich_markup_mode=None)

    @cached_property
    def _command(self) -> Any:
        assert self.name is not None
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        app.command(self.name)(_command(self._function(self.name)))
        return typer.main.get_command(app)

    @property
    def params(self) -> Any:
        return self._command.params

    @params.setter
    def params(self, none: Any) -> None:
        """Ignores an assignment, because the parameters are those of the wrapped command."""

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        return self._command.make_context(*arguments, **more)


class _Bench(CommandGroup):
    """The group of benchmark commands, including those of a source checkout."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if (commands := _commands()) is not None:
            for name, summary in commands.BENCHMARKS.items():
                self.add_command(_Later(name, summary, commands.run_of))

    def get_command(self, context: Any, name: str) -> Any:
        command = super().get_command(context, name)
        if command is None and _commands() is None:
            raise UserError(
                f"optimus bench {name}: an installed package has no benchmarks: clone the source, install it with "
                "`make install-dev` and run the command there"
            )
        return command


bench_app = typer.Typer(
    cls=_Bench,
    help="Measure this machine, and compare Optimus with other frameworks in one run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Report = dict[str, Any] | None  # None on all ranks except the first


def _in_a_folder(path: Path | None) -> Path | None:
    """Expands the path of a report, if given. Raises `UserError` if the path's folder does not exist."""
    path = None if path is None else user_path(path)
    if path is not None and not path.absolute().parent.is_dir():
        raise UserError(f"--output {path}: the folder {path.absolute().parent} does not exist: create it first")
    return path


ReportFile = Annotated[Path | None, typer.Option(help="Write the report to this JSON file.", callback=_in_a_folder)]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON, and tables to standard error.")]


def bench(name: str) -> Callable[[Callable[..., Report]], None]:
    """Returns a decorator that registers a function as the command `optimus bench NAME`."""

    def add(function: Callable[..., Report]) -> None:
        bench_app.command(name=name)(_command(function))

    return add


def _commands() -> ModuleType | None:
    if not _FILE.is_file():
        return None
    if str(_CHECKOUT) not in sys.path:
        sys.path.insert(0, str(_CHECKOUT))
    return import_module(".".join(_FILE.relative_to(_CHECKOUT).with_suffix("").parts))


def _command(function: Callable[..., Report]) -> Callable[..., None]:
    """Wraps a function as a command with `--json` and `--output`."""
    signature = inspect.signature(function)
    added: dict[str, tuple[Any, Any]] = {"as_json": (Json, False)}
    if "output" not in signature.parameters:
        added = {"output": (ReportFile, None), **added}

    def command(*, as_json: bool, **options: Any) -> None:
        output = options.pop("output") if "output" in added else None
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            report = function(**options)
        if report is not None and output is not None:
            from optimus.disk import write_json

            write_json(output, report)
        if report is not None and as_json:
            print(json.dumps(report, indent=2))

    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in added.items()
    ]
    command.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), *more], return_annotation=None
    )
    command.__annotations__ = {**function.__annotations__, **{name: kind for name, (kind, _) in added.items()}}
    command.__doc__ = function.__doc__
    return command


@bench("machine")
def bench_machine(
    ranks: Annotated[
        int, typer.Option(help="Ranks per node: one per accelerator, or the number of ranks that share the CPU.")
    ],
    output: Annotated[Path, typer.Option(help="Write the machine file to this new .yaml file.")],
    name: Annotated[str | None, typer.Option(help="Name of the machine. Default: the name of the file.")] = None,
) -> Report:
    """Measure this machine with all ranks busy, and write the machine file for `optimus plan`."""
    from optimus.plan.measure.machine import run

    return run(ranks, user_path(output), name=name)


app.add_typer(bench_app, name="bench")
_commands()  # imports the checkout's commands that use `bench`
