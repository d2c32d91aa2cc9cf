"""Vocabularies of sentencepiece and tiktoken, and tokenizers of the Hugging Face Hub.

The files are written here by the formats' definitions: sentencepiece_model.proto, and a line of base64 and rank for each
token. The expected tokens are from encoders that follow the two libraries' descriptions: sentencepiece merges the adjacent
pair whose piece has the highest score, or takes the best path; tiktoken merges the pair with the lowest rank. Where
the libraries are installed, they are compared as well.
"""

import base64
import importlib.util
import json
import random
import struct
import sys
import sysconfig
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import regex
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import optimus
from optimus.data import vocabularies
from optimus.data.tokenizer import check_text_stays_text, encoder, inspect, load
from optimus.errors import UserError

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE, WORD = 1, 2, 3

TEXTS = [
    "Hello world",
    " leading and  double   spaces, trailing  ",
    "lines\nand\n\nempty ones\n",
    "tabs\tand\r\nreturns \n  x",
    "grüße naïve café – déjà vu",
    "日本語のテキスト and 中文 mixed",
    "emoji 👩‍👩‍👧 🎉 and \u200b zero width",
    "def f(x):\n    return x ** 2  # comment\n",
    "1234567 3.14159 0x1F",
    "aaaaaaaaaaaa bbbb    cccc",
    "<s> </s> <unk> <0x41> <|endoftext|>",
    "▁ literal ▁▁ blocks",
    "a",
    " ",
    "",
]


