"""Writes the reference pages of the documentation from the program itself; `make docs` runs the script.

Each page is a template of `docs/templates/`. A line `{{ name }}` stands for a generated part: the keys of the
configuration (`optimus/config/tree.py`), the options of the commands (their parser), or the public functions of Python.
"""

import ast
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import annotated_types
import typer
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import optimus
from optimus import api, cli
from optimus.config import RunConfig, load_config, resolve_model
from optimus.config.models import models
from optimus.plugins import NameIn

FOLDER = Path(__file__).parent

# The keys that people change, and their names in other programs.
TEN = {
    "model": "architecture",
    "data.path": "dataset",
    "train.output": "output_dir",
    "train.steps": "max_steps, train_iters",
    "train.global_batch": "global_batch_size",
    "train.micro_batch": "micro_batch_size, per-device batch size",
    "train.sequence_length": "seq_len",
    "lr_schedule.lr": "lr, learning rate",
    "state.shard": "ZeRO stage, FSDP, DDP",
    "checkpoint.every": "save_interval",
}


def pages() -> dict[str, str]:
    """Returns the name and text of every generated page. Raises `UserError` if an example is no valid configuration any
    more."""
    return {path.name: page(path) for path in sorted((FOLDER / "templates").glob("*.md"))}


def page(template: Path) -> str:
    """Returns a template with its generated parts."""
    parts: dict[str, Callable[[], str]] = {
        "ten keys": ten_keys,
        "keys": keys,
        "presets": presets,
        "commands": commands,
        "functions": functions,
    }
    text = template.read_text(encoding="utf-8")
    for example in re.findall(r"<!-- file: \S+ -->\n```yaml\n(.*?)```", text, re.DOTALL):
        load_config(yaml.safe_load(example))
    note = f"<!-- Written by docs/generate.py from docs/templates/{template.name}: change that and run `make docs`. -->"
    title, _, rest = text.partition("\n")
    rest = re.sub(r"\{\{ (.+?) \}\}", lambda match: parts[match[1]]().strip(), rest)
    return f"{title}\n\n{note}\n{rest}"


# The configuration.


def ten_keys() -> str:
    """Returns a table of the keys that people change."""
    rows = []
    for path, elsewhere in TEN.items():
        key, kind, default, meaning = _row(path, _field(path))
        rows.append([key, elsewhere, kind, default, meaning])
    return _table(["Key", "Called elsewhere", "Type", "Default", "Meaning"], rows)


def _field(path: str) -> FieldInfo:
    section: Any = RunConfig
    *outer, last = path.split(".")
    for name in outer:
        section = section.model_fields[name].annotation
    found: FieldInfo = section.model_fields[last]
    return found


def keys() -> str:
    """Returns a heading and a table for each section of the configuration."""
    return "\n".join(map(_section, RunConfig.model_fields.items()))


def _section(item: tuple[str, FieldInfo]) -> str:
    """Returns a heading and a table of a section's keys, or of the single key outside a section. A key with several sections
    has the keys of all."""
    name, field = item
    head = ["Key", "Type", "Default", "Meaning"]
    found = [_plain(each) for each in typing.get_args(field.annotation)] or [field.annotation]
    sections = [each for each in found if _is_section(each)]
    if len(sections) < len(found):
        rows = [_row(name, field)]
        rows += [_row(f"{name}.{key}", inner) for nested in sections for key, inner in nested.model_fields.items()]
        return f"### `{name}`\n\n{_table(head, rows)}"
    text = " ".join(filter(None, [(sections[0].__doc__ or "").strip(), field.description]))
    rows = [_row(f"{name}.{key}", inner) for section in sections for key, inner in section.model_fields.items()]
    for key, inner in (each for section in sections for each in section.model_fields.items()):
        nested = [each for each in (inner.annotation, *typing.get_args(inner.annotation)) if _is_section(each)]
        rows += [_row(f"{name}.{key}.{own}", of) for each in nested for own, of in each.model_fields.items()]
    return f"### `{name}`\n\n{text}\n\n{_table(head, rows)}"


