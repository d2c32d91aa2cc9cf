"""Migrates configuration files to the current names of renamed keys and values; comments and layout stay."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from optimus.config.renamed import MOVED, NEW_VALUES, new_name, with_new_names
from optimus.config.yaml_text import Loader, parse_yaml
from optimus.disk import replace_text, user_path
from optimus.errors import UserError, naming_disk_errors


class RenamedKey(NamedTuple):
    """A renamed key or value in a file. The new name, without its section, replaces the characters `start` to
    `end - 1`. A byte order mark does not count as a character."""

    line: int
    old: str
    new: str
    start: int
    end: int


def migrate(config: str | Path) -> list[RenamedKey]:
    """Renames keys and values of earlier versions to the current names, in place in a configuration's YAML file.

    Returns the renamed keys and values in the order of the file. Migrate included files separately.

    Raises `UserError`, without changing the file, for a file that cannot be read or written, for text that is no YAML
    mapping, and for a key that the function cannot rename.

    Example:
        api.migrate("first.yaml")
    """
    path = user_path(config)
    try:
        path = path.resolve()
        if not path.is_file():
            raise UserError(f"{path} cannot be read: there is no such file")
        with path.open(encoding="utf-8", newline="") as file:  # preserves line endings
            text = file.read()
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    mark, text = ("\ufeff", text[1:]) if text.startswith("\ufeff") else ("", text)
    before = parse_yaml(text, str(path))
    root = yaml.compose(text, Loader=Loader)
    if not isinstance(root, yaml.MappingNode) or not isinstance(before, dict):
        raise UserError(f"{path} is not a configuration: the file has no sections")
    found = sorted(set(_renamed(root, str(path))), key=lambda key: key.start)  # an alias repeats the keys of its anchor
    made = text
    for key in reversed(found):
        quoted = text[key.start] in "\"'" and key.new not in ("true", "false")
        quote = text[key.start] if quoted else ""  # a key in a flow mapping, as in {"a":1}, needs its quotes
        made = made[: key.start] + quote + key.new.rpartition(".")[2] + quote + made[key.end :]
    _check(path, before, made)
    if found:
        with naming_disk_errors(path, "The file is unchanged."):
            replace_text(path, mark + made)
    return found


def _check(path: Path, before: dict[str, Any], made: str) -> None:
    try:
        same = repr(parse_yaml(made, str(path))) == repr(with_new_names(before))
    except UserError:
        same = False
    if not same:
        names = sorted({f"{old} (now {new_name(old)})" for old in _old_keys(before)})
        raise UserError(
            f"{path} is unchanged: anchors, aliases, merge keys or block scalars tie an old key to other text. Rename these "
            f"keys by hand: {', '.join(names)}"
        )


def _old_keys(config: dict[str, Any]) -> Iterator[str]:
    for section, value in config.items():
        names = [f"{section}.{key}" for key in value] if isinstance(value, dict) else []
        yield from (name for name in (str(section), *names) if new_name(name) != name)
        for phase in value if section == "phases" and isinstance(value, list) else ():
            yield from _old_keys(phase) if isinstance(phase, dict) else ()


def _renamed(config: yaml.MappingNode, where: str) -> Iterator[RenamedKey]:
    for section, value in config.value:
        yield from _named(section, section.value, config, where)
        if isinstance(value, yaml.MappingNode):
            for key, held in value.value:
                old = f"{section.value}.{key.value}"
                yield from _named(key, old, value, where)
                if isinstance(held, yaml.ScalarNode) and (new := NEW_VALUES.get((old, held.value))) is not None:
                    yield _change(held, f"{old}: {held.value}", new if isinstance(new, str) else str(new).lower())
        elif section.value == "phases" and isinstance(value, yaml.SequenceNode):
            for phase in value.value:
                if isinstance(phase, yaml.MappingNode):
                    yield from _renamed(phase, where)


def _named(key: yaml.Node, old: str, section: yaml.MappingNode, where: str) -> Iterator[RenamedKey]:
    line, new = key.start_mark.line + 1, new_name(old)
    if old in MOVED:
        raise UserError(f"{where} line {line}: {old} is now {MOVED[old]}: move it there, then migrate the rest")
    name = new.rpartition(".")[2]
    if name == key.value:
        return
    if any(other.value == name for other, _ in section.value):
        raise UserError(f"{where} line {line}: {old} is now {new}, which the file has too: remove one of them")
    yield _change(key, old, new)


def _change(node: yaml.Node, old: str, new: str) -> RenamedKey:
    return RenamedKey(node.start_mark.line + 1, old, new, node.start_mark.index, node.end_mark.index)