def sample() -> list[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    return [(library / name).read_text() for name in ("textwrap.py", "heapq.py", "shlex.py")] + TEXTS[:10]


def drawn(number: int) -> list[str]:
    """Texts of random pieces of the sample and of letters that it lacks."""
    rng, source = random.Random(number), "".join(sample())
    found = []
    for _ in range(150):
        parts = []
        for _ in range(rng.randrange(1, 8)):
            start = rng.randrange(len(source))
            parts.append(source[start : start + rng.randrange(1, 20)])
            parts.append(rng.choice(["", " ", "  ", "\n", "é", "ж", "😀", "<s>", "</s>", "ab" * 5, "\u3000"]))
        found.append("".join(parts))
    return found


# sentencepiece


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def part(field: int, value: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(value)) + value


class Pieces:
    """A sentencepiece model: pieces (text, score, kind) and options, its file, and its encoder."""

    def __init__(
        self,
        pieces: list[tuple[str, float, int]],
        model: int,
        *,
        prefix: bool,
        shrink: bool,
        fallback: bool,
        eos: int = 2,
    ) -> None:
        self.pieces, self.model, self.prefix, self.shrink, self.fallback = pieces, model, prefix, shrink, fallback
        self.eos = eos
        self.ids = {text: n for n, (text, _, _) in enumerate(pieces)}

    def file(self, *, suffix: bool = False) -> bytes:
        out = b""
        for text, score, kind in self.pieces:
            out += part(1, part(1, text.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score) + number(3, kind))
        trainer = number(3, self.model) + number(24, suffix) + number(35, self.fallback) + number(40, 0)
        trainer += number(41, 1) + number(42, self.eos) + number(43, -1) + part(45, b"<unk>")
        normalizer = part(1, b"identity") + number(3, self.prefix) + number(4, self.shrink) + number(5, 1)
        return out + part(2, trainer) + part(3, normalizer)

    def encode(self, text: str) -> list[int]:
        if self.shrink:
            text = regex.sub(" +", " ", text.lstrip(" "))
            text = text.rstrip(" " + SPACE)
        if text and self.prefix:
            text = " " + text
        text = text.replace(" ", SPACE)
        found = self.merged(text) if self.model == BPE else self.best(text)
        ids = list[int]()
        was_unknown = False
        for piece in found:
            known = piece in self.ids and self.pieces[self.ids[piece]][2] in (NORMAL, USER_DEFINED)
            if known:
                ids.append(self.ids[piece])
            elif self.fallback:
                ids += [self.ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
            elif not was_unknown:
                ids.append(0)
            was_unknown = not known and not self.fallback
        return ids

    def units(self, text: str) -> list[tuple[str, bool]]:
        """Splits a text into user-defined pieces, the longest first, and letters."""
        users = sorted((t for t, _, kind in self.pieces if kind == USER_DEFINED), key=len, reverse=True)
        found = list[tuple[str, bool]]()
        while text:
            user = next((each for each in users if text.startswith(each)), None)
            found.append((user or text[0], user is not None))
            text = text[len(user or text[0]) :]
        return found

    def merged(self, text: str) -> list[str]:
        units = self.units(text)
        while True:
            scores = [
                self.pieces[self.ids[a + b]][1]
                if not frozen and not frozen_too and a + b in self.ids and self.pieces[self.ids[a + b]][2] == NORMAL
                else None
                for (a, frozen), (b, frozen_too) in pairwise(units)
            ]
            known = [score for score in scores if score is not None]
            if not known:
                return [unit for unit, _ in units]
            at = scores.index(max(known))
            units[at : at + 2] = [(units[at][0] + units[at + 1][0], False)]

    def best(self, text: str) -> list[str]:
        normal = {t: score for t, score, kind in self.pieces if kind == NORMAL}
        least = min(normal.values())
        found = list[str]()
        run = ""
        for unit, frozen in [*self.units(text), ("", True)]:
            if not frozen:
                run += unit
                continue
            found += self.path(run, normal, least - 10)
            run = ""
            found += [unit] if unit else []
        return found

    @staticmethod
    def path(text: str, normal: dict[str, float], unknown: float) -> list[str]:
        longest = max(map(len, normal))
        best = [(0.0, 0)] + [(-1e30, 0)] * len(text)
        for start in range(len(text)):
            for end in range(start + 1, min(len(text), start + longest) + 1):
                score = normal.get(text[start:end], unknown if end == start + 1 else None)
                if score is not None and best[start][0] + score > best[end][0]:
                    best[end] = (best[start][0] + score, start)
        found, end = list[str](), len(text)
        while end:
            start = best[end][1]
            found.insert(0, text[start:end])
            end = start
        return found


def pieces(
    model: int, *, fallback: bool = True, user: tuple[str, ...] = (), words: bool = False
) -> list[tuple[str, float, int]]:
    """Trains pieces on the sample, with the tokens that a model of sentencepiece begins with."""
    found: list[tuple[str, float, int]] = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    found += [(text, 0.0, USER_DEFINED) for text in user]
    found += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)] if fallback else []
    texts = [text.replace(" ", SPACE) for text in sample()]
    if model == BPE:
        tokenizer = Tokenizer(models.BPE())
        if words:
            tokenizer.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
        trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, max_token_length=8)
        tokenizer.train_from_iterator(texts, trainer)
        made = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        letters = [text for text, _ in made if len(text) == 1]
        merged = [text for text, _ in made if len(text) > 1]
        found += [(text, -float(rank), NORMAL) for rank, text in enumerate([*merged, *letters]) if text not in user]
        return found
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    tokenizer.train_from_iterator(texts, trainers.UnigramTrainer(vocab_size=500, show_progress=False))
    made = json.loads(tokenizer.to_str())["model"]["vocab"]
    named = {text for text, _, _ in found}
    # The format has scores in 32 bits.
    return found + [(t, struct.unpack("<f", struct.pack("<f", s))[0], NORMAL) for t, s in made if t not in named]


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


