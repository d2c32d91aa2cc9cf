"""Lists of the presets and model families."""

from typing import Any

from optimus.config.load import model_config_from, preset_names, preset_parameters, resolve_model
from optimus.model.families import families


def models() -> list[dict[str, Any]]:
    """Returns the presets: name, total and active parameters, fields of the architecture.

    Example:
        [row["name"] for row in optimus.models()]
    """
    rows: list[dict[str, Any]] = []
    for name in preset_names():
        config = model_config_from(resolve_model(name)["model"], name)
        numbers = {f"{kind}_parameters": number for kind, number in preset_parameters(name).items()}
        rows.append({"name": name, **numbers, **config.model_dump(exclude_none=True)})
    return rows


def families_known() -> list[dict[str, Any]]:
    """Returns the families: name, class in `transformers` if there is one, and presets."""
    presets = [(resolve_model(name)["model"]["family"], name) for name in preset_names()]
    return [
        {"name": name, "class": family.architecture, "presets": [preset for of, preset in presets if of == name]}
        for name, family in families().items()
    ]
