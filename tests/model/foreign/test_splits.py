"""Divided twins have the loss and the gradients of one process."""

from typing import Any

import pytest
import torch

from helpers.model_facts import configuration
from helpers.split_ranks import worst_difference
from helpers.sweep import in_turns
from optimus.model.foreign.facts import facts_of
from optimus.model.foreign.twin import build, enlarge, small, tokens_of_twin

pytest.importorskip("transformers", minversion="5.20")

ALWAYS = ["phi3", "gpt2", "stablelm", "olmo2", "deepseek_v3"]
KINDS = [
    *ALWAYS,
    *("llama", "cohere2", "granitemoe", "smollm3", "falcon_h1", "gpt_neox", "qwen3_moe", "gemma3_text", "glm4", "opt"),
    *("nemotron_h", "qwen3_next", "kimi_linear", "deepseek_v4", "gpt_oss", "longcat_flash", "lfm2", "mamba2", "bert"),
]


@pytest.mark.parametrize("kind", in_turns(KINDS, 6, always=len(ALWAYS)))
def test_ranks_have_the_gradients_of_one_process(kind: str) -> None:
    torch.set_num_threads(1)
    config = small(configuration(kind))
    facts, model, tokens_BS = facts_of(config), build(config), tokens_of_twin(config)
    enlarge(model)
    assert facts.ways
    for ways in facts.ways:
        found = worst_difference(model.double(), facts, tokens_BS, ways)
        assert max(found.values()) < 2e-4, max(found, key=lambda name: found[name])


def test_a_wrong_division_is_refused() -> None:
    """Heads that a module counts itself add up only if the number is divided, and it is."""
    config = small(configuration("stablelm"))
    facts = facts_of(config)
    assert facts.divided["model.layers.0.self_attn"] == ("num_heads", "num_key_value_heads")


@pytest.mark.parametrize(
    ("kind", "module", "style"),
    [
        ("olmo2", "self_attn.q_norm", "norm_all"),
        ("deepseek_v3", "self_attn", "sums"),
        ("qwen3_moe", "mlp.experts", "experts"),
        ("longcat_flash", "mlp.experts.identity_expert", "share"),
        ("gpt2", "attn.c_attn", "column"),
        ("opt", "fc2", "row"),
    ],
)
def test_styles(kind: str, module: str, style: Any) -> None:
    facts = facts_of(small(configuration(kind)))
    assert facts.styles[f"{facts.blocks}.{facts.layers - 1}.{module}"] == style
