"""Every family trains on each axis of parallelism as in one process."""

from typing import Any

import pytest

from helpers.drawing import config_of
from helpers.equality import Layout, assert_same_as_one_process
from optimus.model.families import families

SIZES = {"hidden": 16, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 24, "vocab": 59}
EXPERTS = {"experts": 4, "experts_per_token": 2}
MODELS: dict[str, dict[str, Any]] = {
    "olmo": {},
    "olmoe": EXPERTS,
    "olmo2": {"attention_bias": "all"},
    "olmo3": {"window": 7, "full_attention_every": 2, "kv_heads": 4},
    "llama": {
        "attention_bias": "all",
        "mlp_bias": True,
        "rope_scaling": {"kind": "llama3", "factor": 8.0, "original_context": 16},
        "tie_embeddings": True,
    },
    "mistral": {"window": 5, "kv_heads": 4, "head_size": 6},
    "mixtral": EXPERTS,
    "gemma2": {"head_size": 6, "query_scale": 10, "window": 5, "score_cap": 1.0, "logit_cap": 2.0},
    "gemma3_text": {"head_size": 6, "query_scale": 8, "window": 5, "full_attention_every": 2, "logit_cap": 2.0},
    "gpt2": {"learned_positions": 64, "kv_heads": 4},
    "opt": {"learned_positions": 64, "kv_heads": 4, "tie_embeddings": False},
    "qwen2": {},
    "qwen3": {"head_size": 6, "tie_embeddings": True},
    "qwen3_moe": EXPERTS
    | {"head_size": 6, "renormalise": True, "layers": 4, "dense_layers": 2, "expert_intermediate": 16},
    "gpt_oss": EXPERTS
    | {
        "head_size": 6,
        "window": 5,
        "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_context": 16, "truncate": False},
    },
    "pr_moe": {"experts_by_layer": [0, 2, 4], "layers": 3, "expert_intermediate": 16},
    "deepseek_v3": EXPERTS
    | {
        "kv_heads": 4,
        "head_size": 6,
        "latent": {"queries": 12, "keys": 8, "rotary": 4, "value": 6},
        "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_context": 16, "mscale": 1.0, "mscale_all_dim": 0.8},
        "dense_layers": 1,
        "expert_intermediate": 16,
        "shared_experts": 1,
        "expert_groups": 2,
        "routed_scale": 1.5,
    },
}

OTHERS: dict[str, dict[str, Any]] = {  # models without a family
    "norms with biases around": {"family": "llama", "norm": "layer_affine", "norm_place": "both"},
    "norms with offsets behind experts": EXPERTS | {"family": "olmoe", "norm": "rms_offset", "norm_place": "after"},
}


def layouts(model: dict[str, Any]) -> list[Layout]:
    """Returns eight layouts: each axis and pairs of axes, with recomputation and sharding."""
    feed_forward, expert = (
        ("moe", ["parallel.expert=2"]) if "experts" in families()[model["family"]].fields else ("mlp", [])
    )
    context = ["parallel.context=2", "parallel.context_method=ring"]
    return [
        Layout(2, ["parallel.tensor=2", "parallel.sequence=true", f"recompute=[norm,{feed_forward}]"]),
        Layout(2, ["parallel.tensor=[1,2]", "parallel.sequence=false", "state.shard=gradients"]),
        Layout(2, [*context, *expert, "recompute=[norm,attention]"]),
        Layout(2, ["parallel.context=2", "parallel.context_method=ulysses", "state.shard=optimizer"]),
        Layout(2, ["parallel.pipeline=2", "parallel.schedule=zb-h1", "recompute=[block]"]),
        Layout(2, ["state.shard=parameters", *expert, "recompute=[attention]"]),
        Layout(4, ["parallel.tensor=2", "parallel.pipeline=2", "parallel.vocabulary=true", *expert]),
        Layout(4, ["parallel.tensor=2", *context, "parallel.sequence=false", "state.shard=parameters", *expert]),
    ]


def small(model: dict[str, Any]) -> dict[str, Any]:
    """Returns the run of a model, with at least two microbatches on each rank."""
    config = config_of("dense") | {"model": model}
    config["train"]["global_batch"] = 8
    return config


def test_every_family_is_here() -> None:
    assert set(MODELS) == set(families())


@pytest.mark.swept("number")
@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("name", MODELS | OTHERS)
def test_layouts(name: str, number: int) -> None:
    model = SIZES | {"family": name} | (MODELS | OTHERS)[name]
    assert_same_as_one_process(small(model), [layouts(model)[number]], 2, rtol=2e-5)


@pytest.mark.in_turn(2, 3)
def test_biases_of_experts_in_parts() -> None:
    """The last projection's bias is added once, for any number of ranks with a part of an expert or with the same
    tokens."""
    model = SIZES | {"family": "gpt_oss"} | MODELS["gpt_oss"]
    parts = ["parallel.tensor=2", "parallel.expert_tensor=2"]
    whole = [
        Layout(2, [*parts, "parallel.sequence=false", "moe.drop_duplicates=false"]),
        Layout(4, [*parts, "parallel.expert=2", "moe.dispatch=allgather"]),
        Layout(2, [*parts, "state.shard=optimizer", "recompute=[moe]"]),
    ]
    assert_same_as_one_process(small(model), whole, 2, rtol=2e-5)
