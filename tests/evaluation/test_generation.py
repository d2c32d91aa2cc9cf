"""Generation: greedy tokens, sampled tokens, and the end of a text."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from helpers.drawing import config_of
from helpers.families import SIZES, needed
from helpers.sweep import in_turns
from optimus.comm import Groups
from optimus.config import ModelConfig, load_config
from optimus.data.chat import ChatTemplate
from optimus.data.tokenizer import load
from optimus.errors import UserError
from optimus.evaluation import generate
from optimus.evaluation.generation import Generation, Request, TextStream, answer, decode, sampled
from optimus.model import Batch, KVCache, Transformer
from optimus.model.families import families
from optimus.model.init import initialize
from optimus.resolve.ranks import mesh_of
from optimus.testing import run_ranks
from optimus.testing.steps import build

PROMPT = [3, 141, 59, 26]


def generate_tokens(
    model: Transformer, prompt: list[int], *, context: int | None = None, **options: Any
) -> Iterator[int]:
    """Returns the tokens that continue one prompt."""
    generation = Generation(model, [Request(prompt, **options)], context=context)
    return (token for _, token in generation)


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


def drawn(seed: int, count: int, vocab: int = 48, longest: int = 11) -> list[list[int]]:
    """Returns `count` prompts of different lengths."""
    random = torch.Generator().manual_seed(seed)
    lengths = [1, longest, *torch.randint(1, longest + 1, (count - 2,), generator=random).tolist()]
    return [torch.randint(vocab, (length,), generator=random).tolist() for length in lengths]


def collected(generation: Generation, count: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(count)]
    for number, token in generation:
        found[number].append(token)
    return found


@pytest.mark.parametrize("name", in_turns(families(), 3, always=6))
def test_many_prompts_get_the_tokens_that_each_gets_alone(name: str) -> None:
    """For every family, prompts of different lengths in 3 rows, with other lengths and draws of the continuations."""
    model = Transformer(ModelConfig.model_validate({"family": name, **SIZES, **needed(name)}))
    initialize(model, seed=3, std=0.5)
    lengths = [9, 1, 20, 7, 13, 2, 16, 5]
    requests = [
        Request(prompt, length, temperature=float(number % 2), top_p=0.9, seed=number)
        for number, (prompt, length) in enumerate(zip(drawn(1, 8), lengths, strict=True))
    ]
    alone = [[token for _, token in Generation(model, [request])] for request in requests]
    assert list(map(len, alone)) == lengths
    assert collected(Generation(model, requests, rows=3), 8) == alone
    assert collected(Generation(model, requests), 8) == alone
    for request, tokens in list(zip(requests, alone))[::2]:
        assert tokens == greedy_without_cache(model, list(request.prompt), len(tokens))


def test_ends_of_some_rows(model: Transformer) -> None:
    """Rows that end at a stop, or are stopped, do not change the others."""
    prompts = drawn(2, 6, vocab=97)
    alone = [greedy_without_cache(model, prompt, 12) for prompt in prompts]
    stops = [tokens[number] for number, tokens in enumerate(alone)]
    requests = [Request(prompt, 12, stops=[stop]) for prompt, stop in zip(prompts[:5], stops)]
    requests.append(Request(prompts[5], 12))
    generation, found = Generation(model, requests, rows=4), [list[int]() for _ in prompts]
    for number, token in generation:
        found[number].append(token)
        if number == 5 and len(found[5]) == 3:
            generation.stop(5)
    assert found[:5] == [tokens[: tokens.index(stop)] for tokens, stop in zip(alone[:5], stops[:5], strict=True)]
    assert found[5] == alone[5][:3]


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gpt_oss"])
def test_the_rows_that_fit_into_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches take no more than the bytes that they may, as they are counted before they are made."""
    model = Transformer(ModelConfig.model_validate({"family": name, **SIZES, **needed(name)}))
    initialize(model, seed=3, std=0.5)
    requests = [Request(prompt, 9) for prompt in drawn(1, 8)]
    alone = [[token for _, token in Generation(model, [request])] for request in requests]
    capacity = max(len(request.prompt) for request in requests) + 9
    one = sum(buffer[:1].nbytes for layer in made_cache(model, capacity).layers for buffer in layer._buffers)
    monkeypatch.setattr("optimus.evaluation.generation._CACHE_BYTES", 3 * one + one // 2)
    generation = Generation(model, requests)
    assert generation._slots == 3
    assert collected(generation, 8) == alone


def made_cache(model: Transformer, capacity: int) -> KVCache:
    """Returns the cache of a sequence for which `capacity` positions have been reserved."""
    cache = KVCache(model.config.layers, capacity=capacity)
    with torch.no_grad():
        model.hidden_states(torch.tensor([[1, 2]]), cache)
    return cache


def test_an_empty_cache_adds_no_rows(model: Transformer) -> None:
    """A cache without rows, new or after the removal of its last row, leaves the other cache as it is."""
    cache, removed = made_cache(model, 8), made_cache(model, 8)
    removed.remove(0)
    for empty in (KVCache(model.config.layers), removed):
        cache.extend(empty)
    assert cache.lengths == [2]
    removed.extend(cache)
    assert removed.lengths == [2]
    assert all(
        torch.equal(*(each._buffers[0][:1, :, :2] for each in layers)) for layers in zip(removed.layers, cache.layers)
    )


def test_a_diverged_sequence_leaves_nothing_in_its_row(model: Transformer) -> None:
    """The prompt that follows a sequence of infinite keys and values in the same row has the tokens that it has alone."""
    prompts = [[3, 5, 7, 9, 11, 13], [2, 4]]
    alone = greedy_without_cache(model, prompts[1], 8)
    with torch.no_grad():
        model.embedding.weight[13] = torch.inf
    found = collected(Generation(model, [Request(prompt, 8, stops=[0]) for prompt in prompts], rows=1), 2)
    assert found[1] == alone
    assert not set(alone) & {13}


@pytest.mark.parametrize("name", ["allenai_dolma2", "allenai_gpt-neox-olmo-dolma-v1_5", "torchtitan_test_small_bpe"])
def test_pieces_of_text_are_the_whole_text(name: str) -> None:
    """Text that is decoded token by token is that of all tokens, also where a character has several tokens."""
    path = Path(__file__).parents[3] / "shared" / "data" / "tokenizers" / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"{path} is absent")
    tokenizer = load(path, parse_special=False)
    for text in ("  def naïve(x):\n\treturn '你好, 🦙🏽'  # ", "été\u0301 ½ \u200d x", "\n\n\n"):
        prompt, ids = tokenizer.encode("Say: ").ids, tokenizer.encode(text, add_special_tokens=False).ids
        stream = TextStream(tokenizer, prompt)
        pieces = [stream.add(token) for token in ids]
        pieces.append(stream.finish())
        assert "".join(pieces) == stream.text == decode(tokenizer, prompt, ids)
        assert "\ufffd" not in "".join(pieces)


