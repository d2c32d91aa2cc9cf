"""Reading config.json: known fields are converted; values that our models cannot express are refused by name."""

import json
import math
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from helpers.sweep import in_turns
from optimus.config import ModelConfig
from optimus.config.load import model_config_from, resolve_model
from optimus.errors import UserError
from optimus.hub import read_model_folder
from optimus.hub.config_json import context_of, write_config
from tests.hub.conftest import CONFIGS

OLMOE = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 1024,
    "vocab_size": 50304,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "clip_qkv": None,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 4096,
}


def folder(path: Path, without: Iterable[str] = (), **changed: object) -> Path:
    path.mkdir(exist_ok=True)
    base = {field: value for field, value in OLMOE.items() if field not in without}
    kept = {field: value for field, value in (base | changed).items() if value != "absent"}
    (path / "config.json").write_text(json.dumps(kept))
    return path


def read(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the model section for this config.json; fields with the value "absent" are removed first."""
    (path / "config.json").write_text(json.dumps({field: value for field, value in raw.items() if value != "absent"}))
    return read_model_folder(path)["model"]


def test_published_olmoe(tmp_path: Path) -> None:
    sections = read_model_folder(folder(tmp_path))
    assert list(sections) == ["model"]
    assert (
        sections["model"].items()
        >= {
            "family": "olmoe",
            "hidden": 2048,
            "layers": 16,
            "heads": 16,
            "kv_heads": 16,
            "head_size": 128,
            "intermediate": 1024,
            "renormalise": False,
            "vocab": 50304,
            "norm": "rms",
            "norm_place": "before",
            "qk_norm": "whole",
            "attention_bias": "none",
            "activation": "silu",
            "gated": True,
            "mlp_bias": False,
            "experts": 64,
            "experts_per_token": 8,
            "embedding_scale": False,
            "tie_embeddings": False,
            "position_offset": 0,
            "rope_theta": 10000.0,
            "window_rope_theta": 10000.0,
            "norm_eps": 1e-5,
            "init_std": 0.02,
        }.items()
    )


@pytest.mark.parametrize(
    ("changed", "theta"),
    [
        ({"rope_theta": 500000}, 500000.0),
        ({"rope_theta": "absent"}, 10000.0),
        ({"rope_theta": "absent", "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}, 77.0),
    ],
)
def test_base_of_the_rotary_frequencies(tmp_path: Path, changed: dict, theta: float) -> None:
    assert read_model_folder(folder(tmp_path, **changed))["model"]["rope_theta"] == theta


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"model_type": "bloom", "architectures": ["BloomForCausalLM"]},
            "model_type is 'bloom': only .*llama, mistral, ",
        ),
        ({"architectures": ["LlamaForCausalLM"]}, r"architectures is \['LlamaForCausalLM'\]: only OlmoeForCausalLM"),
        ({"model_type": "absent"}, "model_type is None"),
        ({"architectures": ["OlmoeModel"]}, r"architectures is \['OlmoeModel'\]: only OlmoeForCausalLM"),
        ({"clip_qkv": 8.0}, "clip_qkv is 8.0: only None"),
        ({"num_key_value_heads": 5}, "heads 16 is not a multiple of kv_heads 5"),
        ({"layer_types": ["sliding_attention"] * 16}, r"layer_types is \['sliding_.*: only 'full_attention' for each"),
        ({"head_dim": 64}, "head_dim is 64: only 128"),
        ({"attention_bias": True}, "attention_bias is True: only False"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1: only 0.0"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2}},
            "rotary positions are .*'dynamic'.*: only rope_type default",
        ),
        ({"rope_scaling": {"type": "linear", "beta_fast": 2}}, "rotary positions are .*'beta_fast'.*: only"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "x": [1]}}, r"rotary positions are .*'x': \[1\]"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling yarn needs original_context"),
        ({"rope_parameters": 4}, "rope_parameters is 4: it must be an object"),
        ({"rope_theta": "big"}, "rope_theta is 'big': it must be a number"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None: it must be a number"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': only 'silu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"num_experts": "absent"}, "num_experts is missing"),
        ({"vocab_size": 5.5}, "vocab_size is 5.5: it must be a whole number"),
        ({"num_experts_per_tok": 65}, "experts_per_token 65 is more than experts 64"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, changed: dict, message: str) -> None:
    with pytest.raises(UserError, match=f"config.json: .*{message}"):
        read_model_folder(folder(tmp_path, **changed))


DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "vocab_size": 100,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def test_published_deepseek(tmp_path: Path) -> None:
    """The published DeepSeek file is read, with its own form of rotary positions."""
    model = read(tmp_path, DEEPSEEK)
    assert model["latent"] == {"keys": 16, "rotary": 8, "value": 12}
    assert (model["rope_scaling"]["mscale"], model["dense_layers"], model["router_score"]) == (1.0, 1, "sigmoid")
    published = {"num_nextn_predict_layers": 1, "ep_size": 1, "auto_map": {"AutoConfig": "x.y"}, "moe_layer_freq": 1}
    assert read(tmp_path, DEEPSEEK | published) == model


def test_fields_of_makers_that_must_have_a_value(tmp_path: Path) -> None:
    """Fields that are not in the class, but in folders of earlier versions or other programs, must have the supported
    value."""
    moe = {"num_local_experts": "absent", "model_type": "qwen3_moe", "architectures": "absent", "clip_qkv": "absent"}
    sparse = OLMOE | moe | {"moe_intermediate_size": 8, "use_qk_norm": True, "qkv_bias": False}
    read(tmp_path, sparse)
    for wrong in ({"use_qk_norm": False}, {"qkv_bias": True}, {"shared_expert_intermediate_size": 8}):
        with pytest.raises(UserError, match=f"{next(iter(wrong))} is .*: only .* is supported here"):
            read(tmp_path, sparse | wrong)
    read(tmp_path, GPT2 | {"n_ctx": 1024, "pruned_heads": {}, "is_encoder_decoder": None})
    with pytest.raises(UserError, match=r"pruned_heads is \{'0': \[1\]\}: only \{\} is supported here"):
        read(tmp_path, GPT2 | {"pruned_heads": {"0": [1]}})


def test_only_the_first_layers_may_be_dense(tmp_path: Path) -> None:
    qwen = {"model_type": "qwen3_moe", "architectures": "absent", "moe_intermediate_size": 8, "mlp_only_layers": [0, 2]}
    with pytest.raises(UserError, match=r"mlp_only_layers is \[0, 2\]: only the first layers may be dense here"):
        read_model_folder(folder(tmp_path, **qwen))


OPT = {
    "model_type": "opt",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "ffn_dim": 4096,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "dropout": 0.1,
    "word_embed_proj_dim": 1024,
}


GPT2 = {"model_type": "gpt2", "n_embd": 12, "n_layer": 2, "n_head": 2, "vocab_size": 61, "n_positions": 32}


@pytest.mark.parametrize(("changed", "width"), [({}, 48), ({"n_inner": None}, 48), ({"n_inner": 20}, 20)])
def test_width_that_follows_from_another(tmp_path: Path, changed: dict, width: int) -> None:
    model = read(tmp_path, GPT2 | changed)
    assert (model["intermediate"], model["learned_positions"], model["tie_embeddings"]) == (width, 32, True)
    assert (model["position_offset"], read(tmp_path, OPT)["position_offset"]) == (0, 2)


GEMMA3 = {  # the published 1B model
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "intermediate_size": 6912,
    "vocab_size": 262144,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}


GEMMA2 = {  # the published 2B model
    "model_type": "gemma2",
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "intermediate_size": 9216,
    "vocab_size": 256000,
    "query_pre_attn_scalar": 256,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}


GPT_OSS = {  # the published 20B model, without its quantisation
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


@pytest.mark.parametrize(
    ("raw", "preset", "windows"),
    [
        (GEMMA3, "gemma-3-1b", [512] * 5 + [None]),
        (GEMMA2, "gemma-2-2b", [4096, None] * 3),
        (GPT_OSS, "gpt-oss-20b", [128, None] * 3),
    ],
)
def test_published_files_are_the_presets(tmp_path: Path, raw: dict, preset: str, windows: list[int | None]) -> None:
    expected = model_config_from(resolve_model(preset)["model"], "preset")
    assert read(tmp_path, raw) == expected.model_dump(exclude_none=True)
    assert [expected.window_of(layer) for layer in range(6)] == windows


def test_what_is_said_is_no_default(tmp_path: Path) -> None:
    changed = read(tmp_path, GEMMA3 | {"final_logit_softcapping": 30.0, "rope_theta": 7})
    assert (changed["logit_cap"], changed["rope_theta"], changed["window_rope_theta"]) == (30.0, 7.0, 10000.0)
    changed = read(tmp_path, GEMMA2 | {"attn_logit_softcapping": None})  # null counts as a value
    assert (changed["score_cap"], changed["logit_cap"]) == (None, 30.0)
    assert model_config_from(changed, "folder").score_cap is None


def test_rotary_positions_that_a_family_scales_unless_said(tmp_path: Path) -> None:
    unsaid = {name: value for name, value in GPT_OSS.items() if name != "rope_scaling"}
    scaled = read(tmp_path, GPT_OSS)["rope_scaling"]
    assert read(tmp_path, unsaid)["rope_scaling"] == scaled
    assert read(tmp_path, unsaid | {"rope_scaling": None})["rope_scaling"] == scaled  # as in `transformers`
    for said in ({"rope_scaling": {"rope_type": "default"}}, {"rope_parameters": {"rope_theta": 7.0}}):
        assert read(tmp_path, unsaid | said)["rope_scaling"] is None


REFUSED: list[tuple[dict[str, Any], list[tuple[dict[str, Any], str]]]] = [
    (
        DEEPSEEK,
        [
            ({"scoring_func": "softmax"}, "scoring_func is 'softmax': only 'sigmoid'"),
            ({"topk_method": "greedy"}, "topk_method is 'greedy': only 'noaux_tc'"),
            ({"rope_interleave": False}, "rope_interleave is False: only True"),
            ({"num_nextn_predict_layers": "one"}, "num_nextn_predict_layers is 'one': it must be a whole number"),
            ({"moe_layer_freq": 2}, "moe_layer_freq is 2: only 1"),
            ({"attention_bias": True}, "attention_bias is True: only False"),
            ({"num_key_value_heads": 2}, "num_key_value_heads is 2: only 4"),
            ({"kv_lora_rank": "absent"}, "kv_lora_rank is missing"),
            ({"q_lora_rank": "all"}, "q_lora_rank is 'all': it must be a whole number"),
            ({"qk_rope_head_dim": 7}, "'qk_rope_head_dim' is 7: it must be"),
            ({"n_group": 3}, "experts 8 cannot be divided into expert_groups 3"),
            ({"n_group": 8}, "experts 8 cannot be divided into expert_groups 8 of two or more"),
            ({"topk_group": 5}, "groups_per_token 5 is more than expert_groups 4"),
            ({"num_experts_per_tok": 5}, "experts_per_token 5 is more than the 4 experts of groups_per_token 2"),
            ({"first_k_dense_replace": "absent"}, "first_k_dense_replace is missing"),  # 3 in `transformers`
            ({"first_k_dense_replace": 4}, "none of 4 layers has experts with dense_layers 4"),
            ({"n_shared_experts": "one"}, "n_shared_experts is 'one': it must be a whole number"),
        ],
    ),
    (
        OPT,
        [
            ({"word_embed_proj_dim": 512}, "word_embed_proj_dim is 512: only 1024"),  # as in the published 350M model
            ({"do_layer_norm_before": False}, "do_layer_norm_before is False: only True"),
            ({"enable_bias": False}, "enable_bias is False: only True"),
            ({"activation_function": "tanh"}, "activation_function is 'tanh': only 'relu' and 'gelu'"),
            ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
        ],
    ),
    (
        GPT2,
        [
            ({"activation_function": "relu"}, "activation_function is 'relu': only 'gelu_new'"),
            ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True: only False"),
            ({"add_cross_attention": True}, "add_cross_attention is True: only False"),
            ({"n_inner": "wide"}, "n_inner is 'wide': it must be a whole number"),
        ],
    ),
    (
        GEMMA3,
        [
            ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0: only None"),
            ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True: only False"),
            ({"hidden_activation": "silu"}, "hidden_activation is 'silu': only 'gelu_pytorch_tanh'"),
            ({"query_pre_attn_scalar": None}, "query_pre_attn_scalar is missing"),
            ({"sliding_window_pattern": "six"}, "sliding_window_pattern is 'six': it must be a whole number"),
            (
                {"layer_types": ["sliding_attention", "full_attention"] * 12},
                "layer_types is .*: only full_attention in every",
            ),
        ],
    ),
    (GEMMA2, [({"attn_logit_softcapping": "high"}, "attn_logit_softcapping is 'high': it must be a number")]),
    (
        GPT_OSS,
        [
            (
                {"quantization_config": {"quant_method": "mxfp4"}},
                r"quantization_config is \{'quant_method': 'mxfp4'\}: only None",
            ),
            ({"swiglu_limit": 10.0}, "swiglu_limit is 10.0: only 7.0"),
            ({"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0: only 1.702"),
            ({"sliding_window": "absent"}, "sliding_window is missing"),
            ({"head_dim": "absent"}, "head_dim is missing"),
            (
                {"layer_types": ["full_attention", "sliding_attention"] * 12},
                "layer_types is .*: only full_attention in every",
            ),
        ],
    ),
]


@pytest.mark.parametrize(("base", "changed", "message"), [(base, *case) for base, cases in REFUSED for case in cases])
def test_what_a_family_cannot_have_is_named(tmp_path: Path, base: dict, changed: dict, message: str) -> None:
    read(tmp_path, base)
    with pytest.raises(UserError, match=f"config.json: .*{message}"):
        read(tmp_path, base | changed)


BROKEN = ["x", "", [], {}, [1], [[]], {"a": []}, -1, -0.5, 1 << 39, 10**400, -(10**400), math.nan, math.inf, -math.inf]
SCALED = {
    "linear": {"factor": 2.0},
    "llama3": {"factor": 2.0, **(_ORIGINAL := {"original_max_position_embeddings": 64}), "low_freq_factor": 1.0},
    "yarn": {"factor": 2.0, **_ORIGINAL, "beta_fast": 32, "attention_factor": 1.0, "mscale": 1.0, "truncate": True},
}


@pytest.mark.parametrize("name", in_turns([*CONFIGS], 4, always=6))
def test_a_broken_value_is_named(tmp_path: Path, name: str) -> None:
    """A broken value of any field (a wrong type; huge, negative, or not finite) keeps its meaning or is refused in one
    line with file and field."""
    model = ModelConfig.model_validate({"hidden": 16, "layers": 2, "heads": 2, "vocab": 61} | CONFIGS[name])
    write_config(model, tmp_path, context=64, dtype="float32")
    file = tmp_path / "config.json"
    whole = json.loads(file.read_text())
    # Fields of layer types and rotary positions, which may stand in several places.
    more = ["layer_types", "sliding_window", "rope_theta", "rope_scaling", "rope_parameters", "mlp_only_layers"]
    cases = [(field, whole | {field: broken}) for field in {**whole, **dict.fromkeys(more)} for broken in BROKEN]
    flat = {field: value for field, value in whole.items() if field not in ("rope_scaling", "rope_parameters")}
    for place in ("rope_scaling", "rope_parameters"):
        for kind, fields in SCALED.items():
            said = {"rope_type": kind, **fields}
            cases += [(field, flat | {place: said | {field: broken}}) for field in said for broken in BROKEN]
            layers = {"full_attention": said, "sliding_attention": {"rope_theta": 7.0}}
            cases += [("rope", flat | {place: layers | {kind: broken}}) for kind in layers for broken in BROKEN]
    for field, raw in cases:
        file.write_text(json.dumps(raw))
        said = ""
        try:
            read_model_folder(tmp_path)
        except UserError as error:
            said = str(error)
        assert not said or said.startswith(f"{file}: ")
        assert not said or field in said or "_attention" in said or "rope_" in said


def test_a_word_is_not_true(tmp_path: Path) -> None:
    """The string "false" is refused: Python would take it as true."""
    for value in ("false", 0, 1, 1.0):
        with pytest.raises(UserError, match=f"tie_word_embeddings is {value!r}: it must be true or false"):
            read_model_folder(folder(tmp_path, tie_word_embeddings=value))


def test_a_length_of_null_is_none(tmp_path: Path) -> None:
    assert context_of(folder(tmp_path, max_position_embeddings=None), own_modules=True) == 1
    assert context_of(folder(tmp_path, max_position_embeddings=None, n_positions=8), own_modules=True) == 8


def test_rotary_positions_are_those_of_transformers(tmp_path: Path) -> None:
    """Rotary positions stated in several places, by version 5 or by hand, are read as `transformers` does, or refused."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    beside = read(tmp_path, OLMOE | {"rope_theta": 777.0, "rope_parameters": yarn})
    assert (beside["rope_theta"], beside["rope_scaling"]["factor"]) == (777.0, 4.0)
    read(tmp_path, OLMOE | {"rope_scaling": yarn, "rope_parameters": yarn | {"rope_theta": 10000.0}})
    for other in ({"rope_type": "default"}, yarn | {"factor": 2.0}, yarn | {"rope_theta": 5.0}):
        with pytest.raises(UserError, match=r"in rope_parameters, but .*: remove one of the two"):
            read(tmp_path, OLMOE | {"rope_scaling": yarn, "rope_parameters": {"rope_theta": 10000.0} | other})
    fractional = yarn | {"original_max_position_embeddings": 64.5}
    with pytest.raises(UserError, match=r"rope_scaling\.original_max_position_embeddings"):
        read(tmp_path, OLMOE | {"rope_scaling": fractional})
    unsaid = {name: value for name, value in GEMMA3.items() if name != "rope_local_base_freq"}
    assert read(tmp_path, unsaid | {"rope_theta": 777.0})["window_rope_theta"] == 10000.0
    nested = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
    assert read(tmp_path, GEMMA3 | {"rope_parameters": nested, "rope_local_base_freq": 5.0})["window_rope_theta"] == 5.0
    for name in ("rope_type", "type"):
        other = nested | {"sliding_attention": {name: "linear", "factor": 8.0}}
        with pytest.raises(UserError, match="rope_type of sliding_attention is 'linear'"):
            read(tmp_path, GEMMA3 | {"rope_parameters": other})


def test_folder_must_have_a_readable_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a Hugging Face folder: it has no config.json"):
        read_model_folder(tmp_path)
    (tmp_path / "model.pt").touch()
    with pytest.raises(UserError, match=r"model.pt is not a Hugging Face folder: it is a file$"):
        read_model_folder(tmp_path / "model.pt")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"it is an adapter of PEFT: merge .*merge_and_unload"):
        read_model_folder(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=r"config.json (cannot be read|must hold a JSON object)"):
            read_model_folder(tmp_path)


def test_reading_the_architecture_does_not_load_torch(tmp_path: Path) -> None:
    code = f"""
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from optimus.hub import read_model_folder
read_model_folder(Path({str(folder(tmp_path))!r}))
print("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