MODELS = {
    "like Llama 2": (BPE, True, False, True, ()),
    "words": (BPE, True, True, True, ()),
    "like Gemma": (BPE, False, False, True, ("\n\n", SPACE * 2, "<start_of_turn>", "<sep>")),
    "user-defined with prefix": (BPE, True, False, True, ("<sep>", "<|im_start|>", SPACE * 4)),
    "unknown": (BPE, True, True, False, ()),
    "unigram": (UNIGRAM, True, True, False, ()),
    "unigram with bytes": (UNIGRAM, True, False, True, ("<sep>",)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_sentencepiece(tmp_path, kind):
    model, prefix, shrink, fallback, user = MODELS[kind]
    made = Pieces(
        pieces(model, fallback=fallback, user=user, words=kind == "words"),
        model,
        prefix=prefix,
        shrink=shrink,
        fallback=fallback,
    )
    file = tmp_path / "tokenizer.model"
    file.write_bytes(made.file())
    info = inspect(file)
    assert (info.eos_token, info.eos_id, info.vocab_size) == ("</s>", 2, len(made.pieces))
    assert inspect(tmp_path) == info, "a folder with only the model"
    check_text_stays_text(info)
    tokenizer = load(info.path)
    encode = encoder(tokenizer)
    texts = [*TEXTS, *drawn(1), "<sep>x<sep><s>", "a<sep>", "<|im_start|></s>", "x\n\n\ny"]
    for text in texts:
        assert encode(text) == made.encode(text), text
    if fallback and not shrink:
        for text in texts:
            assert tokenizer.decode(encode(text), skip_special_tokens=False) == text.replace(SPACE, " ")
    if importlib.util.find_spec("sentencepiece"):
        import sentencepiece

        theirs = sentencepiece.SentencePieceProcessor(model_file=str(file))
        assert [encode(text) for text in texts] == [theirs.encode(text) for text in texts]


def test_special_tokens_of_sentencepiece(tmp_path):
    """A token of the configuration is added behind the vocabulary; with `parse_special`, its spelling is the token."""
    made = Pieces(pieces(BPE), BPE, prefix=True, shrink=False, fallback=True)
    size = len(made.pieces)
    (tmp_path / "tokenizer.model").write_bytes(made.file())
    config = {"tokenizer_class": "LlamaTokenizer", "eos_token": "<end>", "chat_template": "{{ messages }}"}
    config["added_tokens_decoder"] = {
        str(size): {"content": "<end>", "special": True},
        "2": {"content": "</s>", "special": True},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    info = inspect(tmp_path)
    assert (info.eos_token, info.eos_id) == ("<end>", size)
    assert json.loads((info.path.parent / "tokenizer_config.json").read_text()) == config, (
        "the chat template goes with it"
    )
    assert size in encoder(load(info.path, parse_special=True))("a<end>")
    assert size not in encoder(load(info.path))("a<end>")
    config["added_tokens_decoder"] = {str(size + 1): {"content": "<end>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"'<end>' has the id {size + 1} in tokenizer.model, but it has {size} tokens"):
        inspect(tmp_path)


def charsmap(letter: str, written: str) -> bytes:
    """The table of a normaliser with one rule: the size of a double-array trie, the trie, and the replacements."""
    units, base = [0] * 2048, 0x100
    units[0] = base << 10
    key = letter.encode()
    for count, byte in enumerate(key, 1):
        at, base = base ^ byte, 0x100 * (count + 1)
        units[at] = byte | (count == len(key)) << 8 | (at ^ base) << 10
    units[base] = 1 << 31
    return struct.pack("<I", 4 * len(units)) + struct.pack(f"<{len(units)}I", *units) + written.encode() + b"\0"


def test_a_normaliser_of_sentencepiece(tmp_path):
    made = Pieces(pieces(BPE), BPE, prefix=True, shrink=True, fallback=True)
    data = made.file() + part(3, part(2, charsmap("\u3000", " ")) + number(3, 1) + number(4, 1) + number(5, 1))
    (tmp_path / "a.model").write_bytes(data)
    encode = encoder(load(inspect(tmp_path).path))
    assert encode("Hello\u3000\u3000world\u3000") == made.encode("Hello world")
    assert encode("Hello\u3001world") == made.encode("Hello\u3001world")


# tiktoken

PATTERN = vocabularies._CL100K


def ranks() -> dict[bytes, int]:
    """Trains the ranks of a byte-level BPE on the sample."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1000, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    tokenizer.train_from_iterator(sample(), trainer)
    letters = {letter: byte for byte, letter in enumerate(vocabularies._byte_letters())}
    return {bytes(letters[c] for c in text): rank for text, rank in tokenizer.get_vocab().items()}


def tiktoken_encode(ranks: dict[bytes, int], text: str, pattern: str = PATTERN) -> list[int]:
    found = list[int]()
    for word in regex.findall(pattern, text):
        parts = [bytes([byte]) for byte in word.encode()]
        if word.encode() in ranks:
            parts = [word.encode()]
        while len(parts) > 1:
            joined = [ranks.get(a + b, 1 << 60) for a, b in pairwise(parts)]
            if min(joined) == 1 << 60:
                break
            at = joined.index(min(joined))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        found += [ranks[each] for each in parts]
    return found


def ranks_file(ranks: dict[bytes, int]) -> bytes:
    return b"".join(
        base64.b64encode(token) + f" {rank}\n".encode() for token, rank in sorted(ranks.items(), key=lambda i: i[1])
    )


def tiktoken_config(size: int, **more: object) -> str:
    special = {
        str(size + 1): {"content": "<|endoftext|>", "special": True},
        str(size + 5): {"content": "<|turn|>", "special": True},
    }
    return json.dumps({"pat_str": PATTERN, "eos_token": "<|endoftext|>", "added_tokens_decoder": special, **more})


@pytest.mark.parametrize("name", ["cl.tiktoken", "tokenizer.model"])
def test_tiktoken(tmp_path, name):
    made = ranks()
    file = tmp_path / name
    file.write_bytes(ranks_file(made))
    (tmp_path / "tokenizer_config.json").write_text(tiktoken_config(len(made)))
    info = inspect(file)
    assert (info.eos_id, info.vocab_size) == (len(made) + 1, len(made) + 6), "with gaps between the ids"
    assert inspect(tmp_path) == info
    check_text_stays_text(info)
    tokenizer = load(info.path)
    encode = encoder(tokenizer)
    texts = [*TEXTS, *drawn(2)]
    for text in texts:
        assert encode(text) == tiktoken_encode(made, text), text
        assert tokenizer.decode(encode(text)) == text
    assert encoder(load(info.path, parse_special=True))("a<|turn|>") == [made[b"a"], len(made) + 5]
    if importlib.util.find_spec("tiktoken"):
        import tiktoken

        theirs = tiktoken.Encoding(
            "t", pat_str=PATTERN, mergeable_ranks=made, special_tokens={"<|endoftext|>": len(made) + 1}
        )
        assert [encode(text) for text in texts] == [theirs.encode_ordinary(text) for text in texts]


def test_tiktoken_as_transformers_converts_it(tmp_path, monkeypatch):
    from transformers.convert_slow_tokenizer import TikTokenConverter

    made = ranks()
    monkeypatch.setattr(TikTokenConverter, "load_tiktoken_bpe", staticmethod(lambda url: made))
    theirs = json.loads(
        TikTokenConverter("file", pattern=PATTERN, extra_special_tokens=["<|endoftext|>"]).converted().to_str()
    )
    (tmp_path / "a.tiktoken").write_bytes(ranks_file(made))
    config = {"pat_str": PATTERN, "eos_token": "<|endoftext|>"}
    config["added_tokens_decoder"] = {str(len(made)): {"content": "<|endoftext|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = json.loads(inspect(tmp_path).path.read_text())
    assert ours["model"]["merges"] == theirs["model"]["merges"]
    assert ours["pre_tokenizer"] == theirs["pre_tokenizer"]
    assert ours["model"]["vocab"] == theirs["model"]["vocab"] | {"<|endoftext|>": len(made)}


def test_known_tiktoken_files(tmp_path, monkeypatch):
    """A published file needs no configuration. All patterns split text as the definitions' regular expressions do."""
    made = ranks()
    data = ranks_file(made)
    digest = vocabularies.hashlib.sha256(data).hexdigest()
    for known in list(vocabularies._KNOWN.values()):
        size = len(made)
        special = {text: size + n for n, text in enumerate(known.special)}
        monkeypatch.setitem(vocabularies._KNOWN, digest, vocabularies._Encoding(known.pattern, special, known.eos))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / known.eos / str(len(special))))
        (tmp_path / "x.tiktoken").write_bytes(data)
        info = inspect(tmp_path / "x.tiktoken")
        assert info.eos_token == known.eos
        assert info.eos_id == special[known.eos]
        encode = encoder(load(info.path))
        for text in [*TEXTS, *drawn(3)]:
            assert encode(text) == tiktoken_encode(made, text, known.pattern), text


def test_published_special_tokens():
    sizes = sorted(max(known.special.values()) + 1 for known in vocabularies._KNOWN.values())
    assert sizes == [50257, 50257, 100277, 128256, 200019], "the sizes of the published vocabularies"


# The Hugging Face Hub


def cached_repository(home: Path, name: str, files: dict[str, bytes]) -> None:
    """Writes a repository into the Hub's cache, as a download does."""
    folder, revision = home / "hub" / f"models--{name.replace('/', '--')}", "0123456789abcdef0123456789abcdef01234567"
    (folder / "snapshots" / revision).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)
    for file, content in files.items():
        (folder / "snapshots" / revision / file).write_bytes(content)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    return tmp_path / "home"


def test_hub_name(tmp_path, hub, monkeypatch):
    made = Pieces(pieces(BPE), BPE, prefix=True, shrink=False, fallback=True)
    cached_repository(hub, "org/plain", {"tokenizer.model": made.file(), "config.json": b"{}"})
    info = inspect(Path("org/plain"))
    assert encoder(load(info.path))("Hello") == made.encode("Hello")
    cached_repository(hub, "org/fast", {"tokenizer.json": info.path.read_bytes()})
    assert inspect(Path("org/fast")).sha256 == info.sha256
    (tmp_path / "text.txt").write_text("some text. " * 400)
    index = optimus.prepare(tmp_path / "text.txt", tmp_path / "data", tokenizer="org/plain", context=16, workers=1)
    assert index["tokenizer"]["sha256"] == info.sha256
    tokens = len(made.encode("some text. " * 400))
    assert optimus.preview(tmp_path / "text.txt", tokenizer="org/plain")[0]["tokens"] == tokens
    assert index["tokens"] + index["dropped_tokens"] == tokens + 1
    with pytest.raises(
        UserError, match=r"tokenizer not found: org/absent is no file .*nor in the cache of the Hugging"
    ):
        inspect(Path("org/absent"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    with pytest.raises(UserError, match=r"tokenizer not found: org/plain\. Give a tokenizer.json"):
        inspect(Path("org/plain"))  # a folder org is here, so this is a path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("GatedRepoError", "org/name is gated on the Hugging Face Hub: ask for access"),
        ("RepositoryNotFoundError", "no repository of the Hugging Face Hub that you may read: check the name"),
        ("HfHubHTTPError", r"the Hugging Face Hub failed \(HfHubHTTPError"),
    ],
)
def test_the_hub_refuses(monkeypatch, name, message):
    import huggingface_hub

    def refuse(*args: object, **options: object) -> str:
        response = SimpleNamespace(headers={}, request=None, status_code=403)
        raise getattr(huggingface_hub.errors, name)("refused", response=response)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(UserError, match=message):
        inspect(Path("org/name"))


def test_without_the_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"org/name is no file or folder .*install.*hf"):
        inspect(Path("org/name"))


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "a.model").write_bytes(Pieces(pieces(BPE), BPE, prefix=True, shrink=False, fallback=True).file())
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot write .*set XDG_CACHE_HOME to another folder"):
        inspect(tmp_path)


