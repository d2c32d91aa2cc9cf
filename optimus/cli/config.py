"""The commands for configurations and presets."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from optimus.cli.common import CommandGroup, Json, Overrides, Settings, app, folded, show
from optimus.errors import UserError

config_app = typer.Typer(
    help="Show, compare and migrate configurations.", no_args_is_help=True, rich_markup_mode=None, cls=CommandGroup
)
app.add_typer(config_app, name="config")


@config_app.command(name="show")
def configshow(
    config: Annotated[Path, Argument(metavar="CONFIG", help="YAML file.")],
    overrides: Overrides = None,
    settings: Settings = None,
    resolved: Annotated[
        bool,
        Option(
            "--resolved", help="Also resolve automatic settings as a run on this machine would, and print the reasons."
        ),
    ] = False,
    ranks: Annotated[int | None, Option(help="With --resolved: number of ranks of the run.")] = None,
    as_json: Json = False,
) -> None:
    """Show a configuration with its includes, preset, overrides and defaults: every key, as a run saves it."""
    from optimus import api
    from optimus.config import dump_config

    tree = api.config(config, [*(overrides or []), *(settings or [])])
    if not resolved:
        show(tree.model_dump(), as_json, dump_config(tree).rstrip())
        return
    from optimus.resolve.ranks import least_ranks
    from optimus.training.resolving import resolve_before_launch

    if ranks is not None and ranks < 1:
        raise UserError(f"--ranks {ranks}: give a number of at least 1")
    run = resolve_before_launch(tree, least_ranks(tree) if ranks is None else ranks)
    lines = [f"# {decision}" for decision in run.decisions]
    told = {"config": run.config.model_dump(), "decisions": [decision.written for decision in run.decisions]}
    show(told, as_json, "\n".join([*lines, dump_config(run.config).rstrip()]))


@config_app.command(name="diff")
def config_diff(
    configs: Annotated[list[Path], Argument(metavar="CONFIG", help="YAML files or run folders, two or more.")],
    as_json: Json = False,
) -> None:
    """Show the keys whose values differ between configurations, defaults included."""
    from optimus import api
    from optimus.config.flat import differing, value_text
    from optimus.observe.table import print_table

    if len(configs) < 2:
        raise UserError(f"config diff: {configs[0]} is the only configuration: name two or more")
    files = [path / "config.yaml" if path.is_dir() else path for path in configs]
    found = differing([api.config(file).model_dump() for file in files], None)
    if as_json or not found:
        show(found, as_json, "no keys differ")
        return
    text = [
        {"key": key, **{str(path): value_text(value) for path, value in zip(configs, row)}}
        for key, row in found.items()
    ]
    print_table(text, f"{len(found)} keys differ")


@config_app.command(name="migrate")
def config_migrate(
    configs: Annotated[list[Path], Argument(metavar="CONFIG", help="YAML files to rewrite; list included files too.")],
    as_json: Json = False,
) -> None:
    """Rename keys of earlier versions in configuration files to the current names, in place. Comments stay."""
    from optimus import api

    told, lines = list[dict[str, Any]](), list[str]()
    try:
        for path in configs:
            found = api.migrate(path)
            told += [{"file": str(path), "line": key.line, "old": key.old, "new": key.new} for key in found]
            lines += [f"{path} line {key.line}: {key.old} is now {key.new}" for key in found]
            lines += [] if found else [f"{path}: all keys have their current names"]
    finally:  # if a file fails, the command has already rewritten the files before
        show(told, as_json, "\n".join(lines))


@app.command()
def models(
    families: Annotated[bool, Option("--families", help="List the model families and their presets.")] = False,
    as_json: Json = False,
) -> None:
    """List the presets with their total and active parameters."""
    from optimus.api import models as run
    from optimus.config.models import families_known
    from optimus.config.sizes import count_text

    if families:
        known = families_known()
        lines = [folded(f"{row['name']:16} {', '.join(row['presets'])}".rstrip(), 17) for row in known]
        show(known, as_json, "\n".join(lines))
        return
    rows = run()
    lines = []
    for row in rows:
        total, active = (count_text(row[f"{kind}_parameters"]) for kind in ("total", "active"))
        lines.append(
            f"{row['name']:16} {total:>8} total  {active:>8} active   {row['layers']} layers, hidden {row['hidden']}"
        )
    show(rows, as_json, "\n".join(lines))
