"""The architecture in `config.json`, from and to our `ModelConfig`.

What our models cannot express is refused by name, because a model that loads and computes something else is the worst
outcome. `transformers` itself is not needed for any of this.
"""

import json
from pathlib import Path
from typing import Any

from optimus.config import ModelConfig
from optimus.config.load import model_config_from
from optimus.errors import UserError

FILE = "config.json"
ARCHITECTURES = {"olmo": "OlmoForCausalLM", "olmoe": "OlmoeForCausalLM"}
OLMO_NORM_EPS = 1e-5  # a constant in `transformers`, which has no field for it

_FIELDS = {  # ours: the field of config.json; all are whole numbers and must be there
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
}
_EXPERT_FIELDS = {"experts": "num_experts", "experts_per_token": "num_experts_per_tok"}
_FIXED: dict[str, Any] = {  # what our models compute; another value where the field is there is refused
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "clip_qkv": None,
    "rope_scaling": None,
    "quantization_config": None,
}


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
    fields = _FIELDS | (_EXPERT_FIELDS if family == "olmoe" else {})
    model: dict[str, Any] = {"family": family}
    model |= {ours: whole_number(raw, theirs, file) for ours, theirs in fields.items()}
    _refuse_unsupported(raw, model, file)
    if family == "olmoe":
        model["renormalise"] = bool(raw.get("norm_topk_prob", False))
    model["tie_embeddings"] = bool(raw.get("tie_word_embeddings", False))
    model["rope_theta"] = _rope_theta(raw, file)
    model["norm_eps"] = _number(raw, "rms_norm_eps", 1e-5, file) if family == "olmoe" else OLMO_NORM_EPS
    model["init_std"] = _number(raw, "initializer_range", 0.02, file)
    return model_config_from(model, str(file))


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
    if model.family == "olmo" and model.norm_eps != OLMO_NORM_EPS:
        raise UserError(
            f"model.norm_eps is {model.norm_eps}: Hugging Face's OLMo has {OLMO_NORM_EPS} built in, so this model "
            "has no equal there"
        )
    raw: dict[str, Any] = {"architectures": [ARCHITECTURES[model.family]], "model_type": model.family}
    raw |= {theirs: getattr(model, ours) for ours, theirs in _FIELDS.items()}
    raw |= {"num_key_value_heads": model.heads, "hidden_act": "silu", "attention_bias": False, "clip_qkv": None}
    if model.family == "olmoe":
        raw |= {theirs: getattr(model, ours) for ours, theirs in _EXPERT_FIELDS.items()}
        raw |= {"norm_topk_prob": model.renormalise, "rms_norm_eps": model.norm_eps}
    raw |= {
        "tie_word_embeddings": model.tie_embeddings,
        "rope_theta": model.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": context,
        "initializer_range": model.init_std,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        # Not the padding token: `transformers` would give that row of the embedding no gradient.
        "pad_token_id": None,
        "torch_dtype": dtype,
    }
    _write(folder / FILE, raw)
    _write(folder / "generation_config.json", {"eos_token_id": eos_id, "pad_token_id": pad_id})


def _family(raw: dict[str, Any], file: Path) -> str:
    family, architectures = raw.get("model_type"), raw.get("architectures")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise UserError(f"{file}: model_type is {family!r}: only {' and '.join(ARCHITECTURES)} can be read")
    if architectures and architectures != [ARCHITECTURES[family]]:
        raise UserError(f"{file}: architectures is {architectures}: only {ARCHITECTURES[family]} can be read")
    return family


def _refuse_unsupported(raw: dict[str, Any], model: dict[str, Any], file: Path) -> None:
    only: dict[str, list[Any]] = {field: [value] for field, value in _FIXED.items()}
    only["num_key_value_heads"] = [model["heads"], None]
    only["head_dim"] = [model["hidden"] // max(1, model["heads"]), None]
    for field, values in only.items():
        if field in raw and raw[field] not in values:
            raise UserError(f"{file}: {field} is {raw[field]!r}: only {values[0]!r} is supported here")


def _rope_theta(raw: dict[str, Any], file: Path) -> float:
    """The base, which `transformers` 5 keeps in rope_parameters and version 4 beside the other fields."""
    rope = raw.get("rope_parameters")
    if rope is None:
        return _number(raw, "rope_theta", 10_000.0, file)
    if not isinstance(rope, dict) or {**rope, "rope_theta": 0} != {"rope_theta": 0, "rope_type": "default"}:
        raise UserError(f"{file}: rope_parameters is {rope!r}: only a theta with rope_type 'default' is supported")
    return _number(rope, "rope_theta", 10_000.0, file)


def _number(raw: dict[str, Any], field: str, default: float, file: Path) -> float:
    value = raw.get(field, default)
    if type(value) not in (int, float):
        raise UserError(f"{file}: {field} is {value!r}: it must be a number")
    return float(value)


def _write(file: Path, raw: dict[str, Any]) -> None:
    file.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
