"""Other machines and other software than there are: `network.bandwidth=x2`, `memory=128e9`, `software.collectives=best`."""

from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from optimus.config.load import SomeSection, explain
from optimus.config.yaml_text import parse_yaml
from optimus.errors import UserError


def changed(what: SomeSection, changes: Iterable[str]) -> SomeSection:
    """`what` with changes `key.path=value`; a value `x2` is twice what it is. Raises `UserError` naming the wrong one."""
    raw = what.model_dump()
    for text in changes:
        key, equals, value = text.partition("=")
        if not equals or not key or not value:
            raise UserError(f"--what-if '{text}' is not of the form key.path=value, such as network.bandwidth=x2")
        *sections, last = key.split(".")
        node: Any = raw
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            raise UserError(f"--what-if '{text}': there is no section '{'.'.join(sections)}' in it")
        node[last] = _value(text, value, node.get(last))
    return checked(type(what), raw, "--what-if")


def checked(kind: type[SomeSection], raw: dict[str, Any], where: str) -> SomeSection:
    """A section of these values. Raises `UserError` for those that it cannot have."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise UserError(f"{where}: " + "; ".join(explain(error, kind))) from None


def _value(text: str, value: str, now: Any) -> Any:
    times = value.startswith("x")
    try:
        number = float(value[times:])
    except ValueError:
        if times or not isinstance(now, str):
            raise UserError(f"--what-if '{text}': {value} is no number, nor a factor such as x2") from None
        return parse_yaml(value, f"--what-if '{text}'")
    if times:
        if not isinstance(now, int | float):
            raise UserError(f"--what-if '{text}': what it is now is no number")
        number *= now
    return int(number) if isinstance(now, int) and number.is_integer() else number
