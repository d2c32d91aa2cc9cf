"""The models that have a name here."""

from typing import Any

from optimus.config.load import model_config_from, preset_names, resolve_model
from optimus.model.count import count_parameters
from optimus.model.families import families


def models() -> list[dict[str, Any]]:
    """The presets: name, total and active parameters, architecture.

    Example:
        [row["name"] for row in optimus.models()]
    """
    rows: list[dict[str, Any]] = []
    for name in preset_names():
        config = model_config_from(resolve_model(name)["model"], name)
        count = count_parameters(config)
        rows.append(
            {
                "name": name,
                "total_parameters": count.total,
                "active_parameters": count.active,
                **config.model_dump(exclude_none=True),
            }
        )
    return rows


def families_known() -> list[dict[str, Any]]:
    """The families: name, class in `transformers` if there is one, and presets."""
    presets = [(resolve_model(name)["model"]["family"], name) for name in preset_names()]
    return [
        {"name": name, "class": family.architecture, "presets": [preset for of, preset in presets if of == name]}
        for name, family in families().items()
    ]