def test_the_sentencepiece_form_of_a_tokenizer() -> None:
    """Spaces before words and bytes of characters survive, where the decoder drops the first space of a text."""
    pieces = {"<unk>": 0, "▁all": 1, "▁men": 2, "s": 3} | {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(pieces, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    stream = TextStream(tokenizer, [1])
    ids = [2, 3, *(4 + byte for byte in "é🦙".encode()), 1, 4 + 0xF0]
    found = [stream.add(token) for token in ids]
    assert found == [" men", "s", "", "é", "", "", "", "🦙", " all", ""]
    assert stream.finish() == "\ufffd"  # a character that never became complete
    assert stream.text == " mensé🦙 all\ufffd"


def test_bytes_that_are_no_characters(tokenizer: Any) -> None:
    """Pieces of any bytes are the text of all bytes, also around characters that cannot be decoded."""
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.decoder = decoders.ByteLevel()
    random, parts = Random(0), ["🦙", "é", "€", "a", "\ufffd", " "]
    of_byte = {byte: alphabet[letter] for byte, letter in bytes_to_unicode().items()}
    for _ in range(300):
        text = b"".join(random.choice(parts).encode()[: random.choice([1, 2, 3, 4, 4])] for _ in range(8))
        ids, stream = [of_byte[byte] for byte in text], TextStream(tokenizer, [of_byte[ord("x")]])
        pieces = [stream.add(token) for token in ids]
        assert "".join(pieces) + stream.finish() == stream.text == tokenizer.decode(ids)


def test_ends_of_text_are_held_back(tokenizer: Any) -> None:
    ids = tokenizer.encode("one\nQ: two").ids
    stream = TextStream(tokenizer, [0], ["\nQ:", "\n\n"])
    pieces = []
    for token in ids:
        pieces.append(stream.add(token))
        if stream.ended:
            break
    assert "".join(pieces) == stream.text == "one"
    assert stream.finish() == ""
    stream = TextStream(tokenizer, [0], ["e!", "\nQ:"])
    assert "".join(map(stream.add, tokenizer.encode("one").ids)) == "on"  # the text may go on with "!"
    assert stream.finish() == "e"
    assert stream.text == "one"


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


def bytes_to_unicode() -> dict[int, str]:
    """Returns GPT-2's letter for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def test_a_tiny_temperature_is_greedy(model: Transformer) -> None:
    found = list(generate_tokens(model, PROMPT, max_tokens=9, temperature=1e-320))
    assert found == greedy_without_cache(model, PROMPT, 9)


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


def test_model_is_left_as_it_was(make_model: Callable[..., Transformer]) -> None:
    """The model can train between two tokens."""
    model = make_model("olmoe").requires_grad_(True).train()
    tokens = generate_tokens(model, PROMPT, max_tokens=3)
    next(tokens)
    assert model.training
    assert torch.is_grad_enabled()
    model.losses(torch.tensor([PROMPT])).cross_entropy.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    next(tokens)
    model.zero_grad()
    model.eval()


def test_text(model: Transformer, tokenizer: Any, eos_id: int) -> None:
    prompt = "Question: who?"
    ids = tokenizer.encode(prompt).ids
    expected = tokenizer.decode(greedy_without_cache(model, ids, 9), skip_special_tokens=False)
    from_nothing = tokenizer.decode(greedy_without_cache(model, [eos_id], 2))
    assert generate(model, tokenizer, [prompt], max_tokens=9) == [expected]
    assert generate(model, tokenizer, [""], max_tokens=2, eos_id=eos_id) == [from_nothing]


def test_decode_keeps_the_first_space() -> None:
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
        ({"max_tokens": 1.5}, "`max_tokens` is 1.5 and `seed` 0: give whole numbers"),
        ({"max_tokens": 1, "seed": 2**64}, "give whole numbers, the seed from 0 to"),
    ],
)
def test_errors(model: Transformer, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate_tokens(model, PROMPT, **options)


def test_empty_prompt(model: Transformer, tokenizer: Any) -> None:
    with pytest.raises(UserError, match="prompt is empty"):
        generate(model, tokenizer, [""], max_tokens=1)
    for odd in (b"a", 3, "\ud800"):
        with pytest.raises(UserError, match="is not a text in UTF-8: give one"):
            generate(model, tokenizer, [odd], max_tokens=1)
    with pytest.raises(UserError, match="prompt 1 is empty"):
        generate(model, tokenizer, ["a", ""], max_tokens=1)
    bare = ChatTemplate("{{ messages[0]['content'] }}")
    with pytest.raises(UserError, match="prompt is empty"):
        answer(model, bare, tokenizer, tokenizer, [""], max_tokens=1)
    assert len(answer(model, bare, tokenizer, tokenizer, [""], eos_id=0, max_tokens=1)) == 1


def generated_on_ranks(config: dict[str, Any], ranks: int) -> list[int]:
    tree = load_config(config)
    model, state = build(tree, Groups(mesh_of(tree, ranks)))
    state.initialize(0, 0.5)
    prompts = [[3, 41, 5, 26, 7], [9], [8, 2, 30]]
    found = collected(Generation(model.model, [Request(prompt, 12) for prompt in prompts], rows=2), 3)
    return [token for tokens in found for token in tokens]


LEARNED = {"family": "gpt2", "hidden": 16, "layers": 2, "heads": 4, "intermediate": 24, "vocab": 59}


@pytest.mark.in_turn(0, 3)
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
    with pytest.raises(UserError, match="has 18 tokens, but the model has only 17"):  # in a row of its own
        list(generate_tokens(model, [1] * 16, max_tokens=3))
    model.losses(Batch(tokens_BS, document_BS=torch.arange(18)[None] // 17))


@pytest.mark.in_turn(1, 3)
@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"tensor": [2, 2], "sequence": True}], ids=str)
def test_on_a_sequence_parallel_grid(parallel: dict[str, Any]) -> None:
    """Sequence-parallel ranks divide the tokens, so a prompt of 5 tokens and each later step of 1 are padded. Padding
    has no keys."""
    alone = generated_on_ranks(config_of("moe"), 1)
    assert len(set(alone)) > 3
    ranks = 4 if "sequence" in parallel else 2
    assert run_ranks(generated_on_ranks, ranks, config_of("moe", parallel=parallel), ranks) == [alone] * ranks
