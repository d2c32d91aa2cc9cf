"""Other machines and other software than there are: `network.bandwidth=x2`, `memory=128e9`, `software.collectives=best`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel

from optimus.config.load import SomeSection, keys_of_section, validated
from optimus.config.yaml_text import parse_yaml
from optimus.errors import UserError, nearest

_SOFTWARE = "software."
OtherSection = TypeVar("OtherSection", bound=BaseModel)


def changed_both(
    machine: SomeSection, software: OtherSection, changes: Sequence[str]
) -> tuple[SomeSection, OtherSection]:
    """(machine, software) with changes, those of the software after `software.`. Raises `UserError` naming the wrong one."""
    known = [*keys_of(machine.model_dump()), *keys_of(software.model_dump(), _SOFTWARE)]
    ours = [change for change in changes if change.startswith(_SOFTWARE)]
    others = [change for change in changes if not change.startswith(_SOFTWARE)]
    return changed(machine, others, known), changed(software, ours, known, _SOFTWARE)


def keys_of(raw: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """The path of every value."""
    for key, value in raw.items():
        if isinstance(value, Mapping):
            yield from keys_of(value, f"{before}{key}.")
        else:
            yield before + key


def changed(
    what: SomeSection, changes: Iterable[str], known: Sequence[str] | None = None, before: str = ""
) -> SomeSection:
    """`what` with changes `key.path=value`; a value `x2` is twice what it is. Every key is after `before`.

    Raises `UserError` naming the wrong one, and the nearest of the keys that are `known`, by default those of `what`.
    """
    raw = what.model_dump()
    known = [*keys_of(raw, before)] if known is None else known
    for text in changes:
        key, equals, value = text.partition("=")
        if not equals or not key or not value:
            raise UserError(f"--what-if '{text}' is not of the form key.path=value, such as network.bandwidth=x2")
        *sections, last = key.removeprefix(before).split(".")
        node: Any = raw
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        if not isinstance(node, dict) or (last not in node and not _is_free(type(what), sections)):
            raise UserError(f"--what-if '{text}': there is no '{key}'; {nearest(key, known)}")
        node[last] = _value(text, value, node.get(last))
    return validated(type(what), raw, "--what-if", type(what))


def _is_free(kind: type[BaseModel], path: Sequence[str]) -> bool:
    """Whether what is at `path` takes keys of any name."""
    return bool(path) and not tuple(keys_of_section(path, kind))


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
