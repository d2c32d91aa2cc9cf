"""Generation: greedy tokens, sampled tokens, and the end of a text."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.drawing import config_of
from optimus.comm import Groups
from optimus.config import ModelConfig, load_config
from optimus.errors import UserError
from optimus.evaluation import generate
from optimus.evaluation.generation import Request, decode, generate_tokens, sampled
from optimus.model import Batch, Transformer
from optimus.resolve.ranks import mesh_of
from optimus.testing import run_ranks
from optimus.testing.steps import build

PROMPT = [3, 141, 59, 26]


def greedy_without_cache(model: Transformer, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("family", ["olmo", "olmoe"])
def test_greedy(make_model: Callable[..., Transformer], family: str) -> None:
    model = make_model(family)
    found = list(generate_tokens(model, PROMPT, max_tokens=20))
    assert found == greedy_without_cache(model, PROMPT, 20)
    assert len(set(found)) > 3  # different tokens make the comparison meaningful


def test_end_of_text_ends(model: Transformer) -> None:
    whole = list(generate_tokens(model, PROMPT, max_tokens=20))
    eos = whole[7]
    assert list(generate_tokens(model, PROMPT, max_tokens=20, stops=[eos])) == whole[: whole.index(eos)]


def test_context_takes_the_prompts_end(model: Transformer) -> None:
    found = list(generate_tokens(model, PROMPT, max_tokens=5, context=8))
    assert found == greedy_without_cache(model, PROMPT[-3:], 5)


def test_seed(model: Transformer) -> None:
    draws = [tuple(generate_tokens(model, PROMPT, max_tokens=12, temperature=1.0, seed=s)) for s in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert list(generate_tokens(model, PROMPT, max_tokens=12, temperature=0.7, top_p=1e-9)) == greedy_without_cache(
        model, PROMPT, 12
    )


def test_nucleus() -> None:
    """A nucleus of 0.7 keeps the first two of the probabilities 0.5, 0.3, 0.15, 0.05 and samples them at 5 : 3."""
    logits_BV = torch.tensor([0.15, 0.5, 0.05, 0.3]).log().expand(4000, 4)
    randoms = [torch.Generator().manual_seed(0)] * 4000

    def drawn(temperature: float, top_p: float) -> Counter[int]:
        return Counter(sampled(logits_BV, [Request([0], 1, temperature, top_p)] * 4000, randoms))

    counts = drawn(1.0, 0.7)
    assert set(counts) == {1, 3}
    assert counts[1] / 4000 == pytest.approx(5 / 8, abs=0.03)
    cold = drawn(0.5, 1.0)  # a temperature of 0.5 squares probabilities
    assert cold[1] / 4000 == pytest.approx(0.25 / 0.365, abs=0.03)


def test_model_is_left_as_it_was(model: Transformer) -> None:
    model.train()
    tokens = generate_tokens(model, PROMPT, max_tokens=3)
    next(tokens)
    assert model.training
    assert torch.is_grad_enabled()
    model.eval()


def test_text(model: Transformer, tokenizer: Any, eos_id: int) -> None:
    prompt = "Question: who?"
    ids = tokenizer.encode(prompt).ids
    expected = tokenizer.decode(greedy_without_cache(model, ids, 9), skip_special_tokens=False)
    from_nothing = tokenizer.decode(greedy_without_cache(model, [eos_id], 2))
    assert generate(model, tokenizer, [prompt], max_tokens=9) == [expected]
    assert generate(model, tokenizer, [""], max_tokens=2, eos_id=eos_id) == [from_nothing]


def test_decode_keeps_the_first_space() -> None:
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.WordLevel({"▁all": 0, "▁men": 1, "?": 2}, unk_token="?"))
    tokenizer.decoder = decoders.Metaspace()
    assert tokenizer.decode([1]) == "men"
    assert decode(tokenizer, [0], [1]) == " men"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "`max_tokens` is 0"),
        ({"max_tokens": 8, "context": 8}, "context is 8"),
        ({"max_tokens": 1, "temperature": -1.0}, "`temperature` is -1"),
        ({"max_tokens": 1, "temperature": float("nan")}, "`temperature` is nan"),
        ({"max_tokens": 1, "top_p": 0.0}, "`top_p` is 0"),
    ],
)
def test_errors(model: Transformer, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate_tokens(model, PROMPT, **options)


def test_empty_prompt(model: Transformer, tokenizer: Any) -> None:
    with pytest.raises(UserError, match="prompt is empty"):
        generate(model, tokenizer, [""], max_tokens=1)
    with pytest.raises(UserError, match="prompt 1 is empty"):
        generate(model, tokenizer, ["a", ""], max_tokens=1)


def generated_on_ranks(config: dict[str, Any], ranks: int) -> list[int]:
    tree = load_config(config)
    model, state = build(tree, Groups(mesh_of(tree, ranks)))
    state.initialize(0, 0.5)
    return list(generate_tokens(model.model, [3, 41, 5, 26, 7], max_tokens=12))


LEARNED = {"family": "gpt2", "hidden": 16, "layers": 2, "heads": 4, "intermediate": 24, "vocab": 59}


def test_learned_positions_on_a_grid() -> None:
    """A text may be as long as the learned positions, though a grid pads its rows beyond them; a longer text is refused."""
    config = config_of("dense") | {"model": LEARNED | {"learned_positions": 17}}
    config["train"] = config["train"] | {"sequence_length": 16}
    alone = generated_on_ranks(config, 1)
    assert len(set(alone)) > 3
    parallel = {"parallel": {"tensor": [2, 2], "sequence": True}}
    assert run_ranks(generated_on_ranks, 4, config | parallel, 4) == [alone] * 4
    model = Transformer(ModelConfig.model_validate(LEARNED | {"learned_positions": 17}))
    tokens_BS = torch.zeros(1, 18, dtype=torch.long)
    for use in (model, model.losses):
        with pytest.raises(UserError, match="has 18 tokens, but the model has only 17 learned positions: shorten the"):
            use(tokens_BS)
    model.losses(Batch(tokens_BS, document_BS=torch.arange(18)[None] // 17))


@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"tensor": [2, 2], "sequence": True}], ids=str)
def test_on_a_sequence_parallel_grid(parallel: dict[str, Any]) -> None:
    """Sequence-parallel ranks divide the tokens, so a prompt of 5 tokens and each later step of 1 are padded. Padding
    has no keys."""
    alone = generated_on_ranks(config_of("moe"), 1)
    assert len(set(alone)) > 3
    ranks = 4 if "sequence" in parallel else 2
    assert run_ranks(generated_on_ranks, ranks, config_of("moe", parallel=parallel), ranks) == [alone] * ranks
