"""Converts vocabularies of sentencepiece and tiktoken, and tokenizers of the Hugging Face Hub, to tokenizer.json.

A converted tokenizer lies in a folder of the user's cache whose name is a hash of its sources: each call with the same
sources finds the same file.
"""

import base64
import binascii
import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from optimus.data.remote import put
from optimus.disk import parse_json
from optimus.errors import UserError, how_to_install, naming_read_errors, said

FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
_VERSION = 1  # increase it when a conversion changes
_ENDINGS = (".model", ".tiktoken")
# Files that describe a tokenizer besides its vocabulary.
_BESIDE = (CONFIG, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
_OTHER_FORMS = ("vocab.json", "vocab.txt", "tekken.json")  # vocabularies that transformers converts
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
# Classes whose token ids are those of the sentencepiece model; other classes move them.
_PLAIN_CLASSES = ("", "Llama", "CodeLlama", "Gemma", "Phi3", "PreTrained", "TokenizersBackend")
_SPACE = "\u2581"  # stands for a space in the pieces of sentencepiece

# Patterns that split text into words, as published with the vocabularies. Where a published pattern has {1,3}+, `tokenizers`
# would read a repetition of the repetition.
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPECIAL = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
    "<|python_tag|>", "<|image|>", *(f"<|reserved_special_token_{number}|>" for number in range(2, 246)),
)  # fmt: skip


@dataclass(frozen=True)
class _Encoding:
    """The rest of a tiktoken tokenizer, which the file with the ranks does not hold."""

    pattern: str
    special: Mapping[str, int]
    eos: str


_GPT2_ENCODING = _Encoding(_GPT2, {"<|endoftext|>": 50256}, "<|endoftext|>")
# Published files of ranks, by their SHA-256.
_KNOWN = {
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": _GPT2_ENCODING,  # r50k_base, also gpt2
    "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069": _GPT2_ENCODING,  # p50k_base
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": _Encoding(  # cl100k_base
        _CL100K,
        {
            "<|endoftext|>": 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
        "<|endoftext|>",
    ),
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": _Encoding(  # o200k_base
        _O200K, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}, "<|endoftext|>"
    ),
    "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55": _Encoding(  # Llama 3
        _LLAMA3, {token: 128000 + number for number, token in enumerate(_LLAMA3_SPECIAL)}, "<|end_of_text|>"
    ),
}


def tokenizer_json(named: Path) -> Path:
    """Returns the path of the tokenizer.json of a tokenizer, and converts the tokenizer first if necessary.

    `named` is a tokenizer.json, a sentencepiece model, a tiktoken vocabulary, a folder with one of them, or the name
    of a repository of the Hugging Face Hub. Raises `UserError` if there is no such tokenizer, or if it cannot be
    converted.
    """
    if named.is_dir():
        return _in_folder(named)
    if named.is_file():
        return _converted_file(named) if named.name.lower().endswith(_ENDINGS) else named
    if _HUB_NAME.fullmatch(str(named)) and not named.parent.exists():
        return _in_folder(_from_hub(str(named)))
    raise UserError(
        f"tokenizer not found: {named}. Give a tokenizer.json, a sentencepiece model, a tiktoken vocabulary, a folder that "
        "contains one, or the name of a repository on the Hugging Face Hub"
    )


def _in_folder(folder: Path) -> Path:
    with naming_read_errors(folder):
        names = sorted(path.name for path in folder.iterdir() if path.is_file())
    if FILE in names:
        return folder / FILE
    vocabularies = [name for name in names if name.lower().endswith(_ENDINGS)]
    if len(vocabularies) > 1:
        raise UserError(f"{folder} has several vocabularies ({', '.join(vocabularies)}): name one of the files")
    if vocabularies:
        return _converted_file(folder / vocabularies[0])
    if any(name in names for name in _OTHER_FORMS):
        return _converted_folder(folder, names)
    raise UserError(
        f"tokenizer not found: {folder} has no {FILE}, no sentencepiece model (.model) and no tiktoken vocabulary "
        "(.tiktoken). Name a folder that contains one."
    )


