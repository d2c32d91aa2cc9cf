"""Reads and writes folders of models that run with the modules of `transformers` or of a plugin."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimus.errors import UserError
from optimus.hub.config_json import ARGUMENTS, FILE, PLUGIN, write_json
from optimus.hub.tensors import FolderTensors, OutputTensor, write_tensors
from optimus.model.foreign.architecture import TransformersModel
from optimus.model.foreign.described import built
from optimus.model.foreign.needed import silent_transformers
from optimus.model.foreign.plugin import PluginModel
from optimus.model.foreign.rows import MODELS
from optimus.model.parameters import named_tensors
from optimus.plugins import loaded_plugins


def read_weights(path: Path, config: TransformersModel | PluginModel) -> dict[str, Tensor]:
    """Returns the tensors of a folder by their names in the module of `transformers` or of the plugin.

    Raises `UserError` if the folder's tensors do not fit the model.
    """
    return _read_plugin(path, config) if isinstance(config, PluginModel) else _read_transformers(path, config)


def _read_plugin(path: Path, config: PluginModel) -> dict[str, Tensor]:
    tensors, module = FolderTensors(path), built(MODELS[config.plugin], config.arguments).spec.module
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(module)}
    if missing := [name for name in shapes if name not in tensors.where]:
        raise UserError(f"{path} lacks the tensor {missing[0]} (and {len(missing) - 1} more): the folder is incomplete")
    if unexpected := [name for name in tensors.where if name not in shapes]:
        raise UserError(
            f"{path} holds the tensor {unexpected[0]} (and {len(unexpected) - 1} more), which {config.plugin} does not have"
        )
    for name, shape in shapes.items():
        if tensors.shape(name) != shape:
            raise UserError(
                f"{path}: {name} has shape {list(tensors.shape(name))}, but {config.plugin} needs {list(shape)}"
            )
    return {name: tensors.read(name) for name in shapes}


def write_plugin_folder(
    config: PluginModel,
    tensors: Iterable[OutputTensor],
    folder: Path,
    size: int,
    *,
    context: int,
    dtype: str,
    further: Mapping[str, Any],
) -> None:
    """Writes a plugin's model: the weights, and config.json with the model's name and arguments, the loaded plugins,
    `context`, `dtype` and the `further` fields."""
    raw: dict[str, Any] = {
        PLUGIN: config.plugin,
        ARGUMENTS: config.arguments,
        "plugins": [each.name for each in loaded_plugins()],
    }
    raw |= {"max_position_embeddings": context, "torch_dtype": dtype, **further}
    write_json(folder / FILE, raw)
    write_tensors(tensors, folder, size)


def _read_transformers(path: Path, config: TransformersModel) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM

    from optimus.model.foreign.code import model_class
    from optimus.model.foreign.configuration import hf_config
    from optimus.model.foreign.twin import with_embedding_first

    described = hf_config(config.text)
    loader = model_class(described) or AutoModelForCausalLM
    dtype = torch.bfloat16 if {*FolderTensors(path).floats().values()} == {torch.bfloat16} else torch.float32
    try:
        with silent_transformers():
            model, found = loader.from_pretrained(
                path, config=described, dtype=dtype, output_loading_info=True, use_safetensors=True
            )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise UserError(f"{path}: `transformers` cannot load the weights: {error}") from None
    if missing := sorted(found["missing_keys"]):
        raise UserError(f"{path} lacks the tensor {missing[0]} (and {len(missing) - 1} more): the folder is incomplete")
    if wrong := sorted(map(str, found["mismatched_keys"])):
        raise UserError(f"{path}: the tensor {wrong[0]} has another shape than the model of model.transformers")
    return {name: tensor.detach() for name, tensor in named_tensors(with_embedding_first(model))}


def write_folder(
    config: TransformersModel, tensors: dict[str, Tensor], folder: Path, dtype: torch.dtype, size: int
) -> None:
    """Writes a folder that `from_pretrained` loads. `tensors` has the names of the `transformers` module.

    Converts parameters, but no buffers, to `dtype`.
    """
    from optimus.model.foreign.code import copy_code
    from optimus.model.foreign.configuration import hf_config
    from optimus.model.foreign.initial import initial_values
    from optimus.model.foreign.twin import build

    model: Any = build(hf_config(config.text), "sdpa", "meta")
    initial_values(model)  # gives the buffers values
    parameters = {name for name, _ in model.named_parameters()}
    converted = {name: tensor.to(dtype) if name in parameters else tensor for name, tensor in tensors.items()}
    model.load_state_dict(converted, strict=False, assign=True)
    model.tie_weights()
    model.config.dtype = dtype
    with silent_transformers():
        model.save_pretrained(folder, max_shard_size=size)
    copy_code(config.transformers, folder)
