"""Twins keep what matters of a configuration and are small."""

from typing import Any

import pytest
import torch

from helpers.model_facts import configuration
from optimus.errors import UserError
from optimus.model.foreign.facts import signature
from optimus.model.foreign.probes import find_blocks, logits_of
from optimus.model.foreign.sizes import RealSizes
from optimus.model.foreign.twin import LENGTH, VOCABULARY, build, layers_of, small, tokens_of_twin

pytest.importorskip("transformers", minversion="5.20")


@pytest.mark.parametrize(
    "kind", ["llama", "gemma3_text", "qwen3_next", "falcon_h1", "deepseek_v3", "gpt2", "nemotron_h"]
)
def test_twins_are_small_and_have_all_kinds_of_layers(kind: str) -> None:
    config = configuration(kind)
    twin, real = build(small(config)), build(config, device="meta")
    assert sum(each.numel() for each in twin.parameters()) < 40_000_000
    blocks = find_blocks(real)
    assert find_blocks(twin) == blocks
    kinds = {signature(layer) for layer in layers_of(real, blocks)}
    assert kinds <= {signature(layer) for layer in layers_of(twin, blocks)}
    with torch.no_grad():
        assert logits_of(twin, tokens_of_twin(small(config))).shape == (2, LENGTH, VOCABULARY)


def test_ratios_of_heads_stay() -> None:
    twin = small(configuration("phi3", num_attention_heads=32, num_key_value_heads=8))
    assert (twin.num_attention_heads, twin.num_key_value_heads) == (16, 4)
    assert twin.hidden_size % 16 == 0


def test_windows_and_chunks_are_shorter_than_sequences() -> None:
    assert small(configuration("gemma3_text")).sliding_window < LENGTH // 2
    assert small(configuration("llama4_text")).attention_chunk_size < LENGTH // 2


def test_twins_have_no_dropout_and_two_experts_or_more_per_choice() -> None:
    twin = small(configuration("gpt2"))
    assert twin.resid_pdrop == twin.embd_pdrop == twin.attn_pdrop == 0.0
    twin = small(configuration("qwen3_moe"))
    assert twin.num_experts >= 2 * twin.num_experts_per_tok


def test_a_small_configuration_stays_as_it_is() -> None:
    config = small(configuration("llama"))
    again = small(config)
    assert (again.hidden_size, again.num_attention_heads) == (config.hidden_size, config.num_attention_heads)


def test_code_that_a_folder_brings_does_not_run() -> None:
    config = small(configuration("llama"))
    config.auto_map = {"AutoModelForCausalLM": "elsewhere.Model"}
    with pytest.raises(UserError, match=r"elsewhere.py in a folder, runs only if you name its folder"):
        build(config)


class Settings:
    """A configuration of some numbers."""

    def __init__(self, **settings: int) -> None:
        self.settings = settings
        self.attribute_map: dict[str, str] = {}

    def to_dict(self) -> dict[str, int]:
        return self.settings

    def get_text_config(self) -> "Settings":
        return self


@pytest.mark.parametrize(
    ("pieces", "real", "expected"),
    [
        ((), 100, ()),
        ((64, 64), 200, (100, 100)),
        ((128, 32, 32), 6144, (4096, 1024, 1024)),
        ((128, 32, 32), 6000, None),
        ((7, 9), 16, None),
    ],
)
def test_sizes_of_pieces(pieces: tuple[int, ...], real: int, expected: Any) -> None:
    sizes: Any = RealSizes(Settings(heads=32, kv_heads=8, head_dim=128), Settings(heads=8, kv_heads=2, head_dim=16))
    assert sizes.of_pieces(pieces, real) == expected
