"""Translates the architecture between `config.json` and `ModelConfig`."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args

from optimus.config.load import model_config_from
from optimus.disk import parse_json
from optimus.errors import UserError
from optimus.model.architecture import Architecture, ModelConfig
from optimus.model.families import Choice, Family, Field, Multiple, Same, families

FILE, ADAPTER = "config.json", "adapter_config.json"
PLUGIN, ARGUMENTS = "plugin", "arguments"  # fields in the config.json of a plugin's model


def read_architecture(path: Path) -> dict[str, Any]:
    """Returns the section `model` of a configuration for a Hugging Face folder and, with weights, `checkpoint`.

    Raises `UserError` for pickled weights only, and for a config.json that is missing, damaged or not supported.
    """
    sections: dict[str, Any] = {"model": read_plugin_model(path)}
    if sections["model"] is None:
        model = read_model(path)
        usual = families()[model.family].defaults
        none = {name: None for name, value in model if value is None and usual.get(name) is not None}
        sections["model"] = model.model_dump(exclude_none=True) | none
    if has_weights(path):
        sections["checkpoint"] = {"load_path": str(path)}
    return sections


def read_plugin_model(path: Path) -> dict[str, Any] | None:
    """Returns the section `model` for the folder of a plugin's model; None for another folder."""
    raw = read_config(path)
    if PLUGIN not in raw:
        return None
    if not isinstance(raw[PLUGIN], str) or not isinstance(raw.get(ARGUMENTS), dict):
        raise UserError(f"{path / FILE} is damaged: {PLUGIN} must be a text, and {ARGUMENTS} a mapping")
    return {"plugin": raw[PLUGIN], **raw[ARGUMENTS]}


def has_weights(path: Path) -> bool:
    """Returns True if the folder `path` has safetensors files. Raises `UserError` for a folder with pickled weights
    only."""
    if any(path.glob("*.safetensors")):
        return True
    if pickled := sorted([*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]):
        raise UserError(
            f"{pickled[0]} holds pickled weights, which can run any code and are not read: save them as safetensors "
            f"with transformers' AutoModelForCausalLM.from_pretrained('{path}').save_pretrained(NEW_FOLDER)"
        )
    return False


def read_model(path: Path) -> ModelConfig:
    """Reads the architecture of the folder `path`."""
    file, raw = path / FILE, read_config(path)
    family = _family(raw, file)
    raw = {family.aliases.get(name, name): value for name, value in raw.items()}
    model: dict[str, Any] = {"family": family.model_type}
    model |= {ours: _value(ours, raw, theirs, file) for ours, theirs in family.fields.items()}
    _refuse_unsupported(family, raw, model, file)
    for ours, theirs in family.optional.items():
        if ours not in family.fields:
            found = _value(ours, raw, theirs, file, optional=True)
            if found is not None or _is_null(ours, raw, theirs):
                model[ours] = found
    _further_count(family, raw, file)
    _refuse_unknown(family, raw, file)
    names = {ours: _name(theirs) for ours, theirs in {**family.fields, **family.optional}.items()}
    names |= {f"latent.{ours}": theirs for ours, theirs in _LATENT.items()}
    return model_config_from(model, str(file), names | {"rope_scaling.original_context": f"rope_scaling.{_ORIGINAL}"})


