"""Configuration keys and values that had other names in earlier versions."""

from collections.abc import Mapping
from typing import Any

RENAMED = {  # current name of a section or key, by its old name
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
# These keys of `evaluate` are now the keys of the set in `validation` that has no name.
_OF_VALIDATION = ("text", "every", "max_bytes")
MOVED = {f"evaluate.{key}": f"validation: [{{{key}: ...}}]" for key in _OF_VALIDATION}


def new_name(key: str) -> str:
    """Returns the current name of a section or of a key `section.key`; both parts may have changed."""
    section, dot, name = key.partition(".")
    section = RENAMED.get(section, section)
    return RENAMED.get(f"{section}.{name}", f"{section}.{name}") if dot else section


def with_new_names(written: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration that an earlier run has written, with the current names of its keys and values, also
    within phases."""
    config: dict[str, Any] = {}
    for section, value in written.items():
        if isinstance(value, Mapping):  # YAML keys may not be strings
            value = {
                new_name(f"{section}.{key}").partition(".")[2]: _value(section, key, each)
                for key, each in value.items()
            }
        elif section == "phases" and isinstance(value, list):
            value = [with_new_names(each) if isinstance(each, Mapping) else each for each in value]
        config[new_name(str(section))] = value
    return _with_sets(config)


def _value(section: str, key: Any, value: Any) -> Any:
    return NEW_VALUES.get((f"{section}.{key}", value), value) if isinstance(value, str) else value


def _with_sets(config: dict[str, Any]) -> dict[str, Any]:
    evaluate = config.get("evaluate")
    if not isinstance(evaluate, Mapping) or not evaluate.keys() & {*_OF_VALIDATION}:
        return config
    own = {key: value for key, value in evaluate.items() if key in _OF_VALIDATION}
    rest = {key: value for key, value in evaluate.items() if key not in own}
    # Earlier versions measured the text only if `every` was set.
    sets = [own] if own.get("text") is not None and own.get("every") is not None else []
    return {**config, "evaluate": rest, "validation": [*sets, *(config.get("validation") or [])]}
