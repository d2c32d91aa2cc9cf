"""Reads the sections of a configuration from a Hugging Face folder. This module does not import torch."""

from pathlib import Path
from typing import Any

from optimus.config.load import preset_names, resolve_model
from optimus.disk import parse_json, user_path
from optimus.errors import UserError, nearest
from optimus.hub.config_json import FILE, has_weights, published_config, read_architecture
from optimus.model.architecture import ModelConfig


def read_model_folder(path: Path, *, own_modules: bool = False) -> dict[str, Any]:
    """Returns the configuration sections for a folder: for the library's modules or, with `own_modules`, for those of
    `transformers`.

    Raises `UserError` like `read_architecture` and `read_foreign`.
    """
    return read_foreign(str(path)) if own_modules else read_architecture(path)


def read_foreign(source: str) -> dict[str, Any]:
    """Returns the configuration sections for `model.transformers`: a folder, a config.json or the name of a preset.

    The section `checkpoint` names the folder if it has weights. Raises `UserError` for a source that does not exist, for a
    damaged config.json and for pickled weights.
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
    sections: dict[str, Any] = {"model": {"transformers": _read_json(file)}}
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