def _from_hub(name: str) -> Path:
    """Returns the folder with the tokenizer's files of a repository: downloaded, or from the cache of the Hub."""
    missing = f"tokenizer not found: {name} is no file or folder of this machine"
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise UserError(f"{missing}. To take it from the Hugging Face Hub: {how_to_install('hf')}") from error
    patterns = [FILE, *_BESIDE, *_OTHER_FORMS, "merges.txt", "config.json", *(f"*{ending}" for ending in _ENDINGS)]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except errors.GatedRepoError as error:
        raise UserError(
            f"{name} is gated on the Hugging Face Hub: ask for access on its page, and log in with `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{missing}, and no repository of the Hugging Face Hub that you may read: check the name, and log in with "
            "`hf auth login` if it is private"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise UserError(
            f"{missing}, nor in the cache of the Hugging Face Hub, which cannot be reached: check the name and the network"
        ) from error
    except Exception as error:  # the library and its network layer have many types of errors
        raise UserError(f"{missing}, and the Hugging Face Hub failed ({said(error)}): try again") from error


def _converted_file(file: Path) -> Path:
    with naming_read_errors(file):
        data = file.read_bytes()
    beside = _files_beside(file.parent)
    config = _json_object(file.parent / CONFIG, beside.get(CONFIG))
    name = str(config.get("tokenizer_class") or "").removesuffix("Fast").removesuffix("Tokenizer")
    if _is_ranks(data):
        return _cached(file, data, beside, config, partial(_from_ranks, file, data, config))
    if name in _PLAIN_CLASSES:
        added = _added_tokens(file.parent, config, beside)
        return _cached(file, data, beside, config, partial(_from_sentencepiece, file, data, config, added))
    return _cached(file, data, beside, config, partial(_by_transformers, file.parent))


def _converted_folder(folder: Path, names: list[str]) -> Path:
    beside = _files_beside(folder)
    with naming_read_errors(folder):
        forms = [(name, (folder / name).read_bytes()) for name in names if name in (*_OTHER_FORMS, "merges.txt")]
    data = b"".join(f"{name} {len(content)} ".encode() + content for name, content in forms)
    config = _json_object(folder / CONFIG, beside.get(CONFIG))
    return _cached(folder, data, beside, config, partial(_by_transformers, folder))


def _files_beside(folder: Path) -> dict[str, bytes]:
    with naming_read_errors(folder):
        return {name: (folder / name).read_bytes() for name in _BESIDE if (folder / name).is_file()}


def _json_object(file: Path, content: bytes | None) -> dict[str, Any]:
    try:
        found = {} if content is None else parse_json(content)
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{file} is not a JSON object")
    return found


def _cached(
    source: Path, data: bytes, beside: Mapping[str, bytes], config: dict[str, Any], convert: Callable[[], "_Converted"]
) -> Path:
    """Returns the path of the converted tokenizer in the cache. Calls `convert` if the tokenizer is not there."""
    parts = [str(_VERSION).encode(), data, *(part for name in sorted(beside) for part in (name.encode(), beside[name]))]
    digest = hashlib.sha256(b"".join(struct.pack("<Q", len(part)) + part for part in parts)).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optimus" / "tokenizers" / digest[:32]
    if (folder / FILE).exists():
        return folder / FILE
    made = convert()
    if not {"eos_token"} & {*config, *_json_object(source.parent / _BESIDE[1], beside.get(_BESIDE[1]))}:
        if made.eos is None:
            raise UserError(
                f'{source} names no end-of-text token: name one of its tokens as "eos_token" in a {CONFIG} beside it'
            )
        config = config | {"eos_token": made.eos}
    contents = {**beside, CONFIG: json.dumps(config, indent=2).encode()}
    # tokenizer.json last: where it exists, the other files exist.
    for name, content in [*contents.items(), (FILE, made.tokenizer.to_str(pretty=True).encode())]:
        put(folder / name, partial(_write, content), "set XDG_CACHE_HOME to another folder")
    return folder / FILE


def _write(content: bytes, path: Path) -> None:
    path.write_bytes(content)


@dataclass
class _Converted:
    """A `tokenizers.Tokenizer`, and its end-of-text token if the source names one."""

    tokenizer: Any
    eos: str | None


def _by_transformers(folder: Path) -> _Converted:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UserError(f"{folder} has no {FILE}. To convert its vocabulary: {how_to_install('hf')}") from error
    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        return _Converted(loaded.backend_tokenizer, loaded.eos_token)
    except Exception as error:  # each tokenizer has its own types of errors
        raise UserError(
            f"{folder} has no {FILE}, and transformers cannot convert its vocabulary ({said(error)}). Save the tokenizer "
            f"with `save_pretrained` where it loads, and name the new folder"
        ) from error


def _added_tokens(folder: Path, config: Mapping[str, Any], beside: Mapping[str, bytes]) -> dict[int, tuple[str, bool]]:
    """Returns the added tokens that the files in `folder` name, as (text, True if special) by id, in order."""
    found = dict[int, tuple[str, bool]]()
    try:
        for text, number in _json_object(folder / "added_tokens.json", beside.get("added_tokens.json")).items():
            found[int(number)] = str(text), True
        for number, token in (config.get("added_tokens_decoder") or {}).items():
            found[int(number)] = str(token["content"]), bool(token.get("special", False))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{folder}: the added tokens cannot be read ({said(error)}): give "
            f'"added_tokens_decoder": {{"32000": {{"content": "<pad>", "special": true}}}} in {CONFIG}'
        ) from error
    return dict(sorted(found.items()))


