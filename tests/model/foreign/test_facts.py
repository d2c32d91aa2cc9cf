"""The facts of foreign models equal the table, and the table has what the issue asks for."""

from typing import Any

import pytest
import torch

from helpers.model_facts import FILE, configuration, read, row
from helpers.sweep import in_turns
from optimus.errors import UserError
from optimus.model.foreign.architecture import TransformersModel
from optimus.model.foreign.facts import ModelFacts, facts_of
from optimus.model.foreign.sizes import RealSizes

transformers = pytest.importorskip("transformers", minversion="5.20")

TABLE = read() if FILE.is_file() else {"transformers": "", "classes": {}, "absent": {}}
ROWS: dict[str, dict[str, Any]] = TABLE["classes"]
FIRST = ["phi3", "olmo2", "qwen3_moe"]
KINDS = [*FIRST, *(kind for kind in ROWS if kind not in FIRST)]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def facts(kind: str, **changed: Any) -> ModelFacts:
    """Returns the facts of a type of model."""
    return facts_of(configuration(kind, **changed))


@pytest.mark.parametrize("kind", in_turns(KINDS, 20, always=len(FIRST)))
def test_facts_are_those_of_the_table(kind: str) -> None:
    if transformers.__version__ != TABLE["transformers"]:
        pytest.skip("the table is of another version of transformers: run `make model-facts`")
    expected = {key: value for key, value in ROWS[kind].items() if key != "class"}
    assert row(kind) == expected


def test_the_table_has_most_causal_classes() -> None:
    assert len(ROWS) >= 150
    assert not {*ROWS} & {*TABLE["absent"]}


def test_ninety_percent_are_divided_in_most_classes_with_a_plan() -> None:
    planned = {kind: each for kind, each in ROWS.items() if each["plan"] > 0}
    divided = [kind for kind, each in planned.items() if each["divided"] >= 0.9]
    assert len(divided) >= 75
    assert sum(each["divided"] for each in planned.values()) / len(planned) >= 0.94


TWELVE = (
    *("phi3", "stablelm", "cohere2", "granitemoe", "smollm3", "falcon_h1", "nemotron_h", "gpt_neox", "glm4"),
    *("qwen3_next", "kimi_linear", "deepseek_v4"),
)


@pytest.mark.parametrize("kind", TWELVE)
def test_twelve_families_are_divided_and_have_a_chain(kind: str) -> None:
    assert ROWS[kind]["divided"] >= 0.9
    assert ROWS[kind]["chain"]
    assert not ROWS[kind]["no_initial"]


@pytest.mark.parametrize(
    ("kind", "option", "name"),
    in_turns(
        [
            ("falcon_h1", "documents", "mamba"),
            ("mamba2", "documents", "mixer"),
            ("lfm2_moe", "documents", "conv"),
            ("zamba", "pipeline", "further tensors"),
            ("zaya", "pipeline", "further tensors"),
            ("gemma3n_text", "pipeline", "further tensors"),
            ("hrm_text", "pipeline", "order"),
        ],
        3,
        always=2,
    ),
)
def test_refusals_name_what_is_in_the_way_and_what_works(kind: str, option: str, name: str) -> None:
    narrow = {"mamba_n_heads": 16, "mamba_d_head": 64} if kind == "falcon_h1" else {}
    text = facts(kind, **narrow).refusals[option]
    assert name in text
    assert "choose" in text