def _plain(annotation: Any) -> Any:
    """Returns an annotated type without its annotations."""
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _row(path: str, field: FieldInfo) -> list[str]:
    if _type(field.annotation) == "section":
        default = "of its keys"
    elif field.default_factory_takes_validated_data:
        default = "from others"
    else:
        default = "required" if field.is_required() else f"`{_value(field.default)}`"
    words, *null = _type(Annotated[(field.annotation, None, *field.metadata)]).split(" or null")
    kind = f"{words}{_limits(field)}{', or null' if null else ''}"
    return [f"`{path}`", kind, default, " ".join((field.description or "").split())]


def _type(annotation: Any) -> str:
    """Returns a type in words: `integer or null`, `cosine or constant`, `list of number`."""
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(argument) for argument in arguments))
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is typing.Annotated:
        if names := [each for each in arguments[1:] if isinstance(each, NameIn)]:
            return " or ".join(f"`{name}`" for name in names[0].table)
        return _type(arguments[0]) + "".join(_limits(each) for each in arguments[1:] if isinstance(each, FieldInfo))
    if _is_section(annotation):
        return "section"
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return f"mapping of names to {_type(arguments[1])}"
    names = {int: "integer", float: "number", str: "text", bool: "true or false", types.NoneType: "null", Any: "value"}
    return names[annotation]


def _limits(field: FieldInfo) -> str:
    """Returns the bounds of a number and the length of a list, such as ` > 0`; empty without bounds."""
    limits = []
    for limit in field.metadata:
        if isinstance(limit, annotated_types.Gt):
            limits.append(f" > {limit.gt}")
        elif isinstance(limit, annotated_types.Ge):
            limits.append(f" ≥ {limit.ge}")
        elif isinstance(limit, annotated_types.MaxLen):
            limits.append(f", {limit.max_length} of them")
    return "".join(limits)


def _value(value: Any) -> str:
    """Returns a default as written in YAML."""
    return yaml.safe_dump(value, default_flow_style=True).split("\n")[0]


def presets() -> str:
    """Returns a table of the presets."""
    head = "Preset|Family|Parameters|Active|Layers|Hidden|Heads|Intermediate|Experts|Top-k|Vocabulary|lr_schedule"
    return _table(head.split("|"), [_preset(row) for row in models()])


def _preset(row: dict[str, Any]) -> list[str]:
    sizes = ("layers", "hidden", "heads", "intermediate", "experts", "experts_per_token", "vocab")
    schedule = resolve_model(row["name"]).get("lr_schedule", {})
    cells = [
        f"`{row['name']}`",
        row["family"],
        _count(row["total_parameters"]),
        _count(row["active_parameters"]),
        *(row.get(key, "–") for key in sizes),
        ", ".join(f"`{key}: {value}`" for key, value in schedule.items()) or "default",
    ]
    return list(map(str, cells))


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    first, *others = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([first, "|---" * len(head) + "|", *others]) + "\n"


# The commands, from their parser.


def commands() -> str:
    """Returns a heading, a usage line and a table of options for each command, and a line for each benchmark."""
    everything = dict(parsed())
    name = "optimus bench machine"  # the benchmark that users need; the others compare
    here = {path: each for path, each in everything.items() if path == name or not path.startswith("optimus bench ")}
    rows = [[f"`{path}`", _summary(each)] for path, each in everything.items() if path not in here]
    bench = typer.main.get_command(cli.app).commands["bench"]
    comparisons = f"## `optimus bench NAME`\n\n{_summary(bench)}\n\n{_table(['Command', 'Meaning'], rows)}"
    return "\n".join([*(_command(*each) for each in sorted(here.items())), comparisons])


def parsed(group: Any = None, name: str = "optimus") -> Iterator[tuple[str, Any]]:
    """Yields the name and parser of each command, including those in groups."""
    for own, command in (group or typer.main.get_command(cli.app)).commands.items():
        if hasattr(command, "commands"):
            yield from parsed(command, f"{name} {own}")
        else:
            yield f"{name} {own}", command


def options_of(command: Any) -> dict[str, Any]:
    """Returns the options of a command by their names, without those of every command."""
    found = {option: param for param in command.params for option in (*param.opts, *param.secondary_opts)}
    return {name: param for name, param in found.items() if name.startswith("-") and name not in ("--json", "--help")}


def _summary(command: Any) -> str:
    return " ".join((command.help or "").split())


