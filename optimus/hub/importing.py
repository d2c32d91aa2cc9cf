"""Imports a Hugging Face folder as a model or a checkpoint."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from optimus.checkpoint.masks import PREFIX, booleans, check_fits, share_of
from optimus.checkpoint.slices import TensorSlice
from optimus.checkpoint.store import check_same_model, save_model
from optimus.config import Architecture
from optimus.config.load import architecture_from
from optimus.disk import user_path
from optimus.errors import UserError
from optimus.hub.config_json import FILE, context_of, further_layers, read_config, read_model, read_plugin_model
from optimus.hub.foreign import read_weights
from optimus.hub.keys import Published, fused, published
from optimus.hub.published import read_published
from optimus.hub.tensors import MASKS, FolderTensors
from optimus.model import CausalModel
from optimus.model.architecture import ModelConfig
from optimus.model.build import causal_model
from optimus.model.count import too_large
from optimus.model.families import families
from optimus.model.foreign.adapted import AdaptedModel
from optimus.model.foreign.architecture import TransformersModel
from optimus.model.foreign.plugin import PluginModel
from optimus.model.parameters import named_tensors
from optimus.plugins import Plugin, load_plugins


def import_folder(hf_dir: str | Path, output: str | Path, *, plugins: Sequence[str] = ()) -> dict[str, Any]:
    """Converts a Hugging Face folder into a checkpoint of weights, in bfloat16 if all weights are, else in float32.

    Returns `checkpoint`, `family`, `parameters`, `context`, `dtype`, `eos_id`, `tokenizer` (True if the folder has a
    tokenizer) and `left_out` (a description of omitted layers, or None). `plugins` names the plugins that the folder's
    model needs.

    Example:
        optimus.import_folder("huggingface", "imported")
        optimus.evaluate("imported", text="held-out/")
    """
    loaded = load_plugins(plugins)
    path, output = user_path(hf_dir), user_path(output)
    if (described := read_plugin_model(path)) is not None:
        return _import_plugin_folder(path, architecture_from(described, str(path / FILE)), output, loaded)
    raw = read_config(path)
    model_config, tensors = read_model(path), FolderTensors(path)
    if too_large(model_config, len(tensors.where), tensors.elements):
        raise UserError(
            f"{path / FILE} describes a model with many times the parameters that the weights beside it have"
        )
    model = causal_model(model_config)
    buffers = {
        name for own, buffer in model.named_buffers() for name, *_ in published(model_config.family, own, buffer)
    }
    further = _further_tensors(path, tensors)
    dtypes = {tensors.dtype(name) for name in tensors.where if name not in buffers and name not in further}
    model = model.to(torch.bfloat16 if dtypes == {torch.bfloat16} else torch.float32)
    _fill(model, tensors, path)
    context = context_of(path)
    eos_id = _eos_id(raw, model_config.vocab)
    tokenizer = file if (file := path / "tokenizer.json").is_file() else None
    masks = _checked_masks(path, model)
    said = read_published(path)
    save_model(
        model, output, context=context, tokenizer=tokenizer, eos_id=eos_id, masks=masks, published=said, plugins=loaded
    )
    return _imported(model, output, context, eos_id, tokenizer) | {"left_out": omitted_layers(path, model_config)}


def _imported(
    model: CausalModel, output: Path, context: int, eos_id: int | None, tokenizer: Path | None
) -> dict[str, Any]:
    """Returns the result of `import_folder` with `left_out` None."""
    return {
        "checkpoint": str(output),
        "family": model.config.family,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "context": context,
        "dtype": str(model.embedding.weight.dtype).removeprefix("torch."),
        "eos_id": eos_id,
        "tokenizer": tokenizer is not None,
        "left_out": None,
    }


def _import_plugin_folder(path: Path, config: Architecture, output: Path, loaded: list[Plugin]) -> dict[str, Any]:
    assert isinstance(config, PluginModel)
    model, tensors = causal_model(config), FolderTensors(path)
    dtypes = {tensors.dtype(name) for name in config.shapes if name in tensors.where}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16 if dtypes == {torch.bfloat16} else torch.float32)
    load_weights(model, path)
    eos_id = _eos_id(read_config(path), config.vocab)
    tokenizer = file if (file := path / "tokenizer.json").is_file() else None
    masks = _checked_masks(path, model)
    context = context_of(path)
    save_model(model, output, context=context, tokenizer=tokenizer, eos_id=eos_id, masks=masks, plugins=loaded)
    return _imported(model, output, context, eos_id, tokenizer)


class FolderReader:
    """Fills slices with the weights and masks of a Hugging Face folder.

    The first call of `fill` reads all weights.
    """

    def __init__(self, path: Path, model: Architecture) -> None:
        self.path, self._model = path, model
        with torch.device("meta"):
            made = causal_model(model)
        parameters = _shapes(made)
        masks = read_masks(path, parameters)
        self.shapes = {f"model.{name}": tuple(tensor.shape) for name, tensor in named_tensors(made)}
        self.shapes |= {key: tuple(mask.shape) for key, mask in masks.items()}
        self.unpruned = share_of(masks, parameters)
        self._tensors: dict[str, Tensor] = {}

    def fill(self, slices: Iterable[TensorSlice]) -> None:
        """Fills the tensors of `slices` in place."""
        if not self._tensors:
            model = causal_model(self._model)
            load_weights(model, self.path)
            self._tensors = {f"model.{name}": tensor for name, tensor in named_tensors(model)}
            self._tensors |= read_masks(self.path, _shapes(model))
        for slice_ in slices:
            region = tuple(slice(start, start + size) for start, size in zip(slice_.offsets, slice_.tensor.shape))
            slice_.tensor.copy_(self._tensors[slice_.key][region])


def read_masks(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Reads the masks in a Hugging Face folder, by key.

    Raises `UserError` if a mask is damaged or does not fit the `shapes` of the parameters.
    """
    file = path / MASKS
    if not file.is_file():
        return {}
    try:
        masks = load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is damaged ({error}): get the file again") from error
    for key, mask in masks.items():
        if mask.dtype != torch.uint8 or not key.startswith(PREFIX):
            raise UserError(
                f"{file}: {key} of type {str(mask.dtype).removeprefix('torch.')} is not a mask that `optimus export` wrote "
                f"({PREFIX}NAME, uint8): remove or rename the file"
            )
        check_fits(file, key, tuple(mask.shape), shapes.get(key.removeprefix(PREFIX)))
    return masks


