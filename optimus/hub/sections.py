"""Reads configuration sections from a Hugging Face folder, a config.json or a preset. Does not import torch."""

from pathlib import Path
from typing import Any

from optimus.config.load import preset_names, resolve_model
from optimus.disk import parse_json, user_path
from optimus.errors import UserError, nearest
from optimus.hub.config_json import FILE, has_weights, published_config, read_architecture
from optimus.model.architecture import ModelConfig


def read_model_folder(path: Path, *, own_modules: bool = False) -> dict[str, Any]:
    """Returns the configuration sections for a folder. With `own_modules`, the model has modules of `transformers`."""
    return read_foreign(str(path)) if own_modules else read_architecture(path)


def read_foreign(source: str) -> dict[str, Any]:
    """Returns the configuration sections for a model with the modules of `transformers`.

    `source` is the name of a preset, a folder or a config.json. Raises `UserError` for a source that does not exist or
    cannot be read, for a config.json without `model_type`, and for a folder with pickled weights only.
    """
    if source in preset_names():
        model = ModelConfig.model_validate(resolve_model(source)["model"])
        return {"model": {"transformers": published_config(model)}}
    path = user_path(source)
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"model.transformers: '{source}' is neither a folder with a {FILE}, nor such a file, nor a preset; "
            f"{nearest(source, preset_names())}"
        )
    raw = _read_json(file)
    if raw.get("auto_map"):
        raw["_name_or_path"] = str(file.parent.resolve())  # the folder with the code; the file may be a link
    sections: dict[str, Any] = {"model": {"transformers": raw}}
    if path.is_dir() and has_weights(path):
        sections["checkpoint"] = {"load_path": str(path)}
    return sections


def _read_json(file: Path) -> dict[str, Any]:
    try:
        raw = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise UserError(f"{file} has no model_type: it is not the configuration of a model of `transformers`")
    return raw