def _command(name: str, command: Any) -> str:
    usage, rows = [name], []
    kinds = {each.name: each.annotation for each in inspect.signature(command.callback).parameters.values()}
    for param in command.params:
        unset = any(param.default is each for each in (None, False)) or param.default == ""
        default = "required" if param.required else "" if unset else f"`{param.default}`"
        if not param.opts[0].startswith("-"):
            argument = (param.metavar if param.required else f"[{param.metavar}]") + ("..." if param.nargs != 1 else "")
            usage.append(argument)
            rows.append([f"`{argument}`", default, param.help or ""])
        elif options_of(command).keys() & set(param.opts):
            follows = [] if param.is_flag else [param.metavar or _placeholder(kinds[param.name])]
            option = " ".join([*param.opts, *param.secondary_opts, *follows])
            usage += [option] if param.required else []
            rows.append([f"`{option}`{' (repeatable)' if param.multiple else ''}", default, param.help or ""])
    table = _table(["Argument or option", "Default", "Meaning"], rows)
    return f"## `{name}`\n\n{_summary(command)}\n\n```text\n{' '.join(usage)} [OPTIONS]\n```\n\n{table}"


def _placeholder(kind: Any) -> str:
    """Returns the placeholder after an option of this type: `N`, `PATH`, `slurm|pbs`."""
    arguments = [each for each in typing.get_args(kind) if each is not types.NoneType]
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(map(str, arguments))
    if arguments:
        return _placeholder(arguments[0])
    return {int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")


# Python.


def functions() -> str:
    """Returns the signature and docstring of everything in `import optimus`, then of everything else in `optimus.api`."""
    rest = set(api.__all__) - set(optimus.__all__)
    names = [f"optimus.{name}" for name in sorted(optimus.__all__, key=str.lower)]
    return "\n".join(map(_function, [*names, *(f"optimus.api.{name}" for name in sorted(rest))]))


def _function(path: str) -> str:
    name = path.rpartition(".")[2]
    value = getattr(api, name)
    main = getattr(value, name) if inspect.ismodule(value) else value
    text, _, example = (inspect.getdoc(main) or "").partition("Example:\n")
    parts = [f"## `{path}`\n", f"```py\n{_signature(name, main)}\n```\n", text.strip() + "\n"]
    if example:
        parts.append(f"```py\n{textwrap.dedent(example).strip()}\n```\n")
    return "\n".join(parts)


def _signature(name: str, value: Any) -> str:
    """Returns the signature as in the source, because printed types depend on the version of Python."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    if isinstance(node, ast.ClassDef):
        (made,) = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"] or [
            None
        ]
        bases = ", ".join(map(ast.unparse, node.bases))
        if made is None:
            return f"class {name}({bases})"
        del made.args.args[0]  # self
        return f"class {name}({ast.unparse(made.args)})"
    assert isinstance(node, ast.FunctionDef)
    assert node.returns is not None
    for argument in (*node.args.args, *node.args.kwonlyargs):
        argument.annotation = argument.annotation and _unquoted(argument.annotation)
    node.returns = _unquoted(node.returns)
    line = f"{name}({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}"
    if len(line) <= 100:
        return line
    arguments = "".join(f"    {each},\n" for each in _arguments(node.args))
    return f"{name}(\n{arguments}) -> {ast.unparse(node.returns)}"


def _unquoted(annotation: ast.expr) -> ast.expr:
    """Returns a type that the source writes in quotes, because it is imported for its name only, without them."""
    return ast.parse(str(annotation.value), mode="eval").body if isinstance(annotation, ast.Constant) else annotation


def _arguments(arguments: ast.arguments) -> Iterator[str]:
    first = [None] * (len(arguments.args) - len(arguments.defaults))
    for argument, default in zip(arguments.args, [*first, *arguments.defaults]):
        yield _argument(argument, default)
    if arguments.kwonlyargs:
        yield "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults):
        yield _argument(argument, default)
    if arguments.kwarg:
        yield f"**{ast.unparse(arguments.kwarg)}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(argument) + ("" if default is None else f" = {ast.unparse(default)}")


def main() -> None:
    """Writes the pages, and the pictures of docs/architecture.md."""
    import pictures  # beside this script

    pictures.main()
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