def _checked_masks(path: Path, model: CausalModel) -> dict[str, Tensor]:
    """Reads masks like `read_masks`. Raises `UserError` if a mask prunes weights of `model` that are not zero."""
    masks = read_masks(path, _shapes(model))
    for key, mask in masks.items():
        weights = model.get_parameter(key.removeprefix(PREFIX))
        if bool(weights[~booleans(mask, tuple(weights.shape))].any()):
            raise UserError(
                f"{path / MASKS}: {key} prunes weights that are not zero: it belongs to another model. Remove the file, or "
                "get the folder again"
            )
    return masks


def _shapes(model: CausalModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def load_weights(model: CausalModel, path: Path) -> None:
    """Fills the parameters and persistent buffers of `model` from the safetensors of a Hugging Face folder.

    Raises `UserError` for missing or mis-shaped tensors, and for a dtype that `model` would round; unless `model`
    comes from `transformers`, also for unexpected tensors. Does not check the architecture of an `AdaptedModel`: call
    `check_same_folder` before.
    """
    if isinstance(model.config, AdaptedModel):
        _check_dtypes(model, FolderTensors(path))
        model.fill_from(read_weights(path, model.config))
        return
    check_same_folder(path, model.config)
    _fill(model, FolderTensors(path), path)


def _check_dtypes(model: CausalModel, tensors: FolderTensors) -> None:
    """Raises `UserError` if the parameters of an adapted model would round a tensor of the folder."""
    ours, buffers = next(model.parameters()).dtype, dict(model.named_buffers())
    for name, dtype in tensors.floats().items():
        if name not in buffers:
            _check_exact(tensors.where[name], name, dtype, ours)


def _check_exact(file: Path, name: str, dtype: torch.dtype, ours: torch.dtype) -> None:
    if torch.promote_types(dtype, ours) != ours:
        raise UserError(f"{file}: {name} is {dtype}, which a model in {ours} would round: use a wider type")


def check_same_folder(path: Path, model: Architecture) -> None:
    """Raises `UserError` if the folder `path` has another architecture than `model`."""
    if isinstance(model, TransformersModel):
        trust = bool(model.trust_remote_code)
        check_same_model(TransformersModel(transformers=read_config(path), trust_remote_code=trust), model, path / FILE)
        return
    described = read_plugin_model(path)
    found = read_model(path) if described is None else architecture_from(described, str(path / FILE))
    check_same_model(found, model, path / FILE)


def omitted_layers(path: Path, model: Architecture) -> str | None:
    """Describes the multi-token prediction layers that `model` omits, or returns None."""
    if not isinstance(model, ModelConfig):
        return None
    tensors = _further_tensors(path, FolderTensors(path))
    if not tensors:
        return None
    _, layers = further_layers(path)
    which = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
    return f"{path}: left out {which} ({len(tensors)} tensors) for multi-token prediction, as transformers does"


def _further_tensors(path: Path, tensors: FolderTensors) -> set[str]:
    beginning, layers = further_layers(path)
    beginnings = tuple(beginning.format(i=layer) for layer in layers)
    return {name for name in tensors.where if name.startswith(beginnings)}


@torch.no_grad()
def _fill(model: CausalModel, tensors: FolderTensors, path: Path) -> None:
    targets = _targets(model, tensors)
    if missing := [name for name in targets if name not in tensors.where]:
        raise UserError(f"{path} lacks the tensor {missing[0]} (and {len(missing) - 1} more): the folder is incomplete")
    known = targets.keys() | _further_tensors(path, tensors)
    unexpected = [name for name in tensors.where if name not in known and not _is_no_parameter(name, model, tensors)]
    if unexpected:
        raise UserError(
            f"{tensors.where[unexpected[0]]} holds the tensor {unexpected[0]} (and {len(unexpected) - 1} more), which "
            f"the model that {FILE} describes does not have"
        )
    for name, target in targets.items():
        _check_fits(name, target, tensors)
    for name, target in targets.items():
        target.view.copy_(tensors.read(name).view(target.view.shape))


def _targets(model: CausalModel, tensors: FolderTensors) -> dict[str, Published]:
    """Maps the names of the folder's tensors to views of the model's tensors."""
    family = model.config.family
    targets: dict[str, Published] = {}
    for name, tensor in named_tensors(model):
        joined = fused(family, name, tensor)
        pairs = [joined] if joined and joined.name in tensors.where else published(family, name, tensor)
        targets.update((_stored(each.name, family, tensors), each) for each in pairs)
    return targets


def _stored(name: str, family: str, tensors: FolderTensors) -> str:
    """Returns the name in this folder of the published tensor `name`, with or without the family's prefix."""
    return name if name in tensors.where else name.removeprefix(families()[family].prefix)


def _is_no_parameter(name: str, model: CausalModel, tensors: FolderTensors) -> bool:
    """Returns True for a buffer, and for a copy of a tied embedding."""
    if any(re.fullmatch(pattern, name) for pattern in families()[model.config.family].no_parameters):
        return True
    ((embedding, *_),) = published(model.config.family, "embedding.weight", model.embedding.weight)
    ((head, *_),) = published(model.config.family, "head.weight", model.embedding.weight)
    embedding = _stored(embedding, model.config.family, tensors)
    return model.config.tie_embeddings and name == head and torch.equal(tensors.read(head), tensors.read(embedding))


def _check_fits(name: str, target: Published, tensors: FolderTensors) -> None:
    shape, dtype, file, ours = tensors.shape(name), tensors.dtype(name), tensors.where[name], target.view.dtype
    if shape != target.shape:
        raise UserError(f"{file}: {name} has shape {list(shape)}, but the model needs {list(target.shape)}")
    _check_exact(file, name, dtype, ours)


def _eos_id(raw: dict[str, Any], vocab: int) -> int | None:
    """Returns the first end-of-text token; None without such a token, or if the vocabulary does not have the token."""
    given = raw.get("eos_token_id")
    first = given[0] if isinstance(given, list) and given else given
    return first if type(first) is int and 0 <= first < vocab else None