def test_dropout_is_refused_with_its_settings() -> None:
    found = facts("gpt2")
    assert found.dropout == {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    assert "set it to 0" in found.refusals["dropout"]


def test_logits_that_are_multiplied_or_capped_are_noticed() -> None:
    assert facts("cohere2").logit_scale == 0.0625
    found = facts("gemma2")
    assert (found.logit_cap, found.logit_scale) == (30.0, 1.0)


def test_kinds_of_layers_and_their_attention() -> None:
    found = facts("gemma3_text")
    assert found.kinds[:7] == (0, 0, 0, 0, 0, 5, 0)
    local, full = found.scored[0], found.scored[5]
    assert local is not None
    assert full is not None
    assert (local.heads, local.query, local.value, local.window) == (8, 256, 256, 4096)
    assert full.window is None


def test_pieces_have_real_sizes() -> None:
    found = facts("phi3", num_key_value_heads=8)
    assert found.splits["model.layers.0.self_attn.qkv_proj.weight"].pieces == (3072, 768, 768)
    assert found.splits["model.layers.31.mlp.gate_up_proj.weight"].pieces == (8192, 8192)
    assert found.heads["model.layers.0.self_attn"] == 8


def test_the_router_of_a_model_with_experts() -> None:
    router = facts("qwen3_moe", output_router_logits=True).router
    assert router is not None
    assert (router.experts, router.top_k, router.score, router.on) == (128, 8, "softmax", True)


def test_a_model_that_is_not_causal_is_refused() -> None:
    assert "is_decoder" in facts("bert", is_decoder=False).refusals["causal"]


@pytest.mark.parametrize(
    ("raw", "heads", "kv_heads"),
    [
        ({"model_type": "mpt", "n_heads": 4}, 4, 4),
        ({"model_type": "falcon", "n_head": 71, "multi_query": True}, 71, 1),
        ({"model_type": "falcon", "n_head": 8, "multi_query": False}, 8, 8),
        (
            {"model_type": "falcon", "n_head": 8, "num_kv_heads": 2, "multi_query": True}
            | {"new_decoder_architecture": True},
            8,
            2,
        ),
        ({"model_type": "gpt_bigcode", "n_head": 8, "multi_query": True}, 8, 1),
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, 8, 2),
    ],
)
def test_the_numbers_of_heads(raw: dict[str, Any], heads: int, kv_heads: int) -> None:
    model = TransformersModel(transformers=raw)
    assert (model.heads, model.kv_heads) == (heads, kv_heads)
    assert model.family == raw.get("model_type", "unknown")


def test_a_type_within_a_section_makes_no_other_model() -> None:
    """The type of the weights says nothing about the model, whether inside or outside a section."""
    one, other, wider = (
        TransformersModel(transformers={"dtype": dtype, "text_config": {"dtype": dtype, "hidden_size": width}})
        for dtype, width in (("float32", 8), ("bfloat16", 8), ("bfloat16", 16))
    )
    assert one.compared(set()) == other.compared(set()) == {"text_config": {"hidden_size": 8}}
    assert wider.compared(set()) != one.compared(set())


@pytest.mark.parametrize(
    ("kind", "positions", "key"),
    [
        ("gpt2", 1024, ".n_positions"),
        ("gptj", 2048, ".n_positions"),
        ("mpt", 2048, ".max_seq_len"),
        ("roberta", 510, ".max_position_embeddings - 2 ="),
        ("phi3", None, ""),
        ("bloom", None, ""),
    ],
)
def test_the_longest_sequence(kind: str, positions: int | None, key: str) -> None:
    found = facts(kind)
    assert (found.positions, found.positions_key) == (positions, key)


def test_a_model_without_a_list_of_blocks_is_refused() -> None:
    with pytest.raises(UserError, match=r"Bare has no list of blocks \(`nn.ModuleList`\): choose another model"):
        facts_of(configuration("gpt2"), type("Bare", (torch.nn.Module,), {})())


@pytest.mark.in_turn(1, 3)
def test_a_residual_stream_of_unknown_size_has_no_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of DeepSeek-V4 has a dim of copies, whose number the twin may have shrunk."""
    assert len(facts("deepseek_v4").stream) == 2
    monkeypatch.setattr(RealSizes, "one", lambda *_: None)
    found = facts("deepseek_v4")
    assert found.stream == ()
    assert "the sizes of its residual stream are not known: choose" in found.refusals["pipeline"]


def test_pieces_of_unknown_size_are_refused_with_a_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RealSizes, "of_pieces", lambda *_: None)
    assert facts("phi3").refusals["tensor"].endswith("are not known, so it stays whole: choose `parallel.tensor: 1`")


def test_what_does_not_run_small_is_an_error_with_the_reason() -> None:
    with pytest.raises(UserError, match="does not run with small sizes"):
        facts("blt")