def read_config(path: Path) -> dict[str, Any]:
    """Returns the content of config.json. Raises `UserError` if the file is missing, unreadable or no JSON object."""
    file = path / FILE
    try:
        raw = parse_json(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        lack = "it is a file" if path.is_file() else f"it has no {FILE}"
        if (path / ADAPTER).is_file():
            lack = "it is an adapter of PEFT: merge the adapter into its model (merge_and_unload), and save the model"
        raise UserError(f"{path} is not a Hugging Face folder: {lack}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{file} must hold a JSON object")
    return raw


def integer_field(raw: dict[str, Any], field: str, file: Path) -> int:
    """Returns `raw[field]`, a whole number from 0 to 2**31 - 1.

    Raises `UserError` for any other value.
    """
    value = raw.get(field)
    if type(value) is not int:
        raise UserError(f"{file}: {field} is {'missing' if value is None else repr(value)}: it must be a whole number")
    if not 0 <= value < 1 << 31:
        raise UserError(f"{file}: {field} is {value}: it must be from 0 to {(1 << 31) - 1}")
    return value


def context_of(path: Path, *, own_modules: bool = False) -> int:
    """Returns the maximum sequence length, in tokens, that the config.json of `path` states.

    For a plugin's model, and with `own_modules`, returns 1 if the config.json states none.
    """
    raw, file = read_config(path), path / FILE
    if own_modules or PLUGIN in raw:
        name = next((name for name in _CONTEXTS if raw.get(name) is not None), None)
        return 1 if name is None else integer_field(raw, name, file)  # checkpoints store at least the training's length
    return read_model(path).learned_positions or integer_field(raw, "max_position_embeddings", file)


_CONTEXTS = "max_position_embeddings", "n_positions", "model_max_length", "max_sequence_length", "max_seq_len"


def further_layers(path: Path) -> tuple[str, range]:
    """Returns (prefix of tensor names, range of layers) of the multi-token prediction layers.

    The library's model omits the layers.
    """
    raw, model = read_config(path), read_model(path)
    family = families()[model.family]
    count = _further_count(family, raw, path / FILE)
    return family.further.tensors if family.further else "", range(model.layers, model.layers + count)


def further_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """Selects the fields of `raw`, a config.json, that do not affect the computation and that exports repeat."""
    family = families().get(raw.get("model_type", ""))
    if family is None:  # a model that runs as a `ForeignModel`
        return {}
    derived = {*_OF_ANY, *family.without_effect} - {*_OF_THE_FILE, *_known(family)}
    return {name: value for name, value in raw.items() if name in derived}


def no_export(model: Architecture) -> str | None:
    """Returns the reason why `model` cannot be exported, or None."""
    if not isinstance(model, ModelConfig):
        return None
    family = families()[model.family]
    if family.architecture is None:
        return f"transformers has no model of family {model.family}: it cannot be exported"
    for name, value in model:
        theirs = {**family.optional, **family.fields}.get(name)
        only = [*theirs.values.values()] if isinstance(theirs, Choice) else [model.usual(name)]
        if value not in only and (isinstance(theirs, Choice) or name not in family.varies):
            return (
                f"model.{name} is {value}, but {' or '.join(map(str, only))} in all models of {family.architecture} of "
                "transformers: the model cannot be exported; use its checkpoint"
            )
    return None


def write_config(
    model: ModelConfig, folder: Path, *, context: int, dtype: str, further: Mapping[str, Any] = {}
) -> None:
    """Writes the config.json of `model` to `folder`. See `published_config` for the other arguments."""
    write_json(folder / FILE, published_config(model, context=context, dtype=dtype, further=further))


def published_config(
    model: ModelConfig, *, context: int = 2048, dtype: str = "float32", further: Mapping[str, Any] = {}
) -> dict[str, Any]:
    """Returns the content of the config.json of `model`, with those `further` fields that `model` does not determine.

    `context` becomes max_position_embeddings, unless the model has learned positions.
    """
    family = families()[model.family]
    raw: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    # `transformers` gives the embedding's row of a padding token no gradient.
    raw |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **further}
    raw |= dict.fromkeys(family.dropout, 0.0) | _constants(family, dict(model))
    raw |= {family.further.field: 0} if family.further else {}
    for ours, theirs in {**family.optional, **family.fields}.items():
        raw |= _published(ours, theirs, model)
    raw |= {"max_position_embeddings": model.learned_positions or context, "torch_dtype": dtype}
    raw |= {copy: raw[field] for copy, field in family.copies.items()}
    return {field: value for field, value in raw.items() if field != "quantization_config"}


def _family(raw: dict[str, Any], file: Path) -> Family:
    name, architectures = raw.get("model_type"), raw.get("architectures")
    published = [name for name, family in families().items() if family.architecture]
    if not isinstance(name, str) or name not in published:
        raise UserError(f"{file}: model_type is {name!r}: only {', '.join(published)} can be read")
    family = families()[name]
    if architectures and architectures != [family.architecture]:
        raise UserError(f"{file}: architectures is {architectures}: only {family.architecture} can be read")
    return family


def _constants(family: Family, model: dict[str, Any]) -> dict[str, Any]:
    """Returns the values that fields of config.json must have if they are present."""
    return {name: model[value.ours] if isinstance(value, Same) else value for name, value in family.constants.items()}