# tiktoken: a line for each token, its bytes in base64 and its rank, which is its id.


def _is_ranks(data: bytes) -> bool:
    return re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n", data) is not None


def _from_ranks(file: Path, data: bytes, config: Mapping[str, Any]) -> _Converted:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    encoding = _encoding(file, data, config)
    ranks = _ranks(file, data)
    numbers = set(ranks.values())
    if taken := [text for text, number in encoding.special.items() if number in numbers]:
        raise UserError(
            f"{file.parent / CONFIG}: the id of {taken[0]!r} is the id of a token of {file.name}: correct it"
        )
    special = {number: text for text, number in encoding.special.items()}
    # `tokenizers` warns of ids without a token.
    last = max(*numbers, *special)
    special |= {n: f"<|reserved_token_{n}|>" for n in range(last) if n not in numbers and n not in special}
    letters = _byte_letters()
    names = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=lambda token: ranks[token]):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        found = [(left, right) for left, right in pairs if left in ranks and right in ranks]
        found.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(names[left], names[right]) for left, right in found]
    vocabulary = {names[token]: rank for token, rank in ranks.items()} | {text: n for n, text in special.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, fuse_unk=False, ignore_merges=True))
    try:
        pattern = Regex(encoding.pattern)
    except Exception as error:  # `tokenizers` raises no more specific exception
        raise UserError(
            f"{file.parent / CONFIG}: pat_str is not a regular expression ({said(error)}): correct it"
        ) from error
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for _, text in sorted(special.items())]
    )
    return _Converted(tokenizer, encoding.eos)


def _ranks(file: Path, data: bytes) -> dict[bytes, int]:
    ranks = dict[bytes, int]()
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise UserError(
                f"{file}:{number}: not a token in base64 and its rank ({said(error)}): get a complete copy"
            ) from error
    if len(set(ranks.values())) < len(ranks):
        raise UserError(f"{file}: two tokens have the same rank: get another copy")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise UserError(f"{file}: no token for the byte {missing[0]}, so text would be lost: get a complete copy")
    return ranks


def _encoding(file: Path, data: bytes, config: Mapping[str, Any]) -> _Encoding:
    """Returns the pattern and the special tokens of a file of ranks: known, or from the tokenizer_config.json beside
    the file."""
    if "pat_str" not in config:
        known = _KNOWN.get(hashlib.sha256(data).hexdigest())
        if known is not None:
            return known
        raise UserError(
            f"{file} is a tiktoken vocabulary that Optimus does not know, and such a file has no special tokens and no "
            f'pattern that splits text into words. Give them in a {CONFIG} beside it: "pat_str", "eos_token", and '
            '"added_tokens_decoder": {"ID": {"content": "<|endoftext|>", "special": true}}'
        )
    where, pattern = file.parent / CONFIG, config["pat_str"]
    special = {text: number for number, (text, _) in _added_tokens(file.parent, config, {}).items()}
    eos = config.get("eos_token")
    eos = eos.get("content") if isinstance(eos, Mapping) else eos
    if not isinstance(eos, str) or eos not in special:
        raise UserError(f'{where}: "eos_token" must name the end-of-text token, one of "added_tokens_decoder"')
    if not isinstance(pattern, str) or re.search(r"\{\d*,?\d*\}\+", pattern):
        raise UserError(
            f'{where}: "pat_str" must be a regular expression without "+" behind braces: tokenizers reads {{1,3}}+ as '
            "a repetition of the repetition. Write {1,3}."
        )
    return _Encoding(pattern, special, eos)


