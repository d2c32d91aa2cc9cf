"""`optimus data` counts documents, tokens and lengths, and shows rows as text with the borders of documents."""

import json
import random
import shutil
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from typer.testing import CliRunner

import optimus
from benchmarks.browser import browser
from helpers.browser import needs_browser, opened
from optimus.cli.program import app
from optimus.data.description import _opened, _texts
from optimus.data.permutation import Permutation
from optimus.data.preparation import prepare
from optimus.data.remote import RemoteFolder
from optimus.data.shards import Shards
from optimus.errors import UserError
from tests.data.test_token_files import write_mds, write_megatron, write_npy
from tests.report.conftest import embedded

CONTEXT = 16
EVIL = "evil \x1b[31m \u202e </script><script>alert(1)</script>"
CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four"}]

Encode = Callable[[str], list[int]]


@pytest.fixture(scope="module")
def words() -> list[list[str]]:
    """Documents of two inputs. Some are longer than the 32 rows that a sample follows a document."""
    draw = random.Random(0)
    sizes = [[draw.choice((1, 2, 5, 9, 30)) for _ in range(90)], [3, 260] * 12 + [1]]
    return [[" ".join(draw.choices(("alpha", "beta", "class"), k=size)) for size in part] for part in sizes]


@pytest.fixture(scope="module")
def inputs(words: list[list[str]], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, paths = tmp_path_factory.mktemp("inputs"), []
    for name, documents in zip(("many", "few"), words):
        paths.append(folder / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps({"text": each}) + "\n" for each in [*documents, ""]), encoding="utf-8")
    return paths


@pytest.fixture(scope="module")
def stream(words: list[list[str]], encode: Encode, tokenizer_file: Path) -> list[list[int]]:
    """The tokens of each document with its end-of-text token."""
    (eos,) = encode("<|endoftext|>")
    return [[*encode(document), eos] for part in words for document in part]


