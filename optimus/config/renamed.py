"""Keys of configurations that had other names in earlier versions."""

from collections.abc import Mapping
from typing import Any

RENAMED = {"schedule": "lr_schedule", "validate": "validation", "train.context": "train.sequence_length"}
# What was measured by `evaluate`, as the set without a name of `validation`.
_OF_VALIDATION = ("text", "every", "max_bytes")
MOVED = {f"evaluate.{key}": f"validation: [{{{key}: ...}}]" for key in _OF_VALIDATION}


def with_new_names(written: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration that a run has kept, with the names of today where an earlier version wrote other ones."""

    def renamed(section: Mapping[str, Any], before: str) -> dict[str, Any]:
        names = {key: f"{before}{key}" for key in section}  # not all of them text, where something else has written it
        return {RENAMED.get(name, name).removeprefix(before): section[key] for key, name in names.items()}

    sections = {
        key: renamed(value, f"{key}.") if isinstance(value, Mapping) else value for key, value in written.items()
    }
    return _with_sets(renamed(sections, ""))


def _with_sets(config: dict[str, Any]) -> dict[str, Any]:
    evaluate = config.get("evaluate")
    if not isinstance(evaluate, Mapping) or not evaluate.keys() & {*_OF_VALIDATION}:
        return config
    own = {key: value for key, value in evaluate.items() if key in _OF_VALIDATION}
    rest = {key: value for key, value in evaluate.items() if key not in own}
    # Without a number of steps it was never measured.
    sets = [own] if own.get("text") is not None and own.get("every") is not None else []
    return {**config, "evaluate": rest, "validation": [*sets, *(config.get("validation") or [])]}
