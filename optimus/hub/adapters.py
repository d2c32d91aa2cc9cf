"""Exports the low-rank factors of a run (`train.lora_rank`) as an adapter in the format of PEFT.

Legend: R rank, L inputs.
"""

import re
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from optimus.checkpoint.copying import local_checkpoint
from optimus.checkpoint.factors import factors_of, is_factor
from optimus.checkpoint.folder import frozen_beside, read_description
from optimus.checkpoint.reader import Reader
from optimus.checkpoint.slices import full_slices
from optimus.copies import copied, is_url, url_text
from optimus.disk import user_path
from optimus.errors import UserError
from optimus.hub.config_json import ADAPTER, no_export, write_json
from optimus.hub.config_json import FILE as CONFIG_JSON
from optimus.hub.exporting import check_free, new_folder
from optimus.hub.keys import published
from optimus.model.architecture import own_model
from optimus.model.families import Key, families
from optimus.model.low_rank import has_zeros
from optimus.plugins import load_plugins, note_changed_plugins

_OURS, _THEIRS = "model.", "base_model.model."
_WEIGHTS = "adapter_model.safetensors"


_WITHOUT = ": leave `adapter` out to export the whole model, with the factors added"


def export_adapter(
    checkpoint: str | Path, output: str | Path, base: str | None = None, *, plugins: Iterable[str] = ()
) -> dict[str, Any]:
    """Writes the low-rank factors of a full checkpoint, and its other trained parameters, as an adapter for PEFT.

    `base` is the folder or the Hugging Face repo id of the published model that training started from. Returns
    `output`, `rank`, `modules` (number of adapted matrices), `tensors` (number), `saved` (names of the trained modules
    that have no factors), `base` and `bytes`.

    Example:
        api.export_adapter("runs/low-rank", "adapter", base="olmoe")["modules"]
    """
    load_plugins([*plugins])
    if is_url(output):
        made = copied(output, ADAPTER, lambda folder: export_adapter(checkpoint, folder, base))
        return made | {"output": url_text(output)}
    output, path = user_path(output), local_checkpoint(checkpoint)
    check_free(output)
    about, reader = read_description(path), Reader.open(path)
    note_changed_plugins(about.plugins, path)
    if (why := no_export(own_model(about.model, "export --adapter", _WITHOUT))) is not None:
        raise UserError(why)
    weights = [
        key for key in reader.stored if factors_of(key) and all(each in reader.stored for each in factors_of(key))
    ]
    beside = frozen_beside(path, about)
    frozen = set() if beside is None else {*Reader.open(beside).stored}
    others = {key for key in reader.stored if key.startswith(_OURS) and not is_factor(key)}
    if (why := _no_adapter(reader, weights, others - frozen)) is not None:
        raise UserError(f"{path} {why}. Leave `adapter` out to export the whole model")
    started = about.config.get("checkpoint", {}).get("load_path")
    base = base or (started if started is not None and (Path(started) / CONFIG_JSON).is_file() else None)
    if base is None:
        raise UserError(
            f"{path} does not say from which published model its training started: export that model, and name its folder "
            "as `base`"
        )
    modules, tensors = _factors(reader, weights)
    saved, biases, more = _others(reader, others, frozen, modules)
    if around := [each for each in sorted(saved) if any(module.startswith(f"{each}.") for module in modules)]:
        raise UserError(
            f"{path} trains parameters of {around[0]} itself, which PEFT cannot save beside the factors of its "
            "matrices: add them to train.freeze, or leave `adapter` out to export the whole model"
        )
    tensors |= more
    rank = reader.shapes[factors_of(weights[0])[1]][0]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": rank,  # the scale lora_alpha / r is 1
        "lora_dropout": 0.0,
        "bias": "lora_only" if biases else "none",
        "target_modules": sorted(modules),
        "modules_to_save": sorted(saved) or None,
        "fan_in_fan_out": any(_key(about.model.family, key).transposed for key in weights),
        "inference_mode": True,
    }
    with new_folder(output) as folder:
        save_file({name: each.contiguous() for name, each in tensors.items()}, folder / _WEIGHTS, {"format": "pt"})
        write_json(folder / ADAPTER, config)
    return {
        "output": str(output),
        "rank": rank,
        "modules": len(modules),
        "tensors": len(tensors),
        "saved": sorted(saved),
        "base": base,
        "bytes": sum(file.stat().st_size for file in output.iterdir()),
    }


