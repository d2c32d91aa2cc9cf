"""Parses and writes YAML of configurations."""

import re
from collections.abc import Callable
from typing import Any

import yaml

from optimus.errors import UserError

_MOST, _DEEPEST, _DIGITS = 1_000_000, 100, 1000  # maximum numbers of values, nesting levels and digits


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads YAML with numbers such as 4e-4, which YAML 1.1 takes for text."""


class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Puts quotes around text that `Loader` would read as a number."""


for _side in (Loader, Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )


def parse_yaml(text: str, where: str) -> Any:
    """Parses `text`; error messages name the source of the text by `where`.

    Raises `UserError` for invalid YAML, a key written twice, and too many values, nesting levels or digits.
    """
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _size(node, where, (), {}, loader.construct_object)
        return loader.construct_document(node)
    except UserError:
        raise
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark and "\n" in text else ""
        raise UserError(f"{where}{line} is not valid YAML: {getattr(error, 'problem', error)}") from None
    except Exception as error:  # such as a ValueError for an invalid date
        raise UserError(f"{where} is not valid YAML: {error}") from None


def _size(
    node: yaml.Node, where: str, path: tuple[str, ...], known: dict[int, int], value_of: Callable[[yaml.Node], Any]
) -> int:
    """Returns the number of values in a node, with aliases expanded.

    `known` holds the sizes of nodes by identity, 0 for nodes in progress. `value_of` returns the value of a key.
    """
    if (size := known.get(id(node))) is not None:
        if not size:
            raise UserError(f"{where} is not valid YAML: '{'.'.join(path)}' is an alias of a node that contains it")
        return size
    if len(path) > _DEEPEST:
        raise UserError(f"{where}: '{'.'.join(path[:3])}' is nested deeper than {_DEEPEST} levels: reduce the nesting")
    _check_digits(node, where, path)
    known[id(node)], size = 0, 1
    if isinstance(node, yaml.SequenceNode):
        size += sum(_size(each, where, (*path, str(number)), known, value_of) for number, each in enumerate(node.value))
    elif isinstance(node, yaml.MappingNode):
        lines: dict[Any, int] = {}
        for key, value in node.value:
            named = isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge"
            _check_digits(key, where, path)
            # Equal keys may differ in their text, such as 1 and 0x1.
            name, line = value_of(key) if named else None, key.start_mark.line + 1
            if named and name in lines:
                both = f"line {line}" if lines[name] == line else f"lines {lines[name]} and {line}"
                raise UserError(
                    f"{where}: the key '{'.'.join((*path, key.value))}' is given twice ({both}): remove one of them"
                )
            if named:
                lines[name] = line
            size += _size(value, where, (*path, str(key.value)) if named else path, known, value_of)
    if size > _MOST:
        raise UserError(
            f"{where}: '{'.'.join(path)}' expands to more than {_MOST:,} values by nested aliases: use fewer aliases"
        )
    known[id(node)] = size
    return size


def _check_digits(node: yaml.Node, where: str, path: tuple[str, ...]) -> None:
    if node.tag == "tag:yaml.org,2002:int" and len(node.value) > _DIGITS:
        raise UserError(f"{where}: '{'.'.join(path)}' has a number of more than {_DIGITS} digits: shorten it")