def _byte_letters() -> list[str]:
    """Returns the letters that stand for the bytes in the vocabulary of a byte-level BPE."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


# sentencepiece: a message of protocol buffers, `ModelProto` of its sentencepiece_model.proto.

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_UNIGRAM, _BPE = 1, 2


@dataclass
class _SentencePiece:
    """The parts of a sentencepiece model that tokenisation needs, with the defaults of the format."""

    pieces: list[tuple[str, float, int]] = field(default_factory=list)  # text, score, kind
    model: int = _UNIGRAM
    byte_fallback: bool = False
    space_is_suffix: bool = False
    unk_id: int = 0
    eos_id: int = 2
    charsmap: bytes = b""
    dummy_prefix: bool = True
    remove_extra_spaces: bool = True
    escape_spaces: bool = True

    @classmethod
    def parse(cls, data: bytes) -> "_SentencePiece":
        """Parses a model. Raises `ValueError` for data that is no complete model."""
        found = cls()
        for number, value in _message(data):
            if number == 1:
                piece = dict(_message(value))
                (score,) = struct.unpack("<f", piece.get(2, bytes(4)))
                found.pieces.append((piece[1].decode(), score, piece.get(3, _NORMAL)))
            elif number == 2:
                trainer = dict(_message(value))
                found.model = trainer.get(3, found.model)
                found.space_is_suffix = bool(trainer.get(24, False))
                found.byte_fallback = bool(trainer.get(35, False))
                found.unk_id, found.eos_id = _signed(trainer.get(40, 0)), _signed(trainer.get(42, 2))
            elif number == 3:
                normalizer = dict(_message(value))
                found.charsmap = normalizer.get(2, b"")
                found.dummy_prefix = bool(normalizer.get(3, True))
                found.remove_extra_spaces = bool(normalizer.get(4, True))
                found.escape_spaces = bool(normalizer.get(5, True))
        if not found.pieces:
            raise ValueError("no pieces")
        return found

    def of_kind(self, *kinds: int) -> list[str]:
        return [text for text, _, kind in self.pieces if kind in kinds]


def _message(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yields (field number, value) of a message: integers, and bytes of all other types."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    try:
        while at < len(data):
            tag = varint()
            number, wire = tag >> 3, tag & 7
            if wire == 0:
                yield number, varint()
                continue
            size = varint() if wire == 2 else {1: 8, 5: 4}[wire]
            if at + size > len(data):
                raise ValueError("the data ends early")
            at += size
            yield number, data[at - size : at]
    except (IndexError, KeyError) as error:
        raise ValueError("not a message of protocol buffers") from error


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _from_sentencepiece(
    file: Path, data: bytes, config: Mapping[str, Any], added: Mapping[int, tuple[str, bool]]
) -> _Converted:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    try:
        source = _SentencePiece.parse(data)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise UserError(
            f"{file} is neither a sentencepiece model nor a tiktoken vocabulary ({said(error)}): get a complete copy"
        ) from error
    _check_supported(file, source)
    prefix = source.dummy_prefix and config.get("add_prefix_space") is not False
    space = _SPACE if source.escape_spaces else " "
    user, control = source.of_kind(_USER_DEFINED), source.of_kind(_CONTROL)
    # Added tokens would cut the text before the prefix is put in front of it; the split comes behind.
    isolated = sorted(user, key=len, reverse=True) if prefix else []
    tokenizer = Tokenizer(_model(source, ignore_merges=bool(isolated)))

    steps: list[Any] = [normalizers.Precompiled(source.charsmap)] if source.charsmap else []
    if source.remove_extra_spaces:
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(rf"[ {_SPACE}]+\z"), "")]
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    steps += [normalizers.Prepend(space)] if prefix else []
    steps += [normalizers.Replace(" ", _SPACE)] if source.escape_spaces else []
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)

    splits: list[Any] = []
    if isolated:
        # An isolated text that is the name of another kind of token would become it: its first letter is cut off.
        names = [text for text in source.of_kind(_UNKNOWN, _CONTROL, _BYTE) if len(text) > 1]
        pattern = [re.escape(text) for text in isolated]
        pattern += [f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in names]
        splits.append(pre_tokenizers.Split(Regex("|".join(pattern)), behavior="isolated"))
    ordinary = source.of_kind(_NORMAL, _USER_DEFINED)
    if source.escape_spaces and _SPACE in ordinary and all(_SPACE not in text[1:] for text in ordinary):
        # No piece has a space behind its first letter, so words are independent; cached words are faster.
        splits.append(pre_tokenizers.Split(_SPACE, behavior="merged_with_next"))
    if splits:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)

    back: list[Any] = [decoders.Replace(_SPACE, " ")] if source.escape_spaces else []
    back += [decoders.ByteFallback()] if source.byte_fallback else []
    tokenizer.decoder = decoders.Sequence([*back, decoders.Fuse(), *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in control])
    if not isolated and user:
        tokenizer.add_tokens([AddedToken(text, normalized=True, special=False) for text in user])
    _add_tokens(file, tokenizer, added)
    eos = source.pieces[source.eos_id][0] if 0 <= source.eos_id < len(source.pieces) else None
    return _Converted(tokenizer, eos)


def _check_supported(file: Path, source: _SentencePiece) -> None:
    unsupported = {
        "of another type than BPE and unigram": source.model not in (_UNIGRAM, _BPE),
        "with spaces behind the words": source.space_is_suffix,
        "with unused pieces": bool(source.of_kind(_UNUSED)),
        "with two equal pieces": len({text for text, _, _ in source.pieces}) < len(source.pieces),
        "with a wrong unk_id": not 0 <= source.unk_id < len(source.pieces),
    }
    if found := [what for what, is_so in unsupported.items() if is_so]:
        raise UserError(
            f"{file} is a sentencepiece model {found[0]}, which tokenizer.json cannot express: take another"
        )


def _model(source: _SentencePiece, *, ignore_merges: bool) -> Any:
    """Returns the model of `tokenizers` with the pieces of a sentencepiece model."""
    from tokenizers import models

    if source.model == _UNIGRAM:
        ordinary = [score for _, score, kind in source.pieces if kind == _NORMAL]
        least = min(ordinary, default=0.0)

        def score_of(text: str, score: float, kind: int) -> float:
            if kind == _USER_DEFINED:
                return 0.0
            # Text with the name of a control token stays text: any pieces of its letters score higher.
            return score if kind == _NORMAL else -(abs(least) + 1) * (len(text) + 1)

        scored = [(text, score_of(text, score, kind)) for text, score, kind in source.pieces]
        return models.Unigram(scored, source.unk_id, byte_fallback=source.byte_fallback)
    ids = {text: number for number, (text, _, _) in enumerate(source.pieces)}
    ordinary_texts = {*source.of_kind(_NORMAL)}
    merges = []
    for text, _, kind in sorted(source.pieces, key=lambda piece: -piece[1]):
        pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text))] if kind == _NORMAL else []
        found = [(left, right) for left, right in pairs if left in ordinary_texts and right in ordinary_texts]
        merges += sorted(found, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return models.BPE(
        ids,
        merges,
        unk_token=source.pieces[source.unk_id][0],
        fuse_unk=True,
        byte_fallback=source.byte_fallback,
        ignore_merges=ignore_merges,
    )


def _add_tokens(file: Path, tokenizer: Any, added: Mapping[int, tuple[str, bool]]) -> None:
    """Adds the `added` tokens behind the vocabulary of `file`. Raises `UserError` if an id is taken or leaves a gap."""
    from tokenizers import AddedToken

    for number, (text, special) in added.items():
        present = tokenizer.id_to_token(number)
        if present != text and (present is not None or number != tokenizer.get_vocab_size()):
            what = f"there it is {present!r}" if present is not None else f"it has {tokenizer.get_vocab_size()} tokens"
            raise UserError(
                f"{file.parent}: the added token {text!r} has the id {number} in {file.name}, but {what}: correct it"
            )
        if special:
            tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True)])
        elif present is None:
            tokenizer.add_tokens([AddedToken(text, normalized=False, special=False)])
