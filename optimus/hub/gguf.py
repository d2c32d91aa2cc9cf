"""Converts Hugging Face folders to GGUF files with the converter of a llama.cpp checkout, which stays as it is.

The converter recognises a pre-tokenizer by a hash of the token ids of a text. The hash depends on the vocabulary, so
the converter knows the tokenizers on its list, and none that was trained later. `pre_tokenizer` recognises the form.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from optimus.data.tokenizer import FILE as TOKENIZER
from optimus.disk import parse_json, user_path
from optimus.errors import UserError
from optimus.hub.config_json import FILE as CONFIG

CONVERTER = "convert_hf_to_gguf.py"
TYPES = ("auto", "f32", "f16", "bf16", "q8_0")
_RUN = Path(__file__).with_name("gguf_converter.py")
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_SPLITS = ("add_prefix_space", "use_regex")  # the options of ByteLevel that change how a text is split
_PLAIN = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
# What llama.cpp has for the family: whether attention has biases, and the pattern of windows.
_BIASES = dict.fromkeys(("gemma3_text", "olmo2", "olmo3", "qwen3", "qwen3_moe"), False) | {"gpt_oss": True}
_FULL_EVERY = {"gemma3_text": 6, "gpt_oss": 2}


def convert_to_gguf(
    folder: str | Path, llama_cpp: str | Path, output: str | Path, outtype: str = "auto", *, python: str | None = None
) -> dict[str, Any]:
    """Converts an exported folder to a GGUF file with the converter of llama.cpp; returns `output`, `bytes` and `pre`.

    `llama_cpp` is a llama.cpp checkout. `outtype` is the converter's: f32, f16, bf16, q8_0, or auto for 16 bits.
    `python` is an interpreter with the converter's packages (torch, transformers); by default this one. `pre` is the
    name of the pre-tokenizer for a tokenizer that the converter does not recognise, or None if Optimus knows no name.
    Raises `UserError`, also for a model that llama.cpp computes otherwise, and never touches existing files.

    Example:
        api.gguf("huggingface", "llama.cpp", "model.gguf")
    """
    if outtype not in TYPES:
        raise UserError(f"`outtype` is '{outtype}': choose one of {', '.join(TYPES)}")
    folder, llama_cpp, output = (user_path(path).absolute() for path in (folder, llama_cpp, output))
    if not (llama_cpp / CONVERTER).is_file():
        raise UserError(f"{llama_cpp} has no {CONVERTER}: give the folder of a llama.cpp checkout")
    if output.exists():
        raise UserError(f"{output} exists already: choose another output file or remove it")
    raw = _read(folder / CONFIG)
    tokenizer = _read(folder / TOKENIZER)
    if (why := other_result(raw, _tokens(tokenizer))) is not None:
        raise UserError(f"{folder / CONFIG}: {why}")
    pre = pre_tokenizer(tokenizer)
    partial = output.with_name(f".{output.name}.partial")
    words = [python or sys.executable, str(_RUN), str(llama_cpp), pre or ""]
    words += [str(folder), "--outfile", str(partial), "--outtype", outtype]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", env=_environment())
        if done.returncode != 0 or not partial.is_file():
            raise UserError(
                f"{llama_cpp / CONVERTER} does not convert {folder}: {_last_line(done.stderr + done.stdout)}"
            )
        partial.rename(output)
    except OSError as error:
        raise UserError(f"cannot convert {folder} to {output}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return {"output": str(output), "bytes": output.stat().st_size, "pre": pre}


def pre_tokenizer(raw: dict[str, Any]) -> str | None:
    """Returns llama.cpp's name of the pre-tokenizer of a tokenizer.json; None if the form is another than GPT-2's.

    A tokenizer of `optimus prepare` has GPT-2's form: byte-level BPE on the text as it is, split by GPT-2's pattern.
    """
    model, split = raw.get("model"), raw.get("pre_tokenizer")
    if not isinstance(model, dict) or not isinstance(split, dict):
        return None
    plain = model.get("type") == "BPE" and not any(model.get(option) for option in _PLAIN)
    form = {"type": split.get("type")} | {option: split.get(option, True) for option in _SPLITS}
    return "gpt-2" if plain and raw.get("normalizer") is None and form == _BYTE_LEVEL else None


def other_result(raw: dict[str, Any], tokens: int) -> str | None:
    """Returns why llama.cpp does not compute the model of this config.json; None if it does.

    `tokens` is the number of tokens of its tokenizer. The converter passes over these fields without a word: the file
    would not load, or hold another model.
    """
    family, own = raw.get("model_type"), raw.get
    window, context, layers = own("sliding_window"), own("max_position_embeddings"), own("num_hidden_layers")
    if family in ("mistral", "mixtral") and window is not None and (context is None or window < context):
        return (
            f"sliding_window is {window}, and llama.cpp lets this model see all tokens. Both agree on texts of at most "
            f"{window} tokens: set max_position_embeddings to {window}, or sliding_window to null for all tokens"
        )
    if family == "qwen3_moe" and not own("norm_topk_prob"):
        return "norm_topk_prob is false, and llama.cpp always renormalises the weights of this family's experts"
    if family == "olmoe" and own("norm_topk_prob"):
        return "norm_topk_prob is true, and llama.cpp never renormalises the weights of this family's experts"
    if family == "olmoe" and own("rms_norm_eps", 1e-5) != 1e-5:
        return f"rms_norm_eps is {raw['rms_norm_eps']}, and llama.cpp computes this family with 1e-05"
    if (biases := _BIASES.get(str(family))) is not None and own("attention_bias", biases) is not biases:
        which = "only with" if biases else "only without"
        return f"attention_bias is {str(own('attention_bias')).lower()}: llama.cpp has this family {which} these biases"
    if family == "gpt2" and own("n_inner") not in (None, 4 * own("n_embd", 0)):
        return f"n_inner is {raw['n_inner']}: llama.cpp has this family only with 4 times n_embd"
    if family == "deepseek_v3" and own("q_lora_rank") is None:
        return "q_lora_rank is null: llama.cpp has this family only with latent queries"
    if (every := _FULL_EVERY.get(str(family))) is not None and not _full_every(own("layer_types"), every):
        return (
            f"layer_types is {raw['layer_types']}: llama.cpp has full attention in each {every}th layer of this family"
        )
    if family == "gemma3_text" and own("vocab_size", 0) > tokens:
        return (
            f"vocab_size is {raw['vocab_size']}, and the converter cuts this family's to the {tokens} of the tokenizer"
        )
    if family == "gemma3_text":
        # llama.cpp knows Gemma 3 27B, with a scale of its own, by its layers.
        known = own("hidden_size", 0) // own("num_attention_heads", 1) if layers == 62 else own("head_dim", 256)
        if (scale := own("query_pre_attn_scalar", 256)) != known:
            return f"query_pre_attn_scalar is {scale}, and llama.cpp computes this model with {known}"
    kinds = [kind for kind in (own("rope_parameters") or {}).values() if isinstance(kind, dict)]  # of layers
    if family == "olmo3" and len(thetas := {float(kind["rope_theta"]) for kind in kinds}) > 1:
        return f"rope_parameters has the rope_theta {sorted(thetas)}: llama.cpp has one for all layers of this family"
    return None


def _full_every(kinds: list[str] | None, every: int) -> bool:
    return kinds is None or all(
        (kind == "full_attention") == ((layer + 1) % every == 0) for layer, kind in enumerate(kinds)
    )


def _tokens(raw: dict[str, Any]) -> int:
    """Returns the number of tokens of a tokenizer.json."""
    vocabulary: Any = raw.get("model", {}).get("vocab", {})
    names = set(vocabulary) if isinstance(vocabulary, dict) else {piece for piece, _ in vocabulary}
    return len(names | {token["content"] for token in raw.get("added_tokens", [])})


def _environment() -> dict[str, str]:
    """Returns the environment of the converter, which must not ask a hub for what the folder lacks."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path} must hold a JSON object")
    return raw


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it ended without a message"