def _no_adapter(reader: Reader, weights: Sequence[str], trained: Iterable[str]) -> str | None:
    """Returns the reason why no PEFT adapter can hold the factors and the `trained` parameters, or None."""
    model = reader.description.model
    if not weights:
        return "has no low-rank factors: an adapter needs a full checkpoint of a run with train.lora_rank"
    if pruned := [key for key in weights if has_zeros(_read(reader, key))]:
        return f"is pruned ({pruned[0]} has zeros), and PEFT would fill the zeros"
    if model.tie_embeddings and f"{_OURS}embedding.weight" in trained:
        return (
            "trains the embedding, which is also the output layer, and PEFT would untie the two: add embedding to "
            "train.freeze"
        )
    if experts := sorted(key for key in trained if "{e}" in _key(model.family, key).names[0]):
        return (
            f"trains the experts {experts[0].removeprefix(_OURS)}, which `transformers` fuses and PEFT would leave out: add "
            "expert to train.freeze"
        )
    return None


def _factors(reader: Reader, weights: Iterable[str]) -> tuple[list[str], dict[str, Tensor]]:
    """Returns the names of the published matrices that have factors, and the factors by name in PEFT."""
    family, modules, tensors = reader.description.model.family, list[str](), dict[str, Tensor]()
    for key in weights:
        b, a_RL = (_read(reader, each) for each in factors_of(key))
        for each in published(family, key.removeprefix(_OURS), b):
            modules.append(each.name.removesuffix(".weight"))
            b_view = each.view.mT if _key(family, key).transposed else each.view
            tensors[f"{_THEIRS}{modules[-1]}.lora_A.weight"] = a_RL.clone()
            tensors[f"{_THEIRS}{modules[-1]}.lora_B.weight"] = b_view.reshape(-1, len(a_RL))
    return modules, tensors


def _others(
    reader: Reader, keys: Iterable[str], frozen: Container[str], adapted: Container[str]
) -> tuple[set[str], bool, dict[str, Tensor]]:
    """Returns (modules for PEFT's `modules_to_save`, True if biases of `adapted` matrices were trained, the tensors of
    these modules and biases)."""
    family, tensors, biases = reader.description.model.family, dict[str, Tensor](), False
    modules = {key: _modules(family, key, reader) for key in sorted(keys)}
    trained = {module for key, named in modules.items() if key not in frozen for module in named}
    saved = {module for module in trained if module not in adapted}
    for key, named in modules.items():
        if key in frozen and not saved.intersection(named):
            continue
        for module, each in zip(named, published(family, key.removeprefix(_OURS), _read(reader, key))):
            parameter = each.name.removeprefix(f"{module}.")
            if module in saved:
                tensors[f"{_THEIRS}{each.name}"] = each.view.reshape(each.shape)
            elif key not in frozen:  # the bias of a matrix with factors
                biases = True
                tensors[f"{_THEIRS}{module}.base_layer.{parameter}"] = each.view.reshape(each.shape)
    return saved, biases, tensors


def _key(family: str, key: str) -> Key:
    return families()[family].keys[re.sub(r"^blocks\.\d+\.", "blocks.{i}.", key.removeprefix(_OURS))]


def _modules(family: str, key: str, reader: Reader) -> list[str]:
    """Returns the published modules of the library's parameter `key`."""
    shapes = torch.empty(reader.shapes[key], device="meta")
    return [each.name.rpartition(".")[0] for each in published(family, key.removeprefix(_OURS), shapes)]


def _read(reader: Reader, key: str) -> Tensor:
    tensor = torch.empty(reader.shapes[key])
    reader.fill(full_slices([(key, tensor)], prefix=""), apart=True)
    return tensor
