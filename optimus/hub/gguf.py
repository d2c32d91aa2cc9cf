"""Converts Hugging Face folders to GGUF files with the converter of an unmodified llama.cpp checkout."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimus.data.tokenizer import FILE as TOKENIZER
from optimus.disk import parse_json, user_path
from optimus.errors import UserError
from optimus.hub.config_json import FILE as CONFIG
from optimus.model.families import families

CONVERTER = "convert_hf_to_gguf.py"
TYPES = ("auto", "f32", "f16", "bf16", "q8_0")
_RUN = Path(__file__).with_name("gguf_converter.py")
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_SPLITS = ("add_prefix_space", "use_regex")  # options of ByteLevel that change the split of a text
_PLAIN = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")


def convert_to_gguf(
    folder: str | Path, converter: str | Path, output: str | Path, outtype: str = "auto", *, python: str | None = None
) -> dict[str, Any]:
    """Converts an exported folder to a GGUF file with the converter of llama.cpp; returns `output`, `bytes` and `pre`.

    `converter` is a llama.cpp checkout. `outtype` is the type of the tensors in the file: f32, f16, bf16, q8_0, or auto
    for 16 bits. `python` is an interpreter with the converter's packages, by default the interpreter of this
    process. `pre` is the name that the file gets for a pre-tokenizer that the converter does not recognise.

    Example:
        api.gguf("huggingface", "llama.cpp", "model.gguf")
    """
    if outtype not in TYPES:
        raise UserError(f"`outtype` is '{outtype}': choose one of {', '.join(TYPES)}")
    folder, converter, output = (user_path(path).absolute() for path in (folder, converter, output))
    if not (converter / CONVERTER).is_file():
        raise UserError(f"{converter} has no {CONVERTER}: give the folder of a llama.cpp checkout")
    if output.exists():
        raise UserError(f"{output} exists already: choose another output file or remove it")
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is no exported folder: it has no {CONFIG}. Make one with `optimus export`")
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} has no weights (*.safetensors): export the model again")
    if "{" in output.name:
        raise UserError(f"{output}: the converter replaces braces in a file's name: choose another name")
    raw = _read(folder / CONFIG)
    tokenizer = _read(folder / TOKENIZER)
    if (why := other_result(raw, _tokens(tokenizer))) is not None:
        raise UserError(f"{folder / CONFIG}: {why}")
    pre = pre_tokenizer(tokenizer)
    partial = output.with_name(f".{output.name}.partial")
    interpreter = _interpreter(python)
    words = [interpreter, str(_RUN), str(converter), pre or ""]
    words += [str(folder), "--outfile", str(partial), "--outtype", outtype]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        partial.touch(exist_ok=False)
    except OSError as error:
        if isinstance(error, FileExistsError) and output.parent.is_dir():
            raise UserError(
                f"{partial} exists already: wait until the other conversion to {output.name} ends, or, if there is none, "
                "remove it"
            ) from None
        raise UserError(f"cannot write {output}: {error.strerror or error}") from error
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", env=_environment())
        if done.returncode != 0 or partial.stat().st_size == 0:
            raise UserError(
                f"{converter / CONVERTER} does not convert {folder}: {_last_line(done.stderr + done.stdout)}"
            )
        partial.rename(output)
    except OSError as error:
        raise UserError(f"cannot convert {folder} to {output}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return {"output": str(output), "bytes": output.stat().st_size, "pre": pre}


def _interpreter(python: str | None) -> str:
    """Returns the path of the interpreter `python`, a path or a name on PATH. Default: this process's interpreter."""
    if python is None:
        return sys.executable
    if (found := shutil.which(str(user_path(python)))) is None:
        raise UserError(f"`python` is {python}, but there is no such interpreter: give its path, or a name on PATH")
    return found


def pre_tokenizer(raw: dict[str, Any]) -> str | None:
    """Returns "gpt-2", a name of llama.cpp, for byte-level BPE with the splits of GPT-2, and None otherwise."""
    model, split = raw.get("model"), raw.get("pre_tokenizer")
    if not isinstance(model, dict) or not isinstance(split, dict):
        return None
    plain = model.get("type") == "BPE" and not any(model.get(option) for option in _PLAIN)
    form = {"type": split.get("type")} | {option: split.get(option, True) for option in _SPLITS}
    return "gpt-2" if plain and raw.get("normalizer") is None and form == _BYTE_LEVEL else None


def other_result(raw: Mapping[str, Any], tokens: int) -> str | None:
    """Returns a known reason why llama.cpp would compute other results for the model of this config.json, or None.

    `tokens` is the number of tokens of the tokenizer.
    """
    family = families().get(str(raw.get("model_type")))
    for field, only in (family.gguf if family else {}).items():
        other = raw.get(field, only) != only
        needed = only(raw, tokens) if callable(only) else json.dumps(only) if other else None
        if needed is not None:
            return f"{field} is {json.dumps(raw.get(field))}: llama.cpp computes this family only with {needed}"
    return None


def _tokens(raw: dict[str, Any]) -> int:
    """Returns the number of tokens of a tokenizer.json, including added tokens."""
    try:
        vocabulary: Any = raw.get("model", {}).get("vocab", {})
        names = set(vocabulary) if isinstance(vocabulary, dict) else {piece for piece, _ in vocabulary}
        return len(names | {token["content"] for token in raw.get("added_tokens", [])})
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise UserError(f"{TOKENIZER} has no vocabulary of the library tokenizers: export the model again") from error


def _environment() -> dict[str, str]:
    """Returns this process's environment with settings against downloads from the hub and against bytecode files."""
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
