"""Converts configurations of earlier versions to the current names of sections, keys and values."""

from collections.abc import Mapping
from typing import Any

from optimus.errors import UserError

RENAMED = {  # current name of a section or key, by its old name; keys have the current name of the section
    "schedule": "lr_schedule",
    "validate": "validation",
    "train.context": "train.sequence_length",
    "lr_schedule.peak": "lr_schedule.lr",
    "lr_schedule.minimum": "lr_schedule.min_lr",
    "state.residency": "state.offload",
    "state.coarsening": "state.all_reduce_tiles",
    "state.device_states": "state.resident_fraction",
    "parallel.warm_up": "parallel.warmup_factor",
    "parallel.in_flight": "parallel.max_in_flight",
    "parallel.blocks": "parallel.layers_per_stage",
    "checkpoint.initial": "checkpoint.load_path",
    "observe.trace": "observe.profile_step",
    "moe.routing": "moe.force_balanced",
    "model.score": "model.router_score",
    "model.window_except": "model.full_attention_every",
}
NEW_VALUES: dict[tuple[str, str], str | bool] = {  # the value under the new name, by old name and old value
    ("state.residency", "device"): "none",
    ("moe.routing", "learned"): False,
    ("moe.routing", "uniform"): True,
}
_OF_VALIDATION = ("text", "every", "max_bytes")  # keys of `validation` that earlier versions had in `evaluate`
MOVED = {f"evaluate.{key}": f"validation: [{{{key}: ...}}]" for key in _OF_VALIDATION}


def new_name(key: str) -> str:
    """Returns the current name of a section or of a key `section.key`."""
    section, dot, name = key.partition(".")
    section = RENAMED.get(section, section)
    return RENAMED.get(f"{section}.{name}", f"{section}.{name}") if dot else section


def with_new_names(written: Mapping[str, Any], where: str = "the configuration") -> dict[str, Any]:
    """Returns a configuration, which was read at `where`, with the current names of keys and values, also within phases.

    Raises `UserError` if a key stands under both its names.
    """
    config: dict[str, Any] = {}
    for section, value in written.items():
        now = new_name(str(section))
        if isinstance(value, Mapping):  # YAML keys need not be strings
            value = _section(str(section), now, value, where)
        elif section == "phases" and isinstance(value, list):
            value = [with_new_names(each, where) if isinstance(each, Mapping) else each for each in value]
        _add(config, str(section), now, value, where)
    return _with_sets(config)


def _section(section: str, now: str, written: Mapping[Any, Any], where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in written.items():
        name = new_name(f"{section}.{key}").partition(".")[2]
        _add(found, f"{section}.{key}", name, _value(section, key, value), where, f"{now}.")
    return found


def _add(found: dict[str, Any], old: str, name: str, value: Any, where: str, prefix: str = "") -> None:
    if name in found:
        raise UserError(f"{where}: '{prefix}{name}' is given twice, once as '{old}': remove one of them")
    found[name] = value


def _value(section: str, key: Any, value: Any) -> Any:
    return NEW_VALUES.get((f"{section}.{key}", value), value) if isinstance(value, str) else value


def _with_sets(config: dict[str, Any]) -> dict[str, Any]:
    evaluate = config.get("evaluate")
    if not isinstance(evaluate, Mapping) or not evaluate.keys() & {*_OF_VALIDATION}:
        return config
    own = {key: value for key, value in evaluate.items() if key in _OF_VALIDATION}
    rest = {key: value for key, value in evaluate.items() if key not in own}
    # Earlier versions validated on `evaluate.text` only if `every` was set.
    sets = [own] if own.get("text") is not None and own.get("every") is not None else []
    given = config.get("validation") or []
    return {**config, "evaluate": rest, "validation": [*sets, *given] if isinstance(given, list) else given}
