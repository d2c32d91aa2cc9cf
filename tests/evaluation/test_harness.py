"""The adapter for lm-eval agrees with lm-eval's own Hugging Face model on the same weights: scores, windows, generated
text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs the extra `evaluate`")

from lm_eval.api.instance import Instance

from optimus.config import ModelConfig
from optimus.errors import UserError
from optimus.evaluation.harness import HarnessModel
from optimus.hub import export_model
from optimus.model import Transformer
from optimus.model.families import families
from optimus.model.init import initialize

CONTEXT = 24
PAIRS = [
    ("Question: who are you?\nAnswer:", " nobody"),
    ("Question: who are you?\nAnswer:", " somebody else"),
    ("trailing spaces  ", "go to the continuation"),
    ("", "no context at all"),
    ("a context that is far longer than the model can take, so that its beginning is lost. " * 3, "the end"),
    ("x", "y"),
]
TEXTS = ["short", "a text that is longer than the context of this model, so it takes several windows to score it.", "x"]


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=args, idx=i) for i, args in enumerate(arguments)]


@pytest.fixture(scope="module")
def dense(make_model: Callable[..., Transformer]) -> Transformer:
    return make_model("olmo")


@pytest.fixture(scope="module")
def ours(dense: Transformer, tokenizer: Any, eos_id: int) -> HarnessModel:
    return HarnessModel(dense, tokenizer, eos_id=eos_id, context=CONTEXT, tokens_per_batch=64)


@pytest.fixture(scope="module")
def theirs(dense: Transformer, tokenizer_file: Path) -> Any:
    """lm-eval's `HFLM` over `OlmoForCausalLM` with the same weights and tokenizer."""
    from lm_eval.models.huggingface import HFLM
    from transformers import OlmoConfig, OlmoForCausalLM, PreTrainedTokenizerFast

    c = dense.config
    config = OlmoConfig(
        vocab_size=c.vocab,
        hidden_size=c.hidden,
        intermediate_size=c.intermediate,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        max_position_embeddings=CONTEXT,
        eos_token_id=0,
    )
    weights = {"model.embed_tokens.weight": dense.embedding.weight, "lm_head.weight": dense.head.weight}
    for i, block in enumerate(dense.blocks):
        prefix = f"model.layers.{i}"
        for name, part in zip("qkv", block.attention.qkv.weight):
            weights[f"{prefix}.self_attn.{name}_proj.weight"] = part
        weights[f"{prefix}.self_attn.o_proj.weight"] = block.attention.out.weight
        for name, part in zip(("gate", "up"), block.mlp.gate_up.weight):
            weights[f"{prefix}.mlp.{name}_proj.weight"] = part
        weights[f"{prefix}.mlp.down_proj.weight"] = block.mlp.down.weight
    model = OlmoForCausalLM(config)
    model.load_state_dict({name: weight.detach().clone() for name, weight in weights.items()})
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file), eos_token="<|endoftext|>")
    return HFLM(
        pretrained=model.eval(), tokenizer=tokenizer, backend="causal", max_length=CONTEXT, batch_size=2, device="cpu"
    )


def test_loglikelihood(ours: HarnessModel, theirs: Any) -> None:
    found = ours.loglikelihood(requests("loglikelihood", PAIRS))
    expected = theirs.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    assert [total for total, _ in found] == pytest.approx([total for total, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "head_size": 6,
        "latent": {"keys": 8, "rotary": 4, "value": 6},
        "experts": 4,
        "experts_per_token": 2,
        "shared_experts": 1,
    },
    "gemma2": {"head_size": 8, "kv_heads": 1, "query_scale": 6, "window": 7, "score_cap": 1.0, "logit_cap": 3.0},
    "gemma3_text": {"head_size": 8, "query_scale": 6, "window": 7, "full_attention_every": 2},
    "gpt_oss": {"kv_heads": 1, "head_size": 6, "window": 7, "experts": 4, "experts_per_token": 2},
    "gpt2": {"learned_positions": CONTEXT},
    "llama": {"kv_heads": 1, "tie_embeddings": True},
    "mistral": {"kv_heads": 1, "window": 7},
    "mixtral": {"kv_heads": 1, "experts": 4, "experts_per_token": 2},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"window": 7, "full_attention_every": 2},
    "olmoe": {"experts": 4, "experts_per_token": 2},
    "opt": {"learned_positions": CONTEXT},
    "qwen2": {"kv_heads": 1},
    "qwen3": {"kv_heads": 1, "head_size": 6},
    "qwen3_moe": {"kv_heads": 1, "head_size": 6, "experts": 4, "experts_per_token": 2},
}


