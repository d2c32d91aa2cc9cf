"""A GGUF file of an export has the tokens, the logits and the text of the checkpoint, or is refused.

The tests with llama.cpp need OPTIMUS_LLAMA_CPP, a llama.cpp checkout, and OPTIMUS_LLAMA_PYTHON, an interpreter that has
llama-cpp-python. Both run in processes of their own, so their versions are independent of this environment's.
"""

import json
import os
import random
import re
import subprocess
import sys
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import optimus
from optimus import api
from optimus.checkpoint.store import save_model
from optimus.config import ModelConfig
from optimus.data import tokenizer as of_data
from optimus.errors import UserError
from optimus.hub import export_checkpoint, export_model, gguf
from optimus.hub.gguf import other_result, pre_tokenizer
from optimus.model import Transformer
from optimus.model.families import families
from optimus.model.init import initialize

READER = Path(__file__).resolve().parents[1] / "lib" / "helpers" / "llama_reader.py"
CONTEXT, NEW_TOKENS = 128, 24

EXACT = 1e-5  # of logits whose standard deviation is about 2
# llama.cpp reads GELU from a table of 16-bit floats, and rounds the bounds of YaRN to whole dims (`truncate`).
GELU, YARN = 5e-3, 1e-2
LATENT = {"queries": 24, "keys": 16, "rotary": 8, "value": 16}
SPARSE = {"intermediate": 64, "experts": 4, "experts_per_token": 2}
THREE = {"kind": "llama3", "factor": 8.0, "original_context": 32}
OVER = {"kind": "yarn", "factor": 4.0, "original_context": 32}
CASES: dict[str, tuple[float, dict[str, Any]]] = {
    "llama": (EXACT, {"kv_heads": 2, "rope_scaling": THREE}),
    "llama-biases": (EXACT, {"attention_bias": "all", "mlp_bias": True, "head_size": 24, "tie_embeddings": True}),
    "llama-more-rows": (EXACT, {"vocab": 512}),
    "mistral": (EXACT, {"kv_heads": 2, "window": None}),
    "mixtral": (EXACT, SPARSE | {"kv_heads": 2}),
    "qwen2": (EXACT, {"kv_heads": 2, "tie_embeddings": True}),
    "qwen3": (EXACT, {"kv_heads": 2, "head_size": 24}),
    "qwen3_moe": (EXACT, SPARSE | {"head_size": 16, "renormalise": True}),
    "olmo": (EXACT, {}),
    "olmo2": (EXACT, {"kv_heads": 2}),
    "olmo3": (EXACT, {"window": 32, "full_attention_every": 2, "rope_scaling": OVER}),
    "olmoe": (EXACT, SPARSE),
    "deepseek_v3": (
        EXACT,
        {
            **SPARSE,
            "latent": LATENT,
            "head_size": 16,
            "intermediate": 128,
            "expert_intermediate": 48,
            "dense_layers": 1,
            "shared_experts": 2,
            "expert_groups": 2,
            "rope_scaling": OVER | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "gpt_oss": (YARN, SPARSE | {"head_size": 16, "window": 32}),
    "gpt_oss-unscaled": (EXACT, SPARSE | {"head_size": 16, "window": 32, "rope_scaling": None}),
    "gpt2": (GELU, {"intermediate": 256, "learned_positions": CONTEXT}),
    "gemma3_text": (GELU, {"layers": 6, "heads": 2, "head_size": 24, "query_scale": 24, "window": 32, "vocab": None}),
}
REFUSED = {
    "opt": ({"learned_positions": CONTEXT}, "Model OPTForCausalLM is not supported"),
    "gemma2": ({"head_size": 16, "query_scale": 16, "window": 32}, "tokenizer.model"),
    "qwen3_moe": (SPARSE | {"head_size": 16, "renormalise": True, "dense_layers": 1}, "Can not map tensor"),
}
HARD = [
    "",
    " ",
    "   ",
    "\n\n\n",
    " \n a",
    "a  b   c\t\td \r\n  \n\te  ",
    "it's they're I've I'm we'll he'd IT'S They'RE don't 'tis ''s",
    "3 33 333 3333 12,345.67e-8 0x1F v1.2.3 a1b2 ½ ² ٣٤ Ⅷ",
    "def f(x):\n    return x**2  # why?\n\n\n    pass",
    "naïve Straße Ελλάδα привет 你好世界 こんにちは 한국어 ไทย हिन्दी عربى",
    "e\u0301 n\u0303 a\u200db \u00a0x\u3000y\u2003z\u2028w\u0085v \ufeff",
    "🚀🚀 👨‍👩‍👧 🇩🇪 ✅!!! ...??? ------=======",
    "<|endoftext|> is text here, and so is <|endoftext|>",
    "\x00\x01\x1c\x1f\x7f",
]


@pytest.fixture(scope="module")
def text() -> str:
    """Sentences that a small model learns in a few steps, so that its choices are clear."""
    drawn = random.Random(3)
    subjects, verbs = ("Each rank", "The router", "A 2nd node", "It"), ("keeps", "reads", "doesn't lose", "sends")
    objects, ends = (
        ("its shard", "12 tokens", "the weights", "one gradient"),
        (".", "!\n", ", then waits.\n\n", ":\n  - "),
    )
    return "".join(
        f"{drawn.choice(subjects)} {drawn.choice(verbs)} {drawn.choice(objects)}{drawn.choice(ends)}"
        for _ in range(4000)
    )


@pytest.fixture(scope="module")
def trained(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer as `optimus prepare` trains it."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    of_data.train([text], 400, path)
    return path


@pytest.fixture(scope="module")
def llama_cpp() -> Path:
    """The llama.cpp checkout."""
    if not (named := os.environ.get("OPTIMUS_LLAMA_CPP")):
        pytest.skip("OPTIMUS_LLAMA_CPP names no llama.cpp checkout")
    pytest.importorskip("transformers")  # the converter needs it
    return Path(named)


@pytest.fixture(scope="module")
def llama_python() -> str:
    """The interpreter that has llama-cpp-python."""
    if not (named := os.environ.get("OPTIMUS_LLAMA_PYTHON")):
        pytest.skip("OPTIMUS_LLAMA_PYTHON names no Python with llama-cpp-python")
    return named


def read_by_llama(python: str, file: Path, **job: Any) -> dict[str, Any]:
    asked = {"file": str(file), "context": CONTEXT, "texts": [], "paths": [], "prompts": [], "tokens": NEW_TOKENS} | job
    done = subprocess.run([python, str(READER)], input=json.dumps(asked), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def learned(config: Mapping[str, Any], ids: torch.Tensor, steps: int) -> Transformer:
    base = {"hidden": 64, "layers": 2, "heads": 4, "intermediate": 128}
    model = Transformer(ModelConfig.model_validate(base | dict(config)))
    initialize(model, 0, 0.02)
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases that a few steps leave where they began would show nothing
                parameter.add_(torch.randn(parameter.shape, generator=draws) * 0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        at = torch.randint(0, len(ids) - 65, (8,), generator=draws).tolist()
        batch = torch.stack([ids[begin : begin + 65] for begin in at])
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_continues_as_the_checkpoint(
    name: str, text: str, trained: Path, llama_cpp: Path, llama_python: str, tmp_path: Path
) -> None:
    tolerance, fields = CASES[name]
    info, loaded = of_data.inspect(trained), of_data.load(trained)
    encode = of_data.encoder(loaded)
    fields = {"family": name.partition("-")[0], "vocab": info.vocab_size, **fields}
    fields["vocab"] = fields["vocab"] or info.vocab_size
    # Learned positions take their time.
    model = learned(fields, torch.tensor(encode(text)), 80 if "learned_positions" not in fields else 400)
    save_model(model, tmp_path / "checkpoint", context=CONTEXT, tokenizer=trained, eos_id=info.eos_id)
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "hf")
    made = api.gguf(tmp_path / "hf", llama_cpp, tmp_path / "model.gguf", "f32")
    assert made["pre"] == "gpt-2"

    # The last is longer than a window, and than the context before rotary scaling.
    prompts = ["The", "Each rank doesn't lose 12", "A 2nd node reads one gradient:\n", text[:150]]
    ours = optimus.generate(tmp_path / "checkpoint", prompts, max_tokens=NEW_TOKENS)
    assert len(set(ours)) > 1
    prompt_ids = [encode(prompt) for prompt in prompts]
    paths = [[*ids, *encode(after)] for ids, after in zip(prompt_ids, ours, strict=True)]
    theirs = read_by_llama(llama_python, tmp_path / "model.gguf", texts=prompts + HARD, paths=paths, prompts=prompts)
    assert theirs["encoded"][: len(prompts)] == prompt_ids
    assert theirs["encoded"][len(prompts) :] == [encode(each) for each in HARD]
    sure = 0
    for path, ids, logits, said in zip(paths, prompt_ids, theirs["logits"], theirs["continued"], strict=True):
        with torch.no_grad():
            ours_SV = model(torch.tensor([path]))[0]
        assert float((torch.tensor(logits) - ours_SV).abs().max()) < tolerance
        best = ours_SV[len(ids) - 1 : -1].topk(2).values
        # From a draw between two tokens on, both texts are right.
        drawn = (best[:, 0] - best[:, 1] <= 2 * tolerance).nonzero().flatten().tolist()
        end = len(ids) + drawn[0] if drawn else len(path)
        assert said.startswith(loaded.decode(path[len(ids) : end]))
        sure += end - len(ids)
    assert sure >= NEW_TOKENS
    if tolerance == EXACT:
        assert theirs["continued"] == ours


@pytest.mark.parametrize("family", REFUSED)
def test_the_converter_refuses(family: str, trained: Path, llama_cpp: Path, tmp_path: Path) -> None:
    fields, words = REFUSED[family]
    info = of_data.inspect(trained)
    model = learned({"family": family, "vocab": info.vocab_size, **fields}, torch.zeros(100, dtype=torch.long), 0)
    export_model(model, tmp_path / "hf", context=CONTEXT, tokenizer=trained, eos_id=info.eos_id)
    with pytest.raises(UserError, match="does not convert") as raised:
        api.gguf(tmp_path / "hf", llama_cpp, tmp_path / "model.gguf")
    assert words in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_every_family_is_tested() -> None:
    tested = {name.partition("-")[0] for name in (*CASES, *REFUSED)}
    assert tested == {name for name, family in families().items() if family.architecture}


def test_the_tokens_of_texts_of_all_kinds(llama_cpp: Path, llama_python: str, tmp_path: Path) -> None:
    """llama.cpp splits as `tokenizers`. The vocabulary has all pairs of bytes: its tokens show where a text was split.

    Letters of Unicode 16 and later, which llama.cpp does not know yet, are left out.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(first, second) for first in alphabet for second in alphabet]
    random.Random(0).shuffle(pairs)
    names = ["<|endoftext|>", *alphabet, *(first + second for first, second in pairs)]
    made = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    model = Transformer(ModelConfig(family="llama", hidden=16, layers=1, heads=1, vocab=len(names), intermediate=16))
    export_model(model, tmp_path / "hf", context=CONTEXT, tokenizer=tmp_path / "tokenizer.json", eos_id=0)
    api.gguf(tmp_path / "hf", llama_cpp, tmp_path / "model.gguf", "f16")
    encode = of_data.encoder(of_data.load(tmp_path / "tokenizer.json"))
    texts = [*HARD, *drawn_texts(3000)]
    theirs = read_by_llama(llama_python, tmp_path / "model.gguf", texts=texts)["encoded"]
    assert [each for each, ids in zip(texts, theirs, strict=True) if encode(each) != ids] == []


def drawn_texts(count: int) -> list[str]:
    drawn = random.Random(0)
    common = [
        " ",
        "  ",
        "\n",
        "\r",
        "\t",
        "a",
        "B",
        "1",
        "'",
        "'s",
        "'re",
        "'LL",
        "é",
        "中",
        "٣",
        "²",
        "\u00a0",
        "\u3000",
    ]
    common += ["\u2028", "\u0301", "-", "🚀", "\u200d", "ǅ", "_", "."]
    # Those that Python knows: versions of Unicode differ in the letters that came last.
    others = [chr(code) for code in range(1, 0x3000) if unicodedata.category(chr(code)) != "Cn"]
    return [
        "".join(drawn.choice(common if drawn.random() < 0.8 else others) for _ in range(drawn.randint(1, 24)))
        for _ in range(count)
    ]


def test_a_trained_tokenizer_splits_as_llama_cpp(trained: Path) -> None:
    """A text falls into the matches of the expression that llama.cpp has for gpt-2, and what is between them."""
    regex = pytest.importorskip("regex")
    assert pre_tokenizer(json.loads(trained.read_text())) == "gpt-2"
    pattern = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)")
    split = of_data.load(trained).pre_tokenizer
    for text in [*HARD, *drawn_texts(3000)]:
        bounds = {0, len(text)} | {bound for match in pattern.finditer(text) for bound in match.span()}
        ends = sorted(bounds - {0})
        assert [end for _, (_, end) in split.pre_tokenize_str(text)] == ends or not text, text


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("pre_tokenizer",), None),
        (("pre_tokenizer", "add_prefix_space"), True),
        (("pre_tokenizer", "use_regex"), False),
        (("pre_tokenizer", "type"), "Whitespace"),
        (("normalizer",), {"type": "NFC"}),
        (("model", "type"), "Unigram"),
        (("model", "ignore_merges"), True),
        (("model", "byte_fallback"), True),
        (("model", "unk_token"), "<unk>"),
        (("model", "end_of_word_suffix"), "</w>"),
    ],
)
def test_another_form_has_no_name(where: tuple[str, ...], value: Any, trained: Path) -> None:
    raw = json.loads(trained.read_text())
    place = raw
    for name in where[:-1]:
        place = place[name]
    place[where[-1]] = value
    assert pre_tokenizer(raw) is None


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"model_type": "mistral", "sliding_window": 64, "max_position_embeddings": 65}, "sliding_window is 64"),
        ({"model_type": "mixtral", "sliding_window": 64}, "sliding_window is 64"),
        ({"model_type": "mistral", "sliding_window": 64, "max_position_embeddings": 64}, None),
        ({"model_type": "mistral", "sliding_window": None, "max_position_embeddings": 64}, None),
        ({"model_type": "qwen3_moe", "norm_topk_prob": False}, "norm_topk_prob is false"),
        ({"model_type": "qwen3_moe", "norm_topk_prob": True}, None),
        ({"model_type": "olmoe", "norm_topk_prob": True}, "norm_topk_prob is true"),
        ({"model_type": "olmoe", "norm_topk_prob": False, "rms_norm_eps": 1e-5}, None),
        ({"model_type": "olmoe", "rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06"),
        ({"model_type": "olmo2", "attention_bias": True}, "with false"),
        ({"model_type": "qwen3", "attention_bias": False}, None),
        ({"model_type": "gpt_oss", "attention_bias": False}, "with true"),
        ({"model_type": "gpt_oss", "layer_types": ["full_attention", "sliding_attention"]}, "one layer of 2"),
        ({"model_type": "gpt_oss", "layer_types": ["sliding_attention", "full_attention"]}, None),
        ({"model_type": "gpt2", "n_embd": 8, "n_inner": 16}, "n_inner is 16"),
        ({"model_type": "gpt2", "n_embd": 8, "n_inner": 32}, None),
        ({"model_type": "gpt2", "n_embd": 8, "n_inner": None}, None),
        ({"model_type": "deepseek_v3", "q_lora_rank": None}, "q_lora_rank is null"),
        ({"model_type": "gemma3_text", "vocab_size": 301, "head_dim": 256}, "vocab_size is 301"),
        ({"model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 8}, "with 16"),
        ({"model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 16}, None),
        (
            {
                "model_type": "gemma3_text",
                "num_hidden_layers": 62,
                "hidden_size": 64,
                "num_attention_heads": 2,
                "head_dim": 16,
                "query_pre_attn_scalar": 32,
            },
            None,
        ),
        (
            {
                "model_type": "olmo3",
                "rope_parameters": {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}},
            },
            "with one rope_theta",
        ),
        ({"model_type": "olmo3", "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, None),
        ({"model_type": "llama", "sliding_window": 3}, None),
    ],
)
def test_models_that_llama_cpp_computes_otherwise_are_named(raw: dict[str, Any], said: str | None) -> None:
    why = other_result(raw, 300)
    assert (why is None) if said is None else (why is not None and said in why)


SCRIPT = """
import sys
{classes}
def main():
    folder, outfile = sys.argv[1], sys.argv[sys.argv.index("--outfile") + 1]
    if "bad" in folder:
        raise ValueError("no such tensor")
    pre = TextModel().get_vocab_base_pre("a tokenizer")
    open(outfile, "w").write(" ".join([pre, *sys.argv[-2:]]))

if __name__ == "__main__":
    main()
"""
CLASS = """
class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        {does}
"""


def checkout(folder: Path, does: str, package: bool) -> Path:
    """Writes a converter in the form that llama.cpp has now (`package`) or had before."""
    folder.mkdir()
    classes = CLASS.format(does=does)
    if package:
        (folder / "conversion").mkdir()
        (folder / "conversion" / "__init__.py").touch()
        (folder / "conversion" / "base.py").write_text(classes)
        classes = "from conversion.base import TextModel"
    (folder / "convert_hf_to_gguf.py").write_text(SCRIPT.format(classes=classes))
    return folder


def exported(folder: Path, tokenizer: Path, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    (folder / "model.safetensors").touch()
    return folder


@pytest.mark.parametrize("package", [True, False])
def test_the_converter_learns_the_name_of_what_it_does_not_know(package: bool, trained: Path, tmp_path: Path) -> None:
    unknown = checkout(tmp_path / "unknown", "raise NotImplementedError('not recognized')", package)
    known = checkout(tmp_path / "known", "return 'olmo'", package)
    folder = exported(tmp_path / "hf", trained)
    made = api.gguf(folder, unknown, tmp_path / "new" / "a.gguf", "q8_0")
    assert made == {"output": str(tmp_path / "new" / "a.gguf"), "bytes": 20, "pre": "gpt-2"}
    assert (tmp_path / "new" / "a.gguf").read_text() == "gpt-2 --outtype q8_0"
    api.gguf(folder, known, tmp_path / "b.gguf")
    assert (tmp_path / "b.gguf").read_text() == "olmo --outtype auto"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.gguf"]


def test_what_cannot_be_converted_is_one_message(trained: Path, tmp_path: Path) -> None:
    tool = checkout(tmp_path / "tool", "raise NotImplementedError('not recognized')", True)
    folder, bad = exported(tmp_path / "hf", trained), exported(tmp_path / "bad", trained)
    raw = json.loads(trained.read_text()) | {"normalizer": {"type": "NFC"}}
    (tmp_path / "other.json").write_text(json.dumps(raw))
    other = exported(tmp_path / "other", tmp_path / "other.json")
    window = exported(tmp_path / "window", trained, model_type="mistral", sliding_window=8)
    empty = exported(tmp_path / "empty", trained)
    (empty / "model.safetensors").unlink()
    (tmp_path / "odd.json").write_text('{"model": {"vocab": [1, 2]}}')
    odd = exported(tmp_path / "odd", tmp_path / "odd.json")
    output = tmp_path / "model.gguf"
    for arguments, said in [
        ((folder, tmp_path, output), "has no convert_hf_to_gguf.py"),
        (
            (tmp_path / "none", tool, output),
            "is no exported folder: it has no config.json. Make one with `optimus export`",
        ),
        ((folder, tool, trained), "exists already"),
        ((folder, tool, output, "q9"), "choose one of auto, f32"),
        ((bad, tool, output), "ValueError: no such tensor"),
        ((other, tool, output), "NotImplementedError: not recognized"),
        ((window, tool, output), "sliding_window is 8"),
        ((empty, tool, output), r"has no weights \(\*.safetensors\)"),
        ((odd, tool, output), "tokenizer.json has no vocabulary"),
        ((folder, tool, tmp_path / "{ftype}.gguf"), "replaces braces"),
        ((folder, tool, trained / "model.gguf"), "cannot write"),
    ]:
        with pytest.raises(UserError, match=said):
            api.gguf(*arguments)
    with pytest.raises(UserError, match=r"`python` is .*no-python, but there is no such interpreter: give"):
        api.gguf(folder, tool, output, python=str(tmp_path / "no-python"))
    assert not [path for path in tmp_path.iterdir() if "gguf" in path.name]


def test_the_interpreter_may_be_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python9").write_text("#!/bin/sh\n")
    (tmp_path / "python9").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert {gguf._interpreter(each) for each in ("python9", "~/python9")} == {str(tmp_path / "python9")}
    assert gguf._interpreter(None) == sys.executable
    for absent in ("python8", "~/python8", ""):
        with pytest.raises(UserError, match=rf"^`python` is {absent}, but there is no such interpreter"):
            gguf._interpreter(absent)


def test_a_partial_file_of_another_is_left_alone(trained: Path, tmp_path: Path) -> None:
    """Another conversion to the same file may be under way; the user decides."""
    known, folder = checkout(tmp_path / "known", "return 'olmo'", True), exported(tmp_path / "hf", trained)
    partial = tmp_path / ".a.gguf.partial"
    partial.write_text("of another")
    with pytest.raises(UserError, match=rf"{re.escape(str(partial))} exists already: .* remove it"):
        api.gguf(folder, known, tmp_path / "a.gguf")
    assert partial.read_text() == "of another"
    assert not (tmp_path / "a.gguf").exists()


def test_a_converter_that_writes_nothing(trained: Path, tmp_path: Path) -> None:
    folder, tool = exported(tmp_path / "hf", trained), tmp_path / "tool"
    tool.mkdir()
    (tool / "convert_hf_to_gguf.py").write_text("print('nothing to do')\n")
    with pytest.raises(UserError, match=r"does not convert .*: nothing to do"):
        api.gguf(folder, tool, tmp_path / "a.gguf")
    assert not [path for path in tmp_path.iterdir() if "gguf" in path.name]


def test_an_export_of_gpt2_has_the_context_that_the_converter_reads(tmp_path: Path) -> None:
    model = learned({"family": "gpt2", "vocab": 61, "learned_positions": 32}, torch.zeros(100, dtype=torch.long), 0)
    export_model(model, tmp_path / "hf", context=32, tokenizer=None, eos_id=None)
    raw = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert raw["n_ctx"] == raw["n_positions"] == 32
