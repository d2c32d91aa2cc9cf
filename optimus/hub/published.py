"""What a Hugging Face folder says beside architecture and weights: those who serve the model read it.

A checkpoint keeps it (`Description.published`), as do all that follow from that one, and an export says it again: special
tokens, the tokenizer's configuration, how to generate. What training makes untrue is left out: all of it that speaks of
tokens, if the checkpoint has another tokenizer.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from optimus.disk import parse_json
from optimus.errors import UserError
from optimus.hub.config_json import FILE, further_fields, read_config

GENERATION, TOKENIZER = "generation_config.json", "tokenizer_config.json"
_OF_TOKENS = (TOKENIZER, "special_tokens_map.json", "chat_template.jinja")  # beside tokenizer.json
_TOKEN, _LISTS = "_token_id", ("bad_words_ids", "suppress_tokens")  # what fields that name tokens end with
_OF_A_FOLDER = ("transformers_version", "_from_model_config", "auto_map")  # true of the folder it was read from alone


def read_published(path: Path) -> dict[str, Any]:
    """Of the folder `path`: its files by name, of config.json what `further_fields` names, and `sha256` of its
    tokenizer.json, if it has one. Raises `UserError` naming the file that cannot be read."""
    tokenizer = path / "tokenizer.json"
    found: dict[str, Any] = {FILE: further_fields(read_config(path))}
    for name in (GENERATION, *_OF_TOKENS):
        if (path / name).is_file():
            found[name] = _read(path / name)
    return found | {"sha256": _sha256(tokenizer) if tokenizer.is_file() else None}


class Remarks(NamedTuple):
    """What an export of a model says beside its architecture and weights; see `published_again`."""

    config: dict[str, Any]  # fields of config.json
    generation: dict[str, Any]  # those of generation_config.json
    files: dict[str, Any]  # others, by name


def published_again(
    said: Mapping[str, Any], *, vocab: int, tokenizer: Path | None, eos_id: int | None, pad_id: int | None, context: int
) -> Remarks:
    """What was `said` of the model that training began with, as it is true of a checkpoint with these tokens.

    `eos_id` ends documents in training: where it is not among the published tokens that end a text, it is put before them.
    """
    sha256 = said.get("sha256")
    same = tokenizer is not None and sha256 is not None and _sha256(tokenizer) == sha256
    unknown = tokenizer is None or sha256 is None  # whether it is: what is said of tokens stays
    config, generation = (
        {
            field: _in_vocabulary(value, vocab) if field.endswith(_TOKEN) else value
            for field, value in said.get(name, {}).items()
            if field not in _OF_A_FOLDER and (same or unknown or not field.endswith((_TOKEN, *_LISTS)))
        }
        for name in (FILE, GENERATION)
    )
    stops = config.get("eos_token_id")
    config |= {"eos_token_id": _with(eos_id, stops)}
    generation |= {"eos_token_id": _with(eos_id, generation.get("eos_token_id", stops))}
    generation |= {} if GENERATION in said else {"pad_token_id": pad_id}
    files = {name: said[name] for name in _OF_TOKENS if name in said} if same else {}
    if TOKENIZER in files:
        own = {name: value for name, value in files[TOKENIZER].items() if name not in _OF_A_FOLDER}
        longest = own.get("model_max_length")
        shorter = isinstance(longest, int | float) and longest < context
        files[TOKENIZER] = own | ({"model_max_length": context} if shorter else {})
    return Remarks(config, generation, files)


def _read(file: Path) -> Any:
    try:
        text = file.read_text(encoding="utf-8")
        raw = parse_json(text) if file.suffix == ".json" else text
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    if file.suffix == ".json" and not isinstance(raw, dict):
        raise UserError(f"{file} must hold a JSON object")
    return raw


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _in_vocabulary(value: Any, vocab: int) -> Any:
    """The token or tokens `value`, less what is no token of this vocabulary."""
    if isinstance(value, list):
        return [token for token in value if _in_vocabulary(token, vocab) is not None] or None
    return value if type(value) is int and 0 <= value < vocab else None


def _with(eos_id: int | None, stops: Any) -> Any:
    """`stops`, a token, several or none, with `eos_id` among them."""
    known = stops if isinstance(stops, list) else [] if stops is None else [stops]
    if eos_id is None or eos_id in known:
        return stops
    return [eos_id, *known] if known else eos_id
