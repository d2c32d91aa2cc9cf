"""Reads and writes folders of models of `transformers` that run with their own modules.

`transformers` itself reads and writes the weights of these folders, because only its classes know how stored tensors map
to parameters.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimus.errors import UserError
from optimus.model.foreign.architecture import TransformersModel
from optimus.model.foreign.needed import silent_transformers


def read_weights(path: Path, config: TransformersModel) -> dict[str, Tensor]:
    """Returns the parameters of a folder by the author's names, in the dtype of the folder.

    Raises `UserError` for a folder of another model and for missing tensors.
    """
    from transformers import AutoModelForCausalLM

    from optimus.model.foreign.configuration import hf_config

    try:
        with silent_transformers():
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
    from optimus.model.foreign.configuration import hf_config
    from optimus.model.foreign.twin import build

    model: Any = build(hf_config(config.text), "sdpa", "meta")
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()}, strict=False, assign=True)
    model.tie_weights()
    model.config.dtype = dtype
    with silent_transformers():
        model.save_pretrained(folder, max_shard_size=size)