def _refuse_unsupported(family: Family, raw: dict[str, Any], model: dict[str, Any], file: Path) -> None:
    only: dict[str, list[Any]] = {field: [value] for field, value in _constants(family, model).items()}
    only |= {field: [value, None] for field, value in _ONLY.items()}
    known = {*family.fields, *family.optional}
    if "head_size" not in known:
        only["head_dim"] = [model["hidden"] // max(1, model["heads"]), None]
    if "full_attention_every" not in known and not _all_full(raw.get("layer_types"), model["layers"]):
        raise UserError(
            f"{file}: layer_types is {raw['layer_types']!r}: only 'full_attention' for each of the {model['layers']} layers "
            "(num_hidden_layers) is supported here"
        )
    for field, values in only.items():
        if field in raw and raw[field] not in values:
            raise UserError(f"{file}: {field} is {raw[field]!r}: only {values[0]!r} is supported here")


def _all_full(kinds: Any, layers: int) -> bool:
    full = isinstance(kinds, list) and len(kinds) == layers and all(kind == "full_attention" for kind in kinds)
    return kinds is None or full


def _further_count(family: Family, raw: dict[str, Any], file: Path) -> int:
    name = family.further.field if family.further else None
    return 0 if name is None or raw.get(name) is None else integer_field(raw, name, file)


def _refuse_unknown(family: Family, raw: dict[str, Any], file: Path) -> None:
    known = {*_OF_ANY, *_OF_THE_FILE, *family.without_effect, *_known(family)}
    if unknown := [field for field in raw if field not in known]:
        raise UserError(
            f"{file}: {unknown[0]} is {raw[unknown[0]]!r}: an unknown field of family {family.model_type}, which may change "
            "what the model computes; if it does not, remove it"
        )


def _known(family: Family) -> set[str]:
    """Returns the fields of config.json that an import handles."""
    known = {"head_dim", "layer_types", *_ONLY, *family.constants, *family.dropout, *family.aliases}
    known |= {family.further.field} if family.further else set()
    for ours, theirs in {**family.fields, **family.optional}.items():
        known |= _SPECIAL[ours].names if ours in _SPECIAL else {_name(theirs)}
    return known - {*family.without_effect}


def _name(theirs: Field) -> str:
    return theirs if isinstance(theirs, str) else theirs.name


def _value(ours: str, raw: dict[str, Any], theirs: Field, file: Path, *, optional: bool = False) -> Any:
    """Reads the `ModelConfig` field `ours` from config.json.

    With `optional`, an absent field may give None instead of an error.
    """
    if ours in _SPECIAL:
        return _SPECIAL[ours].read(raw, file)
    name = _name(theirs)
    field, value = ModelConfig.model_fields[ours], raw.get(name)
    if isinstance(theirs, Multiple) and value is None:
        return theirs.times * integer_field(raw, theirs.base_field, file)
    types = get_args(field.annotation) or (field.annotation,)
    unsaid = name not in raw or (value is None and field.default_factory is not None)
    if optional and (unsaid or _is_null(ours, raw, theirs)):
        return None
    if isinstance(theirs, Choice):
        if value not in [*theirs.values]:  # a value may be unhashable
            known = " and ".join(map(repr, theirs.values))
            raise UserError(f"{file}: {name} is {value!r}: only {known} are supported here")
        return theirs.values[value]
    if bool in types:
        if type(value) not in (bool, NoneType):
            raise UserError(f"{file}: {name} is {value!r}: it must be true or false")
        return bool(value)
    return _number(raw, name, file) if float in types else integer_field(raw, name, file)


def _is_null(ours: str, raw: dict[str, Any], theirs: Field) -> bool:
    """Returns True if config.json itself, not the lack of a field, makes the `ModelConfig` field `ours` None.

    For rope_scaling, assumes that the caller has read None.
    """
    if ours == "rope_scaling":  # null leaves the field to the family's default
        return bool(raw.get("rope_parameters") or raw.get("rope_scaling"))
    name = _name(theirs)
    types = get_args(ModelConfig.model_fields[ours].annotation)
    return ours not in _SPECIAL and NoneType in types and name in raw and raw[name] is None


def _published(ours: str, theirs: Field, model: ModelConfig) -> dict[str, Any]:
    """Returns the fields of config.json that express the `ModelConfig` field `ours`."""
    value, name = getattr(model, ours), _name(theirs)
    if isinstance(theirs, Choice):
        return {name: {ours: theirs for theirs, ours in theirs.values.items()}[value]}
    return _SPECIAL[ours].write(name, model) if ours in _SPECIAL else {name: value}


def _layer_types(name: str, model: ModelConfig) -> dict[str, Any]:
    windows = [model.window_of(layer) is not None for layer in range(model.layers)]
    kinds = {name: ["sliding_attention" if window else "full_attention" for window in windows]}
    return kinds | ({"sliding_window_pattern": model.full_attention_every} if all(windows) else {})


def _rope_parameters(name: str, model: ModelConfig) -> dict[str, Any]:
    full = {"rope_theta": model.rope_theta, **(_published_scaling(model) or {"rope_type": "default"})}
    windows = {"rope_type": "default", "rope_theta": model.window_rope_theta}
    own = {} if name == "rope_theta" else {name: model.window_rope_theta}
    return own | {"rope_parameters": {"full_attention": full, "sliding_attention": windows}}


def _published_scaling(model: ModelConfig) -> dict[str, Any] | None:
    scaling = model.rope_scaling
    if scaling is None:
        return {"rope_type": "default"} if "rope_scaling" in families()[model.family].defaults else None
    own = {_ORIGINAL if name == "original_context" else name: value for name, value in scaling if value is not None}
    return {"rope_type": scaling.kind} | {name: value for name, value in own.items() if name in _RULES[scaling.kind]}


_ORIGINAL = "original_max_position_embeddings"  # `original_context` in `RopeScaling`
_LLAMA3 = (_ORIGINAL, "low_freq_factor", "high_freq_factor")
_YARN = (_ORIGINAL, "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
_RULES = {"linear": ("factor",), "llama3": ("factor", *_LLAMA3), "yarn": ("factor", *_YARN, "truncate")}


def _rope(raw: dict[str, Any], file: Path, layers: str = "full_attention", base: str = "rope_theta") -> dict[str, Any]:
    """Reads the rotary parameters of the layers of type `layers`: full_attention or sliding_attention.

    Version 5 of `transformers` stores the parameters in `rope_parameters`, either once or for each layer type.
    """
    parameters, scaling = (_object(raw, name, file) for name in ("rope_parameters", "rope_scaling"))
    of = _object(parameters, layers, file) if layers in parameters else parameters
    if layers != "full_attention":
        scaling = {}
    before = {name: raw[name] for name in ("rope_theta",) if name in raw} | scaling
    if of and scaling and (other := [name for name, value in before.items() if name not in of or of[name] != value]):
        raise UserError(
            f"{file}: {other[0]} is {of.get(other[0])!r} in rope_parameters, but {before[other[0]]!r} outside, as with "
            "rope_scaling: remove one of the two"
        )
    rope = scaling | of
    return rope if "rope_theta" in rope or base not in raw else rope | {"rope_theta": _number(raw, base, file)}


def _object(raw: dict[str, Any], field: str, file: Path) -> dict[str, Any]:
    """Returns the object `raw[field]`, empty if the field is null or absent."""
    value = raw.get(field)
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{file}: {field} is {value!r}: it must be an object")
    return value or {}


def _rope_theta(raw: dict[str, Any], file: Path) -> float | None:
    rope = _rope(raw, file)
    return _number(rope, "rope_theta", file) if "rope_theta" in rope else None


def _rope_scaling(raw: dict[str, Any], file: Path) -> dict[str, Any] | None:
    rope = {name: value for name, value in _rope(raw, file).items() if value is not None and name != "rope_theta"}
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    if kind == "default" and not rope:
        return None
    if kind not in [*_RULES] or not rope.keys() <= set(_RULES[kind]):
        known = " and ".join(f"{name} (with {', '.join(fields)})" for name, fields in _RULES.items())
        said = {"rope_type": kind} | rope
        raise UserError(
            f"{file}: the rotary positions are {said}: only rope_type default and {known} are supported here"
        )
    values = {name: value if name == "truncate" else _number(rope, name, file) for name, value in rope.items()}
    if _ORIGINAL in values:
        length = values.pop(_ORIGINAL)
        values["original_context"] = int(length) if length.is_integer() else length  # a fraction is refused later
    return {"kind": kind} | values


def _window_rope_theta(raw: dict[str, Any], file: Path) -> float | None:
    family = families()[raw["model_type"]]
    rope = _rope(raw, file, "sliding_attention", _name(family.optional["window_rope_theta"]))
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        raise UserError(f"{file}: rope_type of sliding_attention is {kind!r}: only 'default' is supported here")
    return _number(rope, "rope_theta", file) if "rope_theta" in rope else None


def _window(raw: dict[str, Any], file: Path) -> int | None:
    if "sliding_window" not in raw:
        raise UserError(f"{file}: sliding_window is missing: it must be a whole number, or null for none")
    return None if raw["sliding_window"] is None else integer_field(raw, "sliding_window", file)


def _full_attention_every(raw: dict[str, Any], file: Path) -> int | None:
    kinds, named = raw.get("layer_types"), "sliding_window_pattern"
    every = integer_field(raw, named, file) if raw.get(named) is not None else None
    if every is not None and every < 1:
        raise UserError(f"{file}: {named} is {every}: it must be at least 1")
    if kinds is None:
        return every
    if not isinstance(kinds, list):
        raise UserError(f"{file}: layer_types is {kinds!r}: it must be a list")
    if "full_attention" in kinds:
        every = kinds.index("full_attention") + 1
    every = every or len(kinds) + 1
    pattern = ["full_attention" if layer % every == 0 else "sliding_attention" for layer in range(1, len(kinds) + 1)]
    if kinds != pattern or len(kinds) != raw["num_hidden_layers"]:
        raise UserError(f"{file}: layer_types is {kinds}: only full_attention in every n-th layer is supported here")
    return every


def _dense_layers(raw: dict[str, Any], file: Path) -> int:
    first = "first_k_dense_replace"
    if first in raw or families()[raw["model_type"]].fields.get("dense_layers") == first:
        return integer_field(raw, first, file)
    layers = raw.get("mlp_only_layers") or []
    if not isinstance(layers, list) or layers != list(range(len(layers))):
        raise UserError(f"{file}: mlp_only_layers is {layers}: only the first layers may be dense here")
    return len(layers)


def _which_are_dense(name: str, model: ModelConfig) -> dict[str, Any]:
    return {name: list(range(model.dense_layers)) if name == "mlp_only_layers" else model.dense_layers}


def _latent(raw: dict[str, Any], file: Path) -> dict[str, Any]:
    given = {ours: theirs for ours, theirs in _LATENT.items() if ours != "queries" or raw.get(theirs) is not None}
    return {ours: integer_field(raw, theirs, file) for ours, theirs in given.items()}


_LATENT = {"queries": "q_lora_rank", "keys": "kv_lora_rank", "rotary": "qk_rope_head_dim", "value": "v_head_dim"}


class _Special(NamedTuple):
    """A conversion of a `ModelConfig` field from the fields `names` of config.json and back."""

    read: Callable[[dict[str, Any], Path], Any]
    write: Callable[[str, ModelConfig], dict[str, Any]]
    names: set[str]


_ROTARY = {"rope_theta", "rope_scaling", "rope_parameters"}
_SPECIAL: dict[str, _Special] = {
    "rope_theta": _Special(_rope_theta, lambda name, model: {name: model.rope_theta}, _ROTARY),
    "rope_scaling": _Special(_rope_scaling, lambda name, model: {name: _published_scaling(model)}, _ROTARY),
    "window": _Special(_window, lambda name, model: {name: model.window}, {"sliding_window"}),
    "full_attention_every": _Special(_full_attention_every, _layer_types, {"layer_types", "sliding_window_pattern"}),
    "window_rope_theta": _Special(_window_rope_theta, _rope_parameters, {*_ROTARY, "rope_local_base_freq"}),
    "latent": _Special(
        _latent, lambda _, model: {_LATENT[name]: size for name, size in model.latent or ()}, {*_LATENT.values()}
    ),
    "dense_layers": _Special(_dense_layers, _which_are_dense, {"first_k_dense_replace", "mlp_only_layers"}),
}

# _ONLY are fields with a required value or null, _OF_THE_FILE are fields that exports do not repeat, and _OF_ANY are
# fields of `PretrainedConfig` in `transformers` that do not affect the library's models.
_ONLY: dict[str, Any] = {"is_encoder_decoder": False, "add_cross_attention": False, "pruned_heads": {}}
_OF_THE_FILE = {
    *("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "auto_map"),
    *(
        "_commit_hash",
        "unsloth_fixed",
        "unsloth_version",
        "transformers.js_config",
        "max_position_embeddings",
        "quantization_config",
    ),
}
_OF_ANY = {
    *("use_cache", "cache_implementation", "gradient_checkpointing", "chunk_size_feed_forward", "torchscript"),
    *("output_attentions", "output_hidden_states", "output_scores", "return_dict", "return_dict_in_generate"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "_attn_implementation_autoset"),
    *("id2label", "label2id", "num_labels", "_num_labels", "problem_type", "finetuning_task", "task_specific_params"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id"),
    *("prefix", "tokenizer_class", "is_decoder", "cross_attention_hidden_size", "tie_encoder_decoder"),
    *("use_bfloat16", "tf_legacy_loss", "max_length", "min_length", "do_sample", "early_stopping", "num_beams"),
    *("num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty"),
    *("length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
    *("num_return_sequences", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
    *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
}


def _number(raw: dict[str, Any], field: str, file: Path) -> float:
    value = raw.get(field)
    if type(value) is not int and type(value) is not float:
        raise UserError(f"{file}: {field} is {value!r}: it must be a number")
    if not abs(value) <= sys.float_info.max:  # false for NaN too
        raise UserError(f"{file}: {field} is {value}: it must be a finite number")
    return float(value)


def write_json(file: Path, raw: Mapping[str, Any]) -> None:
    """Writes a JSON object, indented."""
    file.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
