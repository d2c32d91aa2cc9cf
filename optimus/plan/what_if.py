"""Changes values of machines and profiles, as in `network.bandwidth=x2`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from optimus.config.load import keys_of_section, validated
from optimus.config.yaml_text import parse_yaml
from optimus.errors import UserError, nearest
from optimus.plan.machine import Machine
from optimus.plan.profile import Profile

_PROFILE = "profile"


def changed(machine: Machine, profile: Profile, changes: Sequence[str]) -> tuple[Machine, Profile]:
    """Returns the machine and the profile with the changes `key.path=value`.

    Keys of the profile begin with `profile.`; a value `x2` doubles the present value. Raises `UserError` for an invalid
    change.
    """
    raw = machine.model_dump() | {_PROFILE: profile.model_dump()}
    known = list(_keys_of(raw))
    for text in sorted(changes, key=lambda change: change.startswith(f"{_PROFILE}.")):
        key, equals, value = text.partition("=")
        if not equals or not key or not value:
            raise UserError(f"--what-if '{text}' is not of the form key.path=value, such as network.bandwidth=x2")
        *sections, last = key.split(".")
        node: Any = raw
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        if key == _PROFILE or not isinstance(node, dict) or (last not in node and not _is_free(sections)):
            raise UserError(f"--what-if '{text}': there is no key '{key}'; {nearest(key, known)}")
        node[last] = _value(text, value, node.get(last))
    other = raw.pop(_PROFILE)
    return validated(Machine, raw, "--what-if", Machine), validated(Profile, other, "--what-if", Profile)


def _keys_of(raw: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for key, value in raw.items():
        if isinstance(value, Mapping):
            yield from _keys_of(value, f"{before}{key}.")
        else:
            yield before + key


def _is_free(path: Sequence[str]) -> bool:
    """True if the mapping at `path` of a machine may get new keys."""
    return path not in ([], [_PROFILE]) and not tuple(keys_of_section(path, Machine))


def _value(text: str, value: str, now: Any) -> Any:
    times, numeric = value.startswith("x"), isinstance(now, int | float) and not isinstance(now, bool)
    try:
        number = float(value[times:])
    except ValueError:
        if numeric or (times and not isinstance(now, str)):
            raise UserError(f"--what-if '{text}': {value} is neither a number nor a factor such as x2") from None
        return parse_yaml(value, f"--what-if '{text}'")
    if times:
        if not numeric:
            raise UserError(
                f"--what-if '{text}': a factor needs a number to multiply, but the present value is {now!r}"
            )
        number *= now
    return int(number) if isinstance(now, int) and number.is_integer() else number