def test_other_forms_go_through_transformers(tmp_path, hub):
    """A repository with vocab.json and merges.txt, as GPT-2's."""
    letters = vocabularies._byte_letters()
    vocabulary = {letter: number for number, letter in enumerate(sorted(letters))} | {"he": 256, "<|endoftext|>": 257}
    files = {"vocab.json": json.dumps(vocabulary).encode(), "merges.txt": b"#version: 0.2\nh e\n"}
    files["tokenizer_config.json"] = b'{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}'
    cached_repository(hub, "org/gpt2", files)
    info = inspect(Path("org/gpt2"))
    assert info.eos_id == 257
    assert encoder(load(info.path))("hexx")[0] == 256


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.model": b"junk"}, "a.model is neither a sentencepiece model nor a tiktoken"),
        ({"a.model": b""}, "a.model is neither"),
        ({"a.model": None}, "a.model is neither"),
        ({"a.tiktoken": b"YQ== 0\n"}, "Optimus does not know.*pat_str"),
        ({"a.tiktoken": b"YQ== 0\n", "tokenizer_config.json": b"["}, "tokenizer_config.json is not valid JSON"),
        ({"a.tiktoken": b"YQ== 0\n", "tokenizer_config.json": tiktoken_config(5).encode()}, "no token for the byte 0"),
        (
            {"a.tiktoken": b"YQ== 0\nb?\n", "tokenizer_config.json": tiktoken_config(5).encode()},
            "a.tiktoken:2: not a token",
        ),
        ({"a.model": b"x", "b.tiktoken": b"y"}, "has several vocabularies"),
        ({"readme.md": b"x"}, "has no tokenizer.json, no sentencepiece model"),
        ({"vocab.txt": b"a\n"}, "transformers cannot convert its vocabulary"),
    ],
)
def test_bad_vocabularies(tmp_path, files, message):
    for name, content in files.items():
        if content is None:  # a model that ends early
            content = Pieces(pieces(BPE), BPE, prefix=True, shrink=True, fallback=True).file()[:-700]
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        inspect(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token": None}, '"eos_token" must name'),
        ({"pat_str": r"\p{N}{1,3}+|."}, r"Write \{1,3\}"),
        ({"pat_str": "("}, "not a regular expression"),
        ({"added_tokens_decoder": {"3": {"content": "<|endoftext|>"}}}, "is the id of a token of a.tiktoken"),
        ({"added_tokens_decoder": {"x": 3}}, "the added tokens cannot be read"),
    ],
)
def test_bad_configurations_of_tiktoken(tmp_path, config, message):
    made = ranks()
    (tmp_path / "a.tiktoken").write_bytes(ranks_file(made))
    (tmp_path / "tokenizer_config.json").write_text(tiktoken_config(len(made), **config))
    with pytest.raises(UserError, match=message):
        inspect(tmp_path)


def test_unsupported_sentencepiece(tmp_path):
    made = Pieces(pieces(BPE), WORD, prefix=True, shrink=True, fallback=True)
    (tmp_path / "a.model").write_bytes(made.file())
    with pytest.raises(UserError, match="of another type than BPE and unigram"):
        inspect(tmp_path)
    made.model, made.eos = BPE, -1
    (tmp_path / "a.model").write_bytes(made.file(suffix=True))
    with pytest.raises(UserError, match="spaces behind the words"):
        inspect(tmp_path)
    (tmp_path / "a.model").write_bytes(made.file())
    with pytest.raises(UserError, match="names no end-of-text token"):
        inspect(tmp_path)


def test_a_preparation_goes_on_after_the_cache_is_cleared(tmp_path, monkeypatch):
    """The converted file is the same each time, so the tokenizer of the unfinished run is the same."""
    made = Pieces(pieces(BPE), BPE, prefix=True, shrink=False, fallback=True)
    (tmp_path / "tokenizer.model").write_bytes(made.file())
    first = inspect(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    second = inspect(tmp_path)
    assert first.path != second.path
    assert first.sha256 == second.sha256
