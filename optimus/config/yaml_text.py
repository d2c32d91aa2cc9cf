"""YAML as configurations are written in it: numbers such as 4e-4, and no key twice."""

import re
from typing import Any

import yaml

from optimus.errors import UserError


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML with numbers such as 4e-4 read as numbers (YAML 1.1 takes them for text)."""


class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Puts quotes around text, such as a folder named 1e5, that `Loader` would read as a number."""


for _side in (Loader, Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )


def parse_yaml(text: str, where: str) -> Any:
    """What `text`, which stands at `where`, says. Raises `UserError` for what is no YAML and for a repeated key."""
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_repeated(node, where, "")
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark and "\n" in text else ""
        raise UserError(f"{where}{line} is not valid YAML: {getattr(error, 'problem', error)}") from None
    except (ValueError, TypeError, RecursionError) as error:  # no date; a mapping as a key; a list in itself
        raise UserError(f"{where} is not valid YAML: {error}") from None


def _refuse_repeated(node: yaml.Node, where: str, path: str) -> None:
    """Of two values of one key YAML takes the last, and nobody sees that the first does not count."""
    if isinstance(node, yaml.SequenceNode):
        for number, each in enumerate(node.value):
            _refuse_repeated(each, where, f"{path}{number}.")
        return
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[tuple[str, str], int] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        name, line = (key.tag, key.value), key.start_mark.line + 1
        if name in lines:
            both = f"line {line}" if lines[name] == line else f"lines {lines[name]} and {line}"
            raise UserError(f"{where}: the key '{path}{key.value}' stands twice ({both}): remove one of them")
        lines[name] = line
        _refuse_repeated(value, where, f"{path}{key.value}.")
