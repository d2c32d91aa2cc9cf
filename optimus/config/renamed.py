"""Keys of configurations that had other names in earlier versions."""

from collections.abc import Mapping
from typing import Any

RENAMED = {"schedule": "lr_schedule", "validate": "validation", "train.context": "train.sequence_length"}


def with_new_names(written: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration that a run has kept, with the names of today where an earlier version wrote other ones."""

    def renamed(section: Mapping[str, Any], before: str) -> dict[str, Any]:
        names = {key: f"{before}{key}" for key in section}  # not all of them text, where something else has written it
        return {RENAMED.get(name, name).removeprefix(before): section[key] for key, name in names.items()}

    sections = {
        key: renamed(value, f"{key}.") if isinstance(value, Mapping) else value for key, value in written.items()
    }
    return renamed(sections, "")
