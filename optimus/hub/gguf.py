"""Converts Hugging Face folders to GGUF files with the converter of a llama.cpp checkout, which stays as it is.

The converter recognises a pre-tokenizer by a hash of the token ids of a text. The hash depends on the vocabulary, so the
converter knows only tokenizers on its list, and none that was trained later. `pre_tokenizer` recognises the form instead.
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


def convert_to_gguf(
    folder: str | Path, llama_cpp: str | Path, output: str | Path, outtype: str = "auto", *, python: str | None = None
) -> dict[str, Any]:
    """Converts an exported folder to a GGUF file with the converter of llama.cpp; returns `output`, `bytes` and `pre`.

    `llama_cpp` is a llama.cpp checkout. `outtype` is the converter's: f32, f16, bf16, q8_0, or auto for 16 bits. `python` is
    an interpreter with the converter's packages (torch, transformers, sentencepiece); by default this one. `pre` is the
    name of the pre-tokenizer that Optimus gave the converter, or None. Raises `UserError`, also for a model that llama.cpp
    computes otherwise, and never touches existing files.

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
    if (why := other_result(raw)) is not None:
        raise UserError(f"{folder / CONFIG}: {why}")
    pre = pre_tokenizer(folder / TOKENIZER)
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


def pre_tokenizer(tokenizer: Path) -> str | None:
    """Returns llama.cpp's name of the pre-tokenizer in a tokenizer.json; None if the form is another than GPT-2's.

    A tokenizer of `optimus prepare` has GPT-2's form: byte-level BPE on the text as it is, split by GPT-2's pattern.
    """
    raw = _read(tokenizer)
    model, split = raw.get("model"), raw.get("pre_tokenizer")
    if not isinstance(model, dict) or not isinstance(split, dict):
        return None
    plain = model.get("type") == "BPE" and not any(model.get(option) for option in _PLAIN)
    form = {"type": split.get("type")} | {option: split.get(option, True) for option in _SPLITS}
    return "gpt-2" if plain and raw.get("normalizer") is None and form == _BYTE_LEVEL else None


def other_result(raw: dict[str, Any]) -> str | None:
    """Returns why llama.cpp would compute something else than a model with this config.json; None if it computes the same.

    The converter itself passes over these fields.
    """
    family, window = raw.get("model_type"), raw.get("sliding_window")
    context = raw.get("max_position_embeddings")
    if family in ("mistral", "mixtral") and window is not None and (context is None or window < context):
        return (
            f"sliding_window is {window}, and llama.cpp lets this model see all tokens: they agree on texts of {window} "
            f"tokens, for which max_position_embeddings must be at most {window}"
        )
    if family == "qwen3_moe" and not raw.get("norm_topk_prob", False):
        return "norm_topk_prob is false, and llama.cpp always renormalises the weights of this model's experts"
    if family == "olmoe" and raw.get("norm_topk_prob", False):
        return "norm_topk_prob is true, and llama.cpp never renormalises the weights of this model's experts"
    if family == "olmoe" and raw.get("rms_norm_eps", 1e-5) != 1e-5:
        return f"rms_norm_eps is {raw['rms_norm_eps']}, and llama.cpp computes this model with 1e-05"
    return None


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