def test_every_published_family_is_here() -> None:
    assert set(FAMILIES) == {name for name, family in families().items() if family.architecture}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_exported_folder_has_the_same_scores(
    family: str, tokenizer: Any, tokenizer_file: Path, eos_id: int, tmp_path: Path
) -> None:
    from lm_eval.models.huggingface import HFLM

    sizes = {"family": family, "hidden": 16, "layers": 2, "heads": 2, "intermediate": 24, "vocab": 328}
    model = Transformer(ModelConfig.model_validate(sizes | FAMILIES[family]))
    initialize(model, 0, 0.3)
    export_model(model, tmp_path / "hf", context=CONTEXT, tokenizer=tokenizer_file, eos_id=eos_id)
    options = {"backend": "causal", "max_length": CONTEXT, "batch_size": 1, "device": "cpu", "dtype": "float32"}
    theirs = HFLM(pretrained=str(tmp_path / "hf"), **options)
    ours = HarnessModel(model.eval(), tokenizer, eos_id=eos_id, context=CONTEXT)
    found = ours.loglikelihood(requests("loglikelihood", PAIRS))
    expected = theirs.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    assert [total for total, _ in found] == pytest.approx([total for total, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


@pytest.mark.parametrize("white", [" ", "\n\n", " \t "])
def test_context_of_white_space_alone(dense: Transformer, tokenizer: Any, ours: HarnessModel, white: str) -> None:
    """A continuation after white space alone is predicted from end-of-text, whatever else is in the batch."""
    expected = ours.loglikelihood(requests("loglikelihood", [("", white + "nobody")]))[0]
    for others in ([], PAIRS):
        batched = HarnessModel(dense, tokenizer, eos_id=0, context=CONTEXT, tokens_per_batch=4096)
        found = batched.loglikelihood(requests("loglikelihood", [(white, "nobody"), *others]))[0]
        assert found == (pytest.approx(expected[0], abs=1e-4), expected[1])


def test_rolling(ours: HarnessModel, theirs: Any) -> None:
    texts = [(text,) for text in TEXTS]
    found = ours.loglikelihood_rolling(requests("loglikelihood_rolling", texts))
    expected = theirs.loglikelihood_rolling(requests("loglikelihood_rolling", texts), disable_tqdm=True)
    assert found == pytest.approx(expected, abs=1e-4)


def test_long_continuation(ours: HarnessModel, dense: Transformer) -> None:
    """A continuation longer than the context, which lm-eval's own model cannot score, is scored in disjoint windows."""
    ((total, greedy),) = ours.loglikelihood(requests("loglikelihood", [("Answer:", " " + TEXTS[1])]))
    context, continuation = ours._encode_pair("Answer:", " " + TEXTS[1])
    stream = context[-1:] + continuation
    assert len(continuation) > CONTEXT
    first = (context + continuation)[: len(context) + CONTEXT][-(CONTEXT + 1) :]
    pieces = [first, *(stream[at : at + CONTEXT + 1] for at in range(CONTEXT, len(continuation), CONTEXT))]
    expected = 0.0
    for piece in pieces:
        with torch.no_grad():
            log_p = torch.log_softmax(dense(torch.tensor([piece[:-1]]))[0], -1)
        expected += log_p.gather(1, torch.tensor(piece[1:])[:, None]).sum().item()
    assert total == pytest.approx(expected, abs=1e-4)
    assert not greedy


def test_generate_until(ours: HarnessModel, theirs: Any) -> None:
    free = {"until": [], "max_gen_toks": 12}
    whole = ours.generate_until(requests("generate_until", [("Question: who?", free)]))[0]
    assert len(whole) > 6
    stop = whole[3:5]
    asked = [
        ("Question: who?", free),
        ("Question: who?", {"until": ["absent", stop], "max_gen_toks": 12}),
        ("Question: who?", {"until": stop, "max_gen_toks": 12, "do_sample": False, "temperature": 0.0}),
        (TEXTS[1], {"until": ["absent"], "max_gen_toks": 4}),
    ]
    found = ours.generate_until(requests("generate_until", asked))
    assert found == theirs.generate_until(requests("generate_until", asked), disable_tqdm=True)
    assert found[1] == found[2] == whole[: whole.index(stop)]


def test_sampling(ours: HarnessModel) -> None:
    drawn, greedy = (
        ours.generate_until(requests("generate_until", [("Question:", {"until": [], "max_gen_toks": 12, **options})]))
        for options in ({"do_sample": True, "temperature": 5.0}, {"temperature": 0.0})
    )
    assert drawn != greedy


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"top_k": 4, "min_p": 0.1}, r"^task None: generation_kwargs has top_k: 4, min_p: 0\.1: remove them, because"),
        ({"repetition_penalty": 1.2, "num_beams": 1}, r"has repetition_penalty: 1\.2: remove"),
        ({"temperature": 0.0, "num_beams": 10}, r"has num_beams: 10: remove"),
    ],
)
def test_options_that_generation_lacks(ours: HarnessModel, options: dict[str, Any], expected: str) -> None:
    sampling = {"until": [], "max_gen_toks": 12, "temperature": 1.0}
    with pytest.raises(UserError, match=expected):
        ours.generate_until(requests("generate_until", [("Question:", sampling | options)]))


