"""Folders of models of `transformers` that run with their own modules.

`transformers` itself reads and writes the weights of these folders, because only its classes know how stored tensors map
to parameters.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimus.config.load import preset_names, resolve_model
from optimus.disk import parse_json, user_path
from optimus.errors import UserError, nearest
from optimus.hub.config_json import FILE, has_weights, published_config, read_architecture
from optimus.model.architecture import ModelConfig
from optimus.model.foreign.architecture import TransformersModel


def read_model_folder(path: Path, *, own_modules: bool = False) -> dict[str, Any]:
    """Returns the configuration sections for a folder: for the library's modules, or with `own_modules` for the model's own.

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
    sections: dict[str, Any] = {"model": {"transformers": parse_json(file.read_text(encoding="utf-8"), str(file))}}
    if path.is_dir() and has_weights(path):
        sections["checkpoint"] = {"load_path": str(path)}
    return sections


def read_weights(path: Path, config: TransformersModel) -> dict[str, Tensor]:
    """Returns the parameters of a folder by the author's names, in the dtype of the folder.

    Raises `UserError` for a folder of another model and for missing tensors.
    """
    from transformers import AutoModelForCausalLM

    from optimus.model.foreign.model import hf_config

    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            path, config=hf_config(config.text), dtype="auto", output_loading_info=True, use_safetensors=True
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise UserError(f"{path}: `transformers` cannot load the weights: {error}") from None
    if missing := sorted(found["missing_keys"]):
        raise UserError(f"{path} lacks the tensor {missing[0]} (and {len(missing) - 1} more): the folder is incomplete")
    if wrong := sorted(map(str, found["mismatched_keys"])):
        raise UserError(f"{path}: the tensor {wrong[0]} has another shape than the model of model.transformers")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def write_folder(
    config: TransformersModel, tensors: dict[str, Tensor], folder: Path, dtype: torch.dtype, size: int
) -> None:
    """Writes a folder that `from_pretrained` loads, from parameters by the author's names. Files have at most `size`
    bytes."""
    from optimus.model.foreign.model import hf_config
    from optimus.model.foreign.twin import build

    model: Any = build(hf_config(config.text), "sdpa", "meta")
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()}, strict=False, assign=True)
    model.tie_weights()
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size=size)


def same_model(folder: Path, config: TransformersModel) -> str | None:
    """Returns the keys of the folder's config.json whose values differ from `config`; None if none differ."""
    raw = json.loads((folder / FILE).read_text(encoding="utf-8"))
    differing = [key for key, value in config.transformers.items() if key in raw and raw[key] != value]
    return ", ".join(differing) or None
