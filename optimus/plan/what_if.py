"""Other machines than there are: changes such as `network.bandwidth=x2` or `memory=128e9`."""

from collections.abc import Iterable
from typing import Any

import yaml
from pydantic import ValidationError

from optimus.config.load import explain
from optimus.errors import UserError
from optimus.plan.machine import Machine


def changed(machine: Machine, changes: Iterable[str]) -> Machine:
    """`machine` with changes `key.path=value`; a value `x2` is twice what it is. Raises `UserError` naming the wrong one."""
    raw = machine.model_dump()
    for text in changes:
        key, equals, value = text.partition("=")
        if not equals or not key or not value:
            raise UserError(f"--what-if '{text}' is not of the form key.path=value, such as network.bandwidth=x2")
        *sections, last = key.split(".")
        node: Any = raw
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            raise UserError(f"--what-if '{text}': a machine has no section '{'.'.join(sections)}'")
        node[last] = _value(text, value, node.get(last))
    try:
        return Machine.model_validate(raw)
    except ValidationError as error:
        raise UserError("--what-if: " + "; ".join(explain(error, Machine))) from None


def _value(text: str, value: str, now: Any) -> Any:
    times = value.startswith("x")
    try:
        number = float(value[times:])
    except ValueError:
        if times or not isinstance(now, str):
            raise UserError(f"--what-if '{text}': {value} is no number, nor a factor such as x2") from None
        return yaml.safe_load(value)
    if times:
        if not isinstance(now, int | float):
            raise UserError(f"--what-if '{text}': what it is now is no number")
        number *= now
    return int(number) if isinstance(now, int) and number.is_integer() else number
