"""Converts YAML, a preset and `key.path=value` overrides to a `RunConfig`, and a `RunConfig` back to YAML.

The order of precedence, lowest first: the tree's defaults, the preset's recipe, the file, the overrides.
"""

import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from optimus.config.combinations import check_combinations
from optimus.config.renamed import MOVED, new_name, with_new_names
from optimus.config.tree import RunConfig
from optimus.config.yaml_text import Dumper, Loader, parse_yaml
from optimus.disk import user_path
from optimus.errors import UserError, nearest
from optimus.model.architecture import Architecture, ModelConfig
from optimus.model.foreign.architecture import code_folder
from optimus.plugins import load_plugins, naming_missing_plugins


class ModelFolderReader(typing.Protocol):
    """Reads the configuration sections for a model folder of `transformers`.

    With `own_modules`, the run uses the modules of `transformers`.
    """

    def __call__(self, path: Path, *, own_modules: bool = False) -> dict[str, Any]: ...


SomeSection = typing.TypeVar("SomeSection", bound=BaseModel)


def load_config(
    source: str | Path | Mapping[str, Any] | RunConfig,
    overrides: Iterable[str] = (),
    read_model_folder: ModelFolderReader | None = None,
    *,
    of_run: bool = False,
) -> RunConfig:
    """Reads and validates a run's configuration.

    `source` is a YAML file, a mapping, or a `RunConfig`. `overrides` are strings `key.path=value` with YAML
    values. `read_model_folder` converts a Hugging Face folder to sections. Loads the plugins that the configuration
    names. With `of_run`, loads none: the file is the saved configuration of a run.

    Raises `UserError` for a file that cannot be read, and for an invalid configuration.
    """
    if isinstance(source, RunConfig):
        raw, where = source.model_dump(exclude_unset=True), "config"
    elif isinstance(source, Mapping):
        raw, where = _copy(source), "config"
    else:
        path = user_path(source)
        raw, where = _read_including(path, read_model_folder, of_run), str(path)
    if isinstance(overrides, str):
        raise UserError(f"overrides must be a list of strings: give [{overrides!r}]")
    changes = [*overrides]
    for text in filter(_names_plugins, changes):
        raw = _override(raw, text, read_model_folder)
    if not of_run:
        load_plugins(raw.get("plugins") or [], f"{where}: plugins")  # the next lines may use what the plugins register
    for text in changes:
        raw = raw if _names_plugins(text) else _override(raw, text, read_model_folder)
    opened = _opened(raw, read_model_folder)
    if not of_run and (folder := code_folder(opened.get("model"))):
        opened["plugins"] = [*dict.fromkeys([*(opened.get("plugins") or []), folder])]
        load_plugins([folder], f"{where}: model.transformers._name_or_path")
    try:
        config = validated(RunConfig, opened, where)
    except UserError as error:
        raise naming_missing_plugins(error, raw.get("plugins") or ()) from None
    try:
        check_combinations(config)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    return config


def validated(
    kind: type[SomeSection],
    raw: Mapping[str, Any],
    where: str,
    root: type[BaseModel] = RunConfig,
    names: Mapping[str, str] = {},
) -> SomeSection:
    """Validates a section that was read at `where`.

    Raises `UserError` for an invalid section; the message names the path of each wrong key. `names` maps paths to
    other names for the message. Suggestions for unknown keys come from `root`.
    """
    try:
        return kind.model_validate(dict(raw))
    except ValidationError as error:
        raise UserError(f"{where}: " + "; ".join(_explain(error, root, names))) from None


def check_value(key: str, value: Any, where: str) -> None:
    """Raises `UserError` if `value`, which was read at `where`, is invalid for `key`, a `section.field` of the tree."""
    section, name = key.split(".")[-2:]
    kind: Any = RunConfig.model_fields[section].annotation
    field = kind.model_fields[name]
    annotated: Any = Annotated[field.annotation, field]
    try:
        TypeAdapter(annotated).validate_python(value, strict=True)
    except ValidationError as error:
        raise UserError(f"{where}: '{key}' is {value!r}: it must be {_must_be(error.errors()[0])}") from None


def resolve_model(name: str, read_model_folder: ModelFolderReader | None = None) -> dict[str, Any]:
    """Returns the sections for the name of a preset or, with `read_model_folder`, for a Hugging Face folder. Raises
    `UserError` for another name."""
    if name in _table("presets"):
        return {key: value for key, value in _copy(_table("presets")[name]).items() if key != "parameters"}
    path = user_path(name)
    if read_model_folder is not None and path.is_dir():
        return read_model_folder(path)
    raise UserError(
        f"model: '{name}' is neither a preset nor a Hugging Face folder; {nearest(name, preset_names())} "
        "(`optimus models` lists the presets)"
    )


def preset_names() -> list[str]:
    """Names of the presets."""
    return list(_table("presets"))


