"""The architecture in `config.json`, from and to our `ModelConfig`, by the fields that its family names.

What our models cannot express is refused by name, because a model that loads and computes something else is the worst
outcome. `transformers` itself is not needed for any of this.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimus.config.load import model_config_from
from optimus.errors import UserError
from optimus.model.architecture import ModelConfig
from optimus.model.families import Family, families

FILE = "config.json"


def read_model_folder(path: Path) -> dict[str, Any]:
    """Sections of the config tree that a Hugging Face folder stands for: `model`, and `checkpoint` if it holds weights.

    Raises `UserError` naming the field of config.json that is missing or that our models cannot express.
    """
    sections: dict[str, Any] = {"model": read_model(path).model_dump(exclude_none=True)}
    if has_weights(path):
        sections["checkpoint"] = {"initial": str(path)}
    return sections


def has_weights(path: Path) -> bool:
    """Whether `path` holds safetensors. Raises `UserError` when there are pickled weights only."""
    if any(path.glob("*.safetensors")):
        return True
    if pickled := sorted([*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]):
        raise UserError(
            f"{pickled[0]} holds pickled weights, which can run any code and are not read: save them as safetensors "
            f"with transformers' AutoModelForCausalLM.from_pretrained('{path}').save_pretrained(NEW_FOLDER)"
        )
    return False


def read_model(path: Path) -> ModelConfig:
    """The architecture of the folder `path`. Raises `UserError` as `read_model_folder` does."""
    file, raw = path / FILE, read_config(path)
    family = _family(raw, file)
    model: dict[str, Any] = {ours: _value(ours, raw, theirs, file) for ours, theirs in family.fields.items()}
    _refuse_unsupported(family, raw, file)
    model |= {ours: _value(ours, raw, theirs, file, family.defaults) for ours, theirs in family.optional.items()}
    return model_config_from({"family": family.model_type, **family.built_in, **model}, str(file))


def read_config(path: Path) -> dict[str, Any]:
    """config.json as it is. Raises `UserError` when it is not there or not an object."""
    file = path / FILE
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        lack = "it is a file" if path.is_file() else f"it has no {FILE}"
        raise UserError(f"{path} is not a Hugging Face folder: {lack}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{file} must hold a JSON object")
    return raw


def whole_number(raw: dict[str, Any], field: str, file: Path) -> int:
    """`raw[field]`. Raises `UserError` unless it is there and a whole number."""
    value = raw.get(field)
    if type(value) is not int:
        raise UserError(f"{file}: {field} is {'missing' if value is None else repr(value)}: it must be a whole number")
    return value


def write_config(
    model: ModelConfig, folder: Path, *, context: int, eos_id: int | None, pad_id: int | None, dtype: str
) -> None:
    """Write config.json and generation_config.json for `transformers` 4 and 5 alike (so no `rope_parameters`).

    Raises `UserError` for an architecture that `transformers` cannot express.
    """
    family = families()[model.family]
    for name, value in family.built_in.items():
        if getattr(model, name) != value:
            raise UserError(
                f"model.{name} is {getattr(model, name)}: {family.architecture} of transformers has {value} built in, so "
                "this model has no equal there"
            )
    raw: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    raw |= family.constants
    raw |= {theirs: getattr(model, ours) for ours, theirs in [*family.fields.items(), *family.optional.items()]}
    raw |= {theirs: raw[same] for theirs, same in family.equal.items()}
    raw |= {
        "max_position_embeddings": context,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        # Not the padding token: `transformers` would give that row of the embedding no gradient.
        "pad_token_id": None,
        "torch_dtype": dtype,
    }
    _write(folder / FILE, {field: value for field, value in raw.items() if field != "quantization_config"})
    _write(folder / "generation_config.json", {"eos_token_id": eos_id, "pad_token_id": pad_id})


def _family(raw: dict[str, Any], file: Path) -> Family:
    name, architectures = raw.get("model_type"), raw.get("architectures")
    if not isinstance(name, str) or name not in families():
        raise UserError(f"{file}: model_type is {name!r}: only {' and '.join(families())} can be read")
    family = families()[name]
    if architectures and architectures != [family.architecture]:
        raise UserError(f"{file}: architectures is {architectures}: only {family.architecture} can be read")
    return family


def _refuse_unsupported(family: Family, raw: dict[str, Any], file: Path) -> None:
    only: dict[str, list[Any]] = {field: [value] for field, value in family.constants.items()}
    only |= {field: [raw.get(same), None] for field, same in family.equal.items()}
    only["head_dim"] = [raw["hidden_size"] // max(1, raw["num_attention_heads"]), None]
    for field, values in only.items():
        if field in raw and raw[field] not in values:
            raise UserError(f"{file}: {field} is {raw[field]!r}: only {values[0]!r} is supported here")


def _value(ours: str, raw: dict[str, Any], theirs: str, file: Path, defaults: Mapping[str, Any] | None = None) -> Any:
    """`raw[theirs]` in the type of our field. Without `defaults` it must be there."""
    field = ModelConfig.model_fields[ours]
    if ours == "rope_theta":
        return _rope_theta(raw, file)
    default = None if defaults is None else defaults.get(ours, field.default)
    if field.annotation is bool:
        return bool(raw.get(theirs, default))
    if field.annotation is float:
        return _number(raw, theirs, default, file)
    return whole_number(raw, theirs, file)


def _rope_theta(raw: dict[str, Any], file: Path) -> float:
    """The base, which `transformers` 5 keeps in rope_parameters and version 4 beside the other fields."""
    rope = raw.get("rope_parameters")
    if rope is None:
        return _number(raw, "rope_theta", 10_000.0, file)
    if not isinstance(rope, dict) or {**rope, "rope_theta": 0} != {"rope_theta": 0, "rope_type": "default"}:
        raise UserError(f"{file}: rope_parameters is {rope!r}: only a theta with rope_type 'default' is supported")
    return _number(rope, "rope_theta", 10_000.0, file)


def _number(raw: dict[str, Any], field: str, default: float | None, file: Path) -> float:
    value = raw.get(field, default)
    if type(value) is not int and type(value) is not float:
        raise UserError(f"{file}: {field} is {value!r}: it must be a number")
    return float(value)


def _write(file: Path, raw: dict[str, Any]) -> None:
    file.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