@pytest.fixture(scope="module")
def joined(inputs: list[Path], tokenizer_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Concatenated rows in several shards."""
    folder = tmp_path_factory.mktemp("joined") / "data"
    prepare(inputs, folder, tokenizer=tokenizer_file, context=CONTEXT, seed=5, workers=1, shard_size=1000)
    return folder


@pytest.fixture(scope="module")
def fitted(inputs: list[Path], tokenizer_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of best-fit packing."""
    folder = tmp_path_factory.mktemp("fitted") / "data"
    prepare(inputs, folder, tokenizer=tokenizer_file, context=CONTEXT, pack="best-fit", workers=1)
    return folder


def spans(stream: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Returns (start, stop) of each document in the stream."""
    ends = np.cumsum([len(each) for each in stream]).tolist()
    return [*zip([0, *ends], ends)]


def check_lengths(found: dict[str, Any], lengths: Sequence[int]) -> None:
    """Compares the statistics with those of NumPy."""
    quantiles = {
        str(each): int(np.quantile(lengths, each / 100, method="inverted_cdf")) for each in (5, 25, 50, 75, 95)
    }
    assert (found["count"], found["min"], found["max"]) == (len(lengths), min(lengths), max(lengths))
    assert found["quantiles"] == quantiles
    assert found["mean"] == pytest.approx(np.mean(lengths))
    bins = found["histogram"]
    assert [
        sum(each["from"] <= length <= each["to"] for length in lengths) for each in bins
    ] == [each["count"] for each in bins]  # fmt: skip
    assert sum(each["count"] for each in bins) == len(lengths)


# ---- Counts and lengths ----


def test_counts_are_those_of_the_documents(
    joined: Path, words: list[list[str]], stream: list[list[int]], tokenizer_file: Path
) -> None:
    found = optimus.describe_data(joined)
    tokens = sum(map(len, stream))
    assert (found["context"], found["tokens"]) == (CONTEXT, tokens // CONTEXT * CONTEXT)
    assert (found["sequences"], found["dropped_tokens"]) == divmod(tokens, CONTEXT)
    assert (found["documents"], found["left_out"]) == (115, {"empty": 2})
    size = sum(len(document) for part in words for document in part)
    assert (found["text_bytes"], found["bytes_per_token"]) == (size, size / tokens)
    few = sum(map(len, stream[90:]))
    assert [(Path(each["name"]).name, each["tokens"], each["documents"]) for each in found["sources"]] == [
        ("many.jsonl", tokens - few, 90),
        ("few.jsonl", few, 25),
    ]
    assert [each["share"] for each in found["sources"]] == [(tokens - few) / tokens, few / tokens]
    assert found["tokenizer"]["eos_token"] == "<|endoftext|>"
    assert found["files"] == len(list(joined.glob("shard-*")))
    assert (found["pack"], found["seed"], found["conversations"]) == ("concatenate", 5, False)


def test_documents_are_followed_over_rows(joined: Path, stream: list[list[int]]) -> None:
    """Lengths of documents that many rows share are exact, although the rows are shuffled."""
    found = optimus.describe_data(joined)
    total = found["tokens"]
    there = [(start, stop) for start, stop in spans(stream) if start < total]
    check_lengths(found["lengths"], [min(stop, total) - start for start, stop in there])
    assert found["lengths"]["cut"] == sum(stop > total for _, stop in there)
    assert (found["lengths"]["unit"], found["lengths"]["rows"]) == ("documents", found["sequences"])


@pytest.mark.parametrize("rows", [1, 7, 50])
def test_a_sample_counts_the_documents_that_begin_in_its_rows(joined: Path, stream: list[list[int]], rows: int) -> None:
    """A document that goes on for more than 32 rows behind the sample's row counts as long as it was read."""
    found = optimus.describe_data(joined, rows=rows)
    count, total = found["sequences"], found["tokens"]
    chosen = {*Permutation(count, "description")(np.arange(rows)).tolist()}
    lengths, cut = [], 0
    for start, stop in spans(stream):
        if start // CONTEXT in chosen:
            last = start // CONTEXT  # the last row that is read for this document
            while last + 1 in chosen or (last + 1) * CONTEXT < stop:
                following = [each for each in chosen if last < each]
                reached = last + 32
                if following and min(following) <= reached + 1:
                    last = min(following)
                else:
                    last = reached
                    break
                if (last + 1) * CONTEXT >= stop:
                    break
            end = min(stop, (last + 1) * CONTEXT, total)
            lengths.append(end - start)
            cut += end < stop
    if lengths:
        check_lengths(found["lengths"], lengths)
    else:
        assert (found["lengths"]["count"], found["lengths"]["histogram"]) == (0, [])
    assert found["lengths"]["cut"] == cut == (rows == 50)
    assert (found["lengths"]["rows"], found["lengths"]["of_rows"]) == (rows, count)


def test_pieces_of_packed_rows(fitted: Path, stream: list[list[int]]) -> None:
    """A document of more tokens than a row is counted in pieces of a row, and its rest.

    A rest that is an end-of-text token alone cannot be told from padding.
    """
    found = optimus.describe_data(fitted)
    pieces = [min(CONTEXT, len(each) - first) for each in stream for first in range(0, len(each), CONTEXT)]
    alone = pieces.count(1)
    assert alone
    pieces = [size for size in pieces if size > 1]
    check_lengths(found["lengths"], pieces)
    assert found["lengths"]["unit"] == "pieces"
    assert found["lengths"]["cut"] == sum((len(each) - 1) // CONTEXT for each in stream)
    assert found["padding_tokens"] == found["tokens"] - sum(map(len, stream))
    assert found["cut_documents"] == sum(len(each) > CONTEXT for each in stream)
    rows = _texts(_opened(fitted, None, None, None, ()), range(found["sequences"]))
    assert sum(row["padding_tokens"] for row in rows) == found["padding_tokens"] + alone
    assert sum(len(row["documents"]) for row in rows) == len(pieces)
    assert all(row["predicted_tokens"] == CONTEXT - row["padding_tokens"] for row in rows)


def test_filters_are_counted(words: list[list[str]], inputs: list[Path], tokenizer_file: Path, tmp_path: Path) -> None:
    prepare(
        inputs, tmp_path / "out", tokenizer=tokenizer_file, context=CONTEXT, workers=1, dedup="exact", max_characters=1000
    )  # fmt: skip
    found, documents = optimus.describe_data(tmp_path / "out"), [each for part in words for each in part]
    short = [each for each in documents if len(each) <= 1000]
    assert found["left_out"] == {"empty": 2, "too_long": 12, "duplicates": len(short) - len({*short})}
    assert found["documents"] == len({*short})


# ---- Rows as text ----


def test_rows_have_the_borders_of_the_stream(joined: Path, stream: list[list[int]], tokenizer_file: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer, shards = Tokenizer.from_file(str(tokenizer_file)), Shards(joined)
    tokens = [token for document in stream for token in document]
    starts, stops = {start for start, _ in spans(stream)}, {stop for _, stop in spans(stream)}
    order = Permutation(shards.instances, "shuffle", 5)(np.arange(shards.instances)).tolist()
    rows = _texts(_opened(joined, None, None, None, ()), range(shards.instances))
    for number, (row, block) in enumerate(zip(rows, order)):
        at = block * CONTEXT
        assert (row["row"], row["tokens"], row["padding_tokens"]) == (number, CONTEXT, 0)
        for document in row["documents"]:
            stop = at + document["tokens"]
            assert (document["begins"], document["ends"]) == (at in starts, stop in stops)
            assert document["text"] == tokenizer.decode(tokens[at:stop], skip_special_tokens=False)
            assert document["predicted"] == [[0, len(document["text"])]]
            at = stop
        assert at == (block + 1) * CONTEXT
        with open(row["file"], "rb") as file:
            file.seek(row["byte"])
            stored = np.frombuffer(file.read(2 * CONTEXT), "<u2").tolist()
        assert stored == tokens[block * CONTEXT : at]
    found = optimus.describe_data(joined)["rows"]
    assert [row["row"] for row in found] == [0, round((len(order) - 1) / 2), len(order) - 1]
    assert found[2] == optimus.show_row(joined, len(order) - 1)


@pytest.mark.parametrize("pack", ["concatenate", "best-fit"])
def test_conversations_show_what_is_predicted(tokenizer_file: Path, tmp_path: Path, pack: Any) -> None:
    """Answers are predicted, with the token that ends them, and nothing else."""
    chats = tmp_path / "chats.jsonl"
    chats.write_text("\n".join(json.dumps({"messages": CHAT + CHAT}) for _ in range(9)), encoding="utf-8")
    prepare(
        chats, tmp_path / "out", tokenizer=tokenizer_file, text_field="chat:messages", context=256, pack=pack, workers=1
    )  # fmt: skip
    found = optimus.describe_data(tmp_path / "out")
    assert found["conversations"]
    (count,) = {each["tokens"] for row in found["rows"] for each in row["documents"] if each["begins"] and each["ends"]}
    assert found["lengths"]["quantiles"]["50"] == found["lengths"]["max"] == count
    first = next(each for each in found["rows"][0]["documents"] if each["begins"] and each["ends"])
    shown = [first["text"][start:stop].strip() for start, stop in first["predicted"]]
    assert len(shown) == 2
    assert all(text.startswith("four") for text in shown)
    assert shown[1].endswith("<|endoftext|>")
    result = CliRunner().invoke(app, ["data", str(tmp_path / "out"), "--row", "0"])
    assert result.output.count("《four") == 2 * result.output.count(", a document ---")
    assert ", predicted: " in result.output


# ---- Token files of other trainers ----


@pytest.mark.parametrize("to", ["megatron", "npy"])
def test_a_folder_of_token_files_has_its_tokenizer(to: Any, tmp_path: Path, tokenizer_file: Path) -> None:
    """The output of `prepare` with `to` is described by its folder as by the name of its files."""
    (tmp_path / "a.txt").write_text("a few words of a text " * 50, encoding="utf-8")
    folder = tmp_path / "out[1]"
    optimus.prepare(tmp_path / "a.txt", folder, tokenizer=tokenizer_file, to=to, workers=1)
    name = f"megatron:{folder}/text_document" if to == "megatron" else f"npy:{tmp_path}/out[[]1]/part-*.npy"
    found = optimus.describe_data(folder, context=CONTEXT, seed=5)
    assert found == optimus.describe_data(name, tokenizer=folder, context=CONTEXT, seed=5)
    assert optimus.show_row(str(folder), 0, context=CONTEXT) == optimus.show_row(
        name, 0, tokenizer=folder, context=CONTEXT
    )


@pytest.mark.parametrize(("form", "ends"), [("megatron", True), ("megatron", False), ("npy", True), ("mds", True)])
def test_token_files(form: str, ends: bool, stream: list[list[int]], tokenizer_file: Path, tmp_path: Path) -> None:
    """Lengths come from the index of Megatron-LM, also without end-of-text tokens, or from the end-of-text tokens."""
    documents = stream if ends else [[5 if len(each) == 1 else each[0], *each[1:-1]] for each in stream]
    path = {"megatron": "megatron:{}/x", "npy": "npy:{}/x/*.npy", "mds": "mds:{}/x"}[form].format(tmp_path)
    if form == "megatron":
        write_megatron(tmp_path / "x", documents)
    elif form == "npy":
        write_npy(tmp_path / "x", documents)
    else:
        write_mds(tmp_path / "x", documents, "ndarray:uint16")
    found = optimus.describe_data(path, tokenizer=tokenizer_file, context=CONTEXT, seed=5)
    tokens = sum(map(len, documents))
    assert (found["sequences"], found["dropped_tokens"]) == divmod(tokens, CONTEXT)
    assert found["documents"] == (len(documents) if form == "megatron" else None)
    check_lengths(
        found["lengths"],
        [stop - start for start, stop in spans(documents) if start < found["tokens"]],
    )
    assert found["lengths"]["cut"] == 0
    starts, stops = {start for start, _ in spans(documents)}, {stop for _, stop in spans(documents)}
    order = Permutation(found["sequences"], "shuffle", 5)(np.arange(found["sequences"])).tolist()
    rows = _texts(_opened(path, tokenizer_file, CONTEXT, 5, ()), range(found["sequences"]))
    for row, block in zip(rows, order):
        at = block * CONTEXT
        for document in row["documents"]:
            assert (document["begins"], document["ends"]) == (at in starts, at + document["tokens"] in stops)
            at += document["tokens"]
        assert at == (block + 1) * CONTEXT
    assert optimus.show_row(path, 5, tokenizer=tokenizer_file, context=CONTEXT, seed=5) == rows[5]


def test_a_url_is_read_in_part(joined: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One shard of a remote folder is copied, not all, and documents at the edges of rows count as they are there."""
    monkeypatch.setattr("optimus.data.shards.CACHE", str(tmp_path))
    fetched: list[str] = []
    fetch = RemoteFolder.fetch
    monkeypatch.setattr(RemoteFolder, "fetch", lambda self, name: fetched.append(name) or fetch(self, name))
    monkeypatch.setattr(Shards.__init__, "__defaults__", (str(tmp_path),))
    system = fsspec.filesystem("memory")
    system.put(str(joined), "/described", recursive=True)
    try:
        found = optimus.describe_data("memory://described", rows=10)
    finally:
        system.rm("/described", recursive=True)
    assert {name for name in fetched if name.startswith("shard")} == {"shard-00000.npy"}
    shards = Shards(joined)
    rows = shards.rows(0, 10)
    ends = [np.flatnonzero(row == shards.eos_id) + 1 for row in rows]
    lengths = np.concatenate([np.diff(np.unique([0, *each, CONTEXT])) for each in ends])
    check_lengths(found["lengths"], lengths.tolist())
    assert found["lengths"]["unit"] == "pieces"
    assert [row["row"] for row in found["rows"]] == [0, 1, 2]


# ---- The command and the page ----


def test_the_command(joined: Path, tmp_path: Path) -> None:
    run = CliRunner()
    assert json.loads(run.invoke(app, ["data", str(joined), "--json"]).output) == optimus.describe_data(str(joined))
    shown = run.invoke(app, ["data", str(joined), "--rows", "3"])
    assert shown.exit_code == 0
    assert "documents   115" in shown.output
    assert "left out    2 empty" in shown.output
    assert "that begin in 3 of " in shown.output
    row = json.loads(run.invoke(app, ["data", str(joined), "--row", "17", "--json"]).output)
    assert row == optimus.show_row(str(joined), 17)
    text = run.invoke(app, ["data", str(joined), "--row", "17"]).output
    assert f"row 17: {row['file']}, byte {row['byte']:,}; {CONTEXT} tokens" in text
    assert [text.count(f"--- document {number} of ") for number in range(1, len(row["documents"]) + 2)] == [
        *[1] * len(row["documents"]),
        0,
    ]


class Tags(HTMLParser):
    """Counts the tags of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)


@pytest.fixture
def evil(tokenizer_file: Path, tmp_path: Path) -> Path:
    """Data whose text and name would control a terminal or a page."""
    name = tmp_path / "\x1b[31m<script>.txt"
    name.write_text(EVIL * 40, encoding="utf-8")
    prepare([name], tmp_path / "out", tokenizer=tokenizer_file, context=64, workers=1)
    return tmp_path / "out"


def test_text_controls_neither_terminal_nor_page(evil: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for words in (["--html", str(page)], ["--row", "0"]):
        shown = CliRunner().invoke(app, ["data", str(evil), *words]).output
        assert "\\x1b[31m" in shown
        assert not {"\x1b", "\u202e"} & {*shown}
    text = page.read_text(encoding="utf-8")
    assert "\x1b" not in text
    assert Tags(text).tags.count("script") == 3  # the data, the building blocks and the page's own
    data = embedded(text)
    found = optimus.describe_data(evil)
    assert len(data["rows"]) == len(found["rows"])
    parts = [part for row in data["rows"] for each in row["documents"] for part in each["parts"]]
    assert "</script><script>alert(1)</script>" in "".join(part["text"] for part in parts)
    assert sum(each["number"] for each in data["lengths"]) == found["lengths"]["count"]
    assert [each["number"] for each in data["sources"]] == [each["tokens"] for each in found["sources"]]
    assert "http" not in text.replace("Content-Security-Policy", "").split("<script")[0].replace("http-equiv", "")


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_in_a_browser(joined: Path, tmp_path: Path, scheme: str) -> None:
    optimus.describe_data(joined, html=tmp_path / "page.html")
    with browser() as chromium:
        for widths in ((390, 1280), (1280, 390)):
            shown, found = opened(chromium, tmp_path / "page.html", widths, scheme, canvases=False)
        for table in shown.locator(".scroll").all():
            assert table.evaluate("each => each.scrollWidth - each.clientWidth") <= 0
    for text in ("Sources", "Lengths of documents", "Row 0", "median"):
        assert text in found["text"]


# ---- Bad input ----


def damaged_shard(folder: Path) -> None:
    path = max(folder.glob("shard-*"))
    path.write_bytes(path.read_bytes()[:-2] + b"\xff\xff")


def changed_index(**changed: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "index.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damaged_shard, "shard-.* is corrupted: its checksum differs"),
        (changed_index(documents="many"), "index.json is damaged .documents is 'many'"),
        (changed_index(sources=[{"name": 5}]), "index.json is damaged .name is 5"),
        (changed_index(sources=["x"]), "index.json is damaged .no entry 'name'"),
        (changed_index(duplicates=-1), "index.json is damaged .duplicates is -1"),
        (changed_index(seed=None), "index.json is damaged .no entry 'seed'"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda folder: (folder / "index.json").unlink(), "not a folder of prepared data"),
    ],
)
def test_a_damaged_folder(joined: Path, tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    folder = Path(shutil.copytree(joined, tmp_path / "copy"))
    damage(folder)
    with pytest.raises(UserError, match=message):
        optimus.describe_data(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}", "--row", "100000"], "has the rows 0 to .*, and no row 100,000"),
        (["{}", "--row", "-1"], "no row -1"),
        (["{}", "--rows", "0"], "`rows` is 0"),
        (["{}", "--row", "1", "--rows", "5"], "`row` prints one row alone"),
        (["{}", "--tokenizer", "x"], "`tokenizer` is for token files"),
        (["{}", "--html", "{}/no/page.html"], "cannot write .*page.html"),
        (["npy:{}/x"], "token ids alone: name the tokenizer that made them with `tokenizer`"),
        (["npy:{}/x", "--tokenizer", "{}", "--context", "0"], "`context` must be at least 1"),
        (["npy:{}/x", "--tokenizer", "{}"], "names no file"),
        (["c4:v1"], "token format 'c4' does not exist; valid: mds, megatron, npy"),
    ],
)
def test_bad_arguments(joined: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["data", *(each.format(joined) for each in arguments)])
    assert isinstance(result.exception, UserError)
    with pytest.raises(UserError, match=message):
        raise result.exception