def test_options_that_change_nothing(ours: HarnessModel) -> None:
    greedy = {"until": [], "max_gen_toks": 12, "do_sample": False}
    sampling = {**greedy, "do_sample": True, "temperature": 1.0}
    for options, moot in ((greedy, {"top_k": 4}), (sampling, {"top_k": 0, "repetition_penalty": 1.0})):
        given = [("Question:", options), ("Question:", {**options, **moot, "num_beams": 1})]
        plain, more = ours.generate_until(requests("generate_until", given))
        assert plain == more


def test_sampling_follows_the_seed(ours: HarnessModel) -> None:
    options = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 5.0}
    given = [("Question:", {**options, "seed": seed}) for seed in (0, 1, 1)]
    first, second, third = ours.generate_until(requests("generate_until", given))
    assert first != second == third


def test_progress(dense: Transformer, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimus.evaluation.harness._SCORED_AT_ONCE", 4)
    seen = []
    model = HarnessModel(dense, tokenizer, eos_id=0, context=CONTEXT, progress=lambda *at: seen.append(at))
    in_parts = model.loglikelihood(requests("loglikelihood", PAIRS))
    assert seen == [(4, 6), (6, 6)]
    monkeypatch.setattr("optimus.evaluation.harness._SCORED_AT_ONCE", 512)
    whole = model.loglikelihood(requests("loglikelihood", PAIRS))
    assert [total for total, _ in in_parts] == pytest.approx([total for total, _ in whole], abs=1e-5)


def test_errors(make_model: Callable[..., Transformer], ours: HarnessModel, tokenizer: Any) -> None:
    with pytest.raises(UserError, match="'' has no tokens of its own after 'Answer:'"):
        ours.loglikelihood(requests("loglikelihood", [("Answer:", "")]))
    diverged = make_model("olmo")
    diverged.head.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="diverged"):
        HarnessModel(diverged, tokenizer, eos_id=0, context=CONTEXT).loglikelihood(requests("loglikelihood", PAIRS))
    with pytest.raises(UserError, match="`max_tokens` is 99"):
        ours.generate_until(requests("generate_until", [("a", {"until": [], "max_gen_toks": 99})]))