def preset_parameters(name: str) -> dict[str, int]:
    """Returns the number of parameters of a preset: `total`, and `active` for one token."""
    return dict(_table("presets")[name]["parameters"])


def dump_config(config: RunConfig) -> str:
    """Returns `config` as YAML that `load_config` reads back to an equal `RunConfig`."""
    tree = config.model_dump(exclude={"moe"} if config.model.experts is None else None)
    return yaml.dump(tree, Dumper=Dumper, sort_keys=False, width=120)


@cache
def other_names() -> dict[str, str]:
    """Returns this library's keys by the names that other trainers use, in lower case and without punctuation."""
    return {name: ours for ours, names in _table("other_names").items() for name in names}


@cache
def _table(name: str) -> dict[str, Any]:
    return yaml.load(Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8"), Loader)


def read_section(path: Path, kind: type[SomeSection], what: str) -> SomeSection:
    """Reads a YAML file that contains a single section. Raises `UserError` for invalid files, which messages call `what`,
    such as "machine file"."""
    return validated(kind, _read_yaml(path, kind, what), str(path), kind)


def _names_plugins(override: str) -> bool:
    return override.startswith("plugins=")


def _read_including(
    path: Path, read_model_folder: ModelFolderReader | None, of_run: bool, outer: Sequence[Path] = ()
) -> dict[str, Any]:
    """Reads a configuration file on top of the files that its key `include` names.

    The names are relative to the file's folder; later files take precedence. The result has the plugins of all files.
    """
    raw = _read_yaml(path, RunConfig, "config file")
    written = path.resolve()
    if written.name.startswith("config.") and (written.parent / "environment.jsonl").exists():  # written by a run
        raw = with_new_names(raw, str(path))
    named = raw.pop("include", None) or []
    files = [*outer, path.resolve()]
    below: dict[str, Any] = {}
    for name in named if isinstance(named, list) else [named]:
        if not isinstance(name, str):
            raise UserError(f"{path}: 'include' is {named!r}: it must be the name of a YAML file, or a list of names")
        other = path.parent / user_path(name)
        if other.resolve() in files:
            raise UserError(f"{path}: include: {other} includes this file in turn: remove one of the two includes")
        if not other.is_file():
            raise UserError(
                f"{path}: include: {other} does not exist: write its path relative to the folder of {path.name}"
            )
        below = _with_all_plugins(below, _read_including(other, read_model_folder, of_run, files), read_model_folder)
    if not of_run:
        load_plugins(raw.get("plugins") or [], f"{path}: plugins")
    return _with_all_plugins(below, raw, read_model_folder)


def _with_all_plugins(
    low: Mapping[str, Any], high: Mapping[str, Any], read_model_folder: ModelFolderReader | None
) -> dict[str, Any]:
    plugins = [raw["plugins"] for raw in (low, high) if isinstance(raw.get("plugins"), list)]
    every = {"plugins": [*dict.fromkeys(chain.from_iterable(plugins))]} if len(plugins) > 1 else {}
    return _merge_opened(low, high, read_model_folder) | every


def _merge_opened(
    low: Mapping[str, Any], high: Mapping[str, Any], read_model_folder: ModelFolderReader | None
) -> dict[str, Any]:
    return _merge(_opened(dict(low), read_model_folder) if isinstance(high.get("model"), Mapping) else low, high)


def _read_yaml(path: Path, kind: type[BaseModel], what: str) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{what} {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{what} {path} cannot be read: {error}") from None
    raw = parse_yaml(text, f"{what} {path}")
    if not isinstance(raw, dict):
        raise UserError(f"{what} {path} must contain a mapping with the keys {', '.join(kind.model_fields)}")
    return raw


def _override(raw: dict[str, Any], text: str, read_model_folder: ModelFolderReader | None) -> dict[str, Any]:
    """Returns `raw` with one `key.path=value` set; expands a preset or folder first if the key is inside the model."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"override '{text}' is not of the form key.path=value")
    parsed = parse_yaml(value, f"override '{text}'")
    parts = key.split(".")
    if parts[0] == "model" and len(parts) > 1:
        raw = _opened(raw, read_model_folder)
    root = node = raw
    for depth, part in enumerate(parts[:-1]):
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise UserError(f"override '{text}': {'.'.join(parts[: depth + 1])} is not a section")
    node[parts[-1]] = parsed
    return root


def _opened(raw: dict[str, Any], read_model_folder: ModelFolderReader | None) -> dict[str, Any]:
    """Returns the sections of the preset or folder that `model` names, overridden by the other keys of `raw`.

    Returns `raw` itself without such a name, and for `model.transformers` without `read_model_folder`. Raises
    `UserError` for an unknown name.
    """
    model = raw.get("model")
    rest = {key: value for key, value in raw.items() if key != "model"}
    if isinstance(model, str):
        return _merge(resolve_model(model, read_model_folder), rest)
    if isinstance(model, Mapping) and isinstance(model.get("transformers"), str) and read_model_folder is not None:
        beside = {key: value for key, value in model.items() if key != "transformers"}
        return _merge(read_model_folder(Path(model["transformers"]), own_modules=True), rest | {"model": beside})
    return raw


def _merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(low)
    for key, value in high.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _copy(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copy(v) if isinstance(v, Mapping) else v for k, v in tree.items()}


def _explain(error: ValidationError, root: type[BaseModel], names: Mapping[str, str]) -> list[str]:
    clauses: dict[str, str] = {}  # by key: pydantic reports a problem for each possible type of a key
    for problem in error.errors():
        where = [str(part) for part in problem["loc"] if not _TYPE.search(str(part))]
        path = names.get(".".join(where), ".".join(where))
        if problem["type"] == "default_factory_not_called":
            continue  # a consequence of the problems of other keys
        if problem["type"] == "extra_forbidden":
            clauses[path] = f"unknown key '{path}': {_suggest(where[:-1], where[-1], root)}"
        elif problem["type"] == "missing":
            clauses[path] = f"'{path}' is missing"
        elif problem["type"] == "value_error":
            clauses[path or str(problem["ctx"]["error"])] = f"{path + ': ' if path else ''}{problem['ctx']['error']}"
        elif path in clauses:
            clauses[path] += f" or {_must_be(problem)}"
        else:
            clauses[path] = f"'{path}' is {problem['input']!r}: it must be {_must_be(problem)}"
    return list(clauses.values())


# Parts that pydantic adds to a key's path if the key has several possible types.
_TYPE = re.compile(r"^([A-Z]\w*|constrained-\w+|int|float|str|bool|list\[.*|literal\[.*|function-\w+.*|nullable.*)$")
_MUST_BE = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "model_type": "a mapping of keys",
    "dict_type": "a mapping of keys",
}


def _must_be(problem: Any) -> str:
    said: str = problem["msg"]
    words = said.removeprefix("Input should be ").replace("List should have", "a list of")
    return _MUST_BE.get(problem["type"], re.sub(" after validation, not .*", "", words))


def _suggest(section: list[str], key: str, root: type[BaseModel]) -> str:
    """Suggests, in this order, a new name, the same key in another section, the key for another trainer's name, or the
    nearest key of the section."""
    path = ".".join([*(section[2:] if section[:1] == ["phases"] else section), key])
    if (now := MOVED.get(path, new_name(path))) != path:
        return f"use {now}"
    elsewhere = [f"{name}.{key}" for name, field in root.model_fields.items() if key in _fields_of(field.annotation)]
    if elsewhere:
        return f"did you mean '{elsewhere[0]}'?"
    if other := other_names().get("".join(letter for letter in key.lower() if letter.isalnum())):
        return f"use {other}"
    hint = nearest(key, keys_of_section(section, root))
    if "did you mean" in hint and section:
        return hint.replace("'", f"'{'.'.join(section)}.", 1)
    return hint


def keys_of_section(path: Sequence[str], root: type[BaseModel]) -> Iterable[str]:
    """Returns the keys of the section at `path`, which may contain numbers in a list and keys of a mapping.

    May raise KeyError for a path that leads to no section.
    """
    node: typing.Any = root
    for name in path:
        sections = [each for each in _sections_of(node) if name in each.model_fields]
        arguments = typing.get_args(node)
        if not arguments and not sections:
            raise KeyError(name)
        node = sections[0].model_fields[name].annotation if sections else arguments[-1]
    return _fields_of(node)


def _fields_of(annotation: Any) -> Iterable[str]:
    return [name for section in _sections_of(annotation) for name in section.model_fields]


def _sections_of(annotation: Any) -> list[type[BaseModel]]:
    """Returns the sections among the possible types of a key."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _sections_of(typing.get_args(annotation)[0])
    if isinstance(annotation, types.UnionType) or origin is typing.Union:
        return [section for each in typing.get_args(annotation) for section in _sections_of(each)]
    known = isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias)
    return [annotation] if known and issubclass(annotation, BaseModel) else []


def architecture_from(mapping: Mapping[str, Any], where: str) -> Architecture:
    """Validates the section `model` of a configuration, read at `where`. Raises `UserError` for an invalid section."""
    try:
        return _ARCHITECTURES.validate_python(dict(mapping))
    except ValidationError as error:
        raise UserError(f"{where}: " + "; ".join(_explain(error, ModelConfig, {}))) from None


_ARCHITECTURES: TypeAdapter[Architecture] = TypeAdapter(Architecture)


def model_config_from(mapping: Mapping[str, Any], where: str, names: Mapping[str, str] = {}) -> ModelConfig:
    """Validates a `ModelConfig` from a mapping that was read at `where`; see `validated`."""
    return validated(ModelConfig, mapping, where, names=names)
