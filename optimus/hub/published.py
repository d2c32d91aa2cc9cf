"""Metadata of a Hugging Face folder: special tokens, the tokenizer's configuration and generation settings."""

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from optimus.disk import parse_json
from optimus.errors import UserError
from optimus.hub.config_json import FILE, further_fields, read_config

GENERATION, TOKENIZER = "generation_config.json", "tokenizer_config.json"
# Files with metadata about tokens, besides tokenizer.json.
_OF_TOKENS = (TOKENIZER, "special_tokens_map.json", "chat_template.jinja")
# Other files of the tokenizer, which some programs read instead of tokenizer.json.
_FORMS = ("added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")
_TOKEN, _LISTS = "_token_id", ("bad_words_ids", "suppress_tokens")  # suffix and names of fields about tokens
_VERSIONS = "transformers_version", "_from_model_config"  # fields about the origin of a metadata file
_OF_A_FOLDER = (*_VERSIONS, "auto_map")  # fields that describe only their own folder


def read_published(path: Path) -> dict[str, Any]:
    """Reads the metadata of the folder `path`.

    The result maps names of metadata files to their content; for config.json, to `further_fields`. `bytes` maps the
    names of these files except config.json, and of tokenizer files, to the files' bytes in base64. `sha256` is the hash
    of tokenizer.json, or None. Raises `UserError` for a file that cannot be read.
    """
    tokenizer = path / "tokenizer.json"
    found: dict[str, Any] = {FILE: further_fields(read_config(path))}
    for name in (GENERATION, *_OF_TOKENS):
        if (path / name).is_file():
            found[name] = _read(path / name)
    files = [name for name in (GENERATION, *_OF_TOKENS, *_FORMS) if (path / name).is_file()]
    encoded = {name: base64.b64encode(_read_bytes(path / name)).decode() for name in files}
    return found | {"sha256": _sha256(tokenizer) if tokenizer.is_file() else None, "bytes": encoded}


class Remarks(NamedTuple):
    """The metadata in an export of a model."""

    config: dict[str, Any]  # fields of config.json
    generation: dict[str, Any]  # fields of generation_config.json
    file_bytes: dict[str, bytes]  # the bytes of the published files, by name
    files: dict[str, Any]  # other files, by name: a JSON object, a text or bytes

    def bytes_of(self, name: str, content: Any) -> bytes | None:
        """Returns the published bytes of the file `name` if their content equals `content`, otherwise None.

        The comparison ignores the fields `_VERSIONS` of the published file.
        """
        if (content_bytes := self.file_bytes.get(name)) is None:
            return None
        text = content_bytes.decode("utf-8", "replace").replace("\r\n", "\n")
        said = parse_json(text) if name.endswith(".json") else text
        if isinstance(said, dict):
            said = {field: value for field, value in said.items() if field not in _VERSIONS}
        return content_bytes if said == content else None


def published_again(
    said: Mapping[str, Any], *, vocab: int, tokenizer: Path | None, eos_id: int | None, pad_id: int | None, context: int
) -> Remarks:
    """Returns the metadata `said` of a published model, adapted to a checkpoint.

    `vocab`, `tokenizer`, `eos_id`, `pad_id` and `context` describe the checkpoint.
    """
    sha256 = said.get("sha256")
    same = tokenizer is not None and sha256 is not None and _sha256(tokenizer) == sha256
    unknown = tokenizer is None or sha256 is None  # if either tokenizer is unknown, the fields about tokens stay
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
    if GENERATION not in said or "eos_token_id" in generation or config["eos_token_id"] != stops:
        generation |= {"eos_token_id": _with(eos_id, generation.get("eos_token_id", stops))}
    generation |= {} if GENERATION in said else {"pad_token_id": pad_id}
    file_bytes = {name: base64.b64decode(text) for name, text in said.get("bytes", {}).items()}
    files = {name: said[name] for name in _OF_TOKENS if name in said} if same else {}
    files |= {name: file_bytes[name] for name in _FORMS if name in file_bytes} if same else {}
    if TOKENIZER in files:
        own = {name: value for name, value in files[TOKENIZER].items() if name not in _OF_A_FOLDER}
        longest = own.get("model_max_length")
        shorter = isinstance(longest, int | float) and longest < context
        files[TOKENIZER] = own | ({"model_max_length": context} if shorter else {})
    return Remarks(config, generation, file_bytes, files)


def _read(file: Path) -> Any:
    try:
        text = file.read_text(encoding="utf-8")
        raw = parse_json(text) if file.suffix == ".json" else text
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    if file.suffix == ".json" and not isinstance(raw, dict):
        raise UserError(f"{file} must hold a JSON object")
    return raw


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from error


def _sha256(file: Path) -> str:
    return hashlib.sha256(_read_bytes(file)).hexdigest()


def _in_vocabulary(value: Any, vocab: int) -> Any:
    """Returns the token or tokens in `value` that belong to the vocabulary, or None."""
    if isinstance(value, list):
        return [token for token in value if _in_vocabulary(token, vocab) is not None] or None
    return value if type(value) is int and 0 <= value < vocab else None


def _with(eos_id: int | None, stops: Any) -> Any:
    """Adds `eos_id`, if any, in front of the stop tokens `stops`, unless present."""
    known = stops if isinstance(stops, list) else [] if stops is None else [stops]
    if eos_id is None or eos_id in known:
        return stops
    return [eos_id, *known] if known else eos_id
