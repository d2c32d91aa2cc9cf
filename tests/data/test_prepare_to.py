"""`prepare --to` writes the files of other trainers, as the descriptions of the formats say.

The readers here follow these descriptions, and share nothing with those of Optimus.
"""

import itertools
import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from helpers.forks import forked
from helpers.sweep import part_of
from optimus.cli import app
from optimus.data import preparation, shards, token_writers, tokenizer, units
from optimus.data.gather import Stream, StreamReader
from optimus.data.packing import write_ends
from optimus.data.preparation import prepare
from optimus.data.shards import Shards
from optimus.data.tasks import prepare_status
from optimus.data.token_files import open_token_files
from optimus.data.token_writers import FLAT, MEGATRON, TokenFilePlan, block_writer
from optimus.disk import parse_json
from optimus.errors import UserError

FORMS = ("megatron", "npy")


def read_megatron(prefix: Path) -> list[list[int]]:
    """Reads PREFIX.idx and PREFIX.bin of Megatron-LM (`indexed_dataset.py`), one sequence for each document."""
    index, data = (prefix.with_name(f"{prefix.name}.{end}").read_bytes() for end in ("idx", "bin"))
    magic, version, code, sequences, borders = struct.unpack_from("<9sQBQQ", index)
    assert (magic, version) == (b"MMIDIDX\x00\x00", 1)
    kind = {4: "<i4", 8: "<u2"}[code]
    at = 9 + 8 + 1 + 8 + 8
    lengths = struct.unpack_from(f"<{sequences}i", index, at)
    pointers = struct.unpack_from(f"<{sequences}q", index, at + 4 * sequences)
    documents = struct.unpack_from(f"<{borders}q", index, at + 12 * sequences)
    assert len(index) == at + 12 * sequences + 8 * borders
    assert documents == tuple(range(sequences + 1))
    found = [np.frombuffer(data, kind, n, pointer).tolist() for n, pointer in zip(lengths, pointers)]
    assert sum(lengths) * np.dtype(kind).itemsize == len(data)
    return found


def read_npy(folder: Path, kind: str, eos_id: int) -> list[list[list[int]]]:
    """Reads the files of OLMo-core as raw arrays, in the order of their names; the documents of each file."""
    files = []
    for path in sorted(folder.glob("*.npy")):
        tokens = np.frombuffer(path.read_bytes(), kind)
        parts = np.split(tokens, np.flatnonzero(tokens == eos_id) + 1)
        assert not len(parts[-1]), f"{path} does not end where a document ends"
        files.append([part.tolist() for part in parts[:-1]])
    return files


def documents_of(folder: Path, to: str) -> list[list[int]]:
    index = parse_json((folder / "index.json").read_bytes())
    if to == "megatron":
        return read_megatron(folder / "text_document")
    return [each for file in read_npy(folder, index["dtype"], index["tokenizer"]["eos_id"]) for each in file]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def texts(sources: list[str]) -> list[str]:
    """Documents in an order with repeated ones, an empty one, and one that is longer than a file."""
    made = [source[at : at + 300] for source in sources[:3] for at in range(0, 12_000, 300)]
    made += [made[5].upper(), made[50], "", sources[4][:9000], "x"]
    random.Random(2).shuffle(made)
    return made


@pytest.fixture
def inputs(texts: list[str], tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for number, start in enumerate(range(0, len(texts), 50)):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[start : start + 50]]
        (folder / f"{number}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets blocks, and what is read at once, end within numbers and within tables."""
    monkeypatch.setattr(token_writers, "BLOCK", 2501)
    monkeypatch.setattr(token_writers, "_AT_ONCE", 37)


@pytest.fixture
def run(inputs: Path, tokenizer_file: Path, tmp_path: Path, no_helpers: None) -> Callable[..., dict[str, Any]]:
    def call(output: str, to: str, **options: Any) -> dict[str, Any]:
        options = {"tokenizer": tokenizer_file, "workers": 1} | options
        if to == "npy":
            options = {"shard_size": 2000} | options
        return prepare([inputs], tmp_path / output, to=to, **options)

    return call


@pytest.fixture
def expected(texts: list[str], encode: Callable[[str], list[int]]) -> list[list[int]]:
    """The tokens of the documents, each with the end-of-text token."""
    return [[*encode(text), encode("<|endoftext|>")[0]] for text in texts if text]


@pytest.mark.parametrize("to", FORMS)
def test_documents_are_in_their_order(
    run: Callable[..., dict[str, Any]], expected: list[list[int]], tmp_path: Path, small_blocks: None, to: str
) -> None:
    index = run("out", to)
    assert documents_of(tmp_path / "out", to) == expected
    assert (index["format"], index["to"], index["dtype"]) == ("optimus-token-files", to, "<u2")
    assert (index["documents"], index["tokens"]) == (len(expected), sum(map(len, expected)))
    assert index["empty_documents"] == 1
    names = {"megatron": {"text_document.bin", "text_document.idx"}}.get(to, {each["file"] for each in index["blocks"]})
    assert {*contents(tmp_path / "out")} == {"index.json", "tokenizer.json", "tokenizer_config.json", *names}


def test_files_of_olmo_have_about_the_size_of_a_shard(
    run: Callable[..., dict[str, Any]], expected: list[list[int]], tmp_path: Path
) -> None:
    """A file has as many documents as fit, and a document that is larger has a file for itself."""
    run("out", "npy")
    files = read_npy(tmp_path / "out", "<u2", expected[0][-1])
    assert [path.name for path in sorted((tmp_path / "out").glob("*.npy"))][:2] == ["part-00000.npy", "part-00001.npy"]
    assert sum(len(file) == 1 and len(file[0]) > 1000 for file in files) == 1
    for file, later in itertools.pairwise(files):
        assert len(file) == 1 or sum(map(len, file)) <= 1000
        assert sum(map(len, file)) + len(later[0]) > 1000


@pytest.mark.parametrize("to", FORMS)
@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.parametrize("options", [{}, {"dedup": "exact", "min_tokens": 20}], ids=["all", "chosen"])
def test_the_files_are_the_same_for_any_number_of_tasks(
    run: Callable[..., dict[str, Any]],
    expected: list[list[int]],
    texts: list[str],
    tmp_path: Path,
    small_blocks: None,
    to: str,
    tasks: int,
    options: dict[str, Any],
) -> None:
    index = run("one", to, **options)
    if options:
        kept = [text for text in texts if text]
        first = {text.lower(): number for number, text in reversed([*enumerate(kept)])}
        chosen = [
            each
            for number, (text, each) in enumerate(zip(kept, expected))
            if len(each) >= 20 and first[text.lower()] == number
        ]
        assert (index["duplicates"], index["too_short"]) == (2, 1)
        assert documents_of(tmp_path / "one", to) == chosen
    numbers = [*range(tasks)]
    random.Random(tasks).shuffle(numbers)
    for number in numbers:
        found = run("many", to, tasks=tasks, task=number, **options)
    assert found == index
    assert contents(tmp_path / "many") == contents(tmp_path / "one")
    assert not (tmp_path / "many.partial").exists()


def moments(partial: Path, copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies the unfinished folder after each call of a function that writes after the streams."""
    copies.mkdir()
    last = dict[str, bytes]()

    def watched(module: Any, name: str) -> None:
        function = getattr(module, name)

        def watching(*args: Any, **named: Any) -> Any:
            nonlocal last
            result = function(*args, **named)
            if partial.exists() and (now := contents(partial)) != last:
                last = now
                shutil.copytree(partial, copies / f"{len(list(copies.iterdir())):04d}")
            return result

        monkeypatch.setattr(module, name, watching)

    for module, name in ((os, "fsync"), (Path, "replace"), (Path, "rename"), (Path, "unlink")):
        watched(module, name)


@pytest.mark.parametrize("to", FORMS)
def test_a_kill_at_any_moment_changes_nothing(
    run: Callable[..., dict[str, Any]],
    tmp_path: Path,
    small_blocks: None,
    monkeypatch: pytest.MonkeyPatch,
    to: str,
) -> None:
    """A call goes on from each state that a kill may leave, also from blocks that are written in part."""
    monkeypatch.setattr(token_writers, "BLOCK", 12_000)
    options = {"shard_size": 12_000} if to == "npy" else {}
    with monkeypatch.context() as watching:
        moments(tmp_path / "out.partial", tmp_path / "copies", watching)
        run("out", to, **options)
    expected, copies = contents(tmp_path / "out"), sorted((tmp_path / "copies").iterdir())
    assert len(copies) > 20
    for copy in part_of(copies, 3):
        for path in [*copy.glob("text_document.*[nx]"), *copy.glob("part-*.npy")]:
            with path.open("r+b") as file:  # what is not synced may be lost
                for start in range(0, path.stat().st_size, 12_000):
                    if not (copy / f"{path.name}-{start}.sha256").exists():
                        file.seek(start)
                        file.write(bytes(min(12_000, path.stat().st_size - start)))
        copy.rename(tmp_path / "again.partial")
        run("again", to, **options)
        assert contents(tmp_path / "again") == expected, copy.name
        shutil.rmtree(tmp_path / "again")


@pytest.mark.parametrize("to", FORMS)
def test_processes_share_the_blocks(
    run: Callable[..., dict[str, Any]], tmp_path: Path, small_blocks: None, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # the tokenizers' threads do not survive a fork
    run("one", to)
    for number in range(3):
        run("many", to, tasks=3, task=number, stage="streams")

    def share(number: int) -> None:
        assert run("many", to, tasks=3, task=number, stage="shards")["format"] == shards.TOKEN_FILES

    children = [forked(partial(share, number)) for number in range(3)]
    assert [os.WEXITSTATUS(os.waitpid(child, 0)[1]) for child in children] == [0] * 3
    assert contents(tmp_path / "many") == contents(tmp_path / "one")


@pytest.mark.parametrize("to", FORMS)
def test_a_run_trains_on_the_documents(
    run: Callable[..., dict[str, Any]],
    expected: list[list[int]],
    inputs: Path,
    tokenizer_file: Path,
    tmp_path: Path,
    to: str,
) -> None:
    """The rows of a run are those of prepared data with the same text, bit for bit."""
    run("out", to)
    ours = prepare([inputs], tmp_path / "ours", tokenizer=tokenizer_file, context=32, seed=3, workers=1)
    path = f"{to}:{tmp_path}/out/{token_writers.WRITTEN[to]}"
    rows = open_token_files(path, tokenizer=str(tmp_path / "out"), context=32, seed=3, cache=str(tmp_path / "cache"))
    assert rows.instances == ours["instances"]
    np.testing.assert_array_equal(
        rows.stored_rows(0, rows.instances), Shards(tmp_path / "ours").rows(0, rows.instances)
    )
    assert rows._stream.read(0, rows.stream_tokens).tolist() == [token for each in expected for token in each]


def test_blocks_have_the_sums_of_their_bytes(
    run: Callable[..., dict[str, Any]], tmp_path: Path, small_blocks: None
) -> None:
    import hashlib

    index, sizes = run("out", "megatron"), dict[str, int]()
    for block in index["blocks"]:
        data = (tmp_path / "out" / block["file"]).read_bytes()
        assert block["start"] == sizes.get(block["file"], 0)
        assert hashlib.sha256(data[block["start"] :][: block["bytes"]]).hexdigest() == block["sha256"]
        sizes[block["file"]] = block["start"] + block["bytes"]
    assert sizes == {
        name: (tmp_path / "out" / name).stat().st_size for name in ("text_document.bin", "text_document.idx")
    }


# ---- Types of tokens, and many documents, without a tokenizer of that size ----


@pytest.mark.parametrize(
    ("to", "vocabulary", "kind"),
    [
        ("megatron", 100, "<u2"),
        ("megatron", 65_499, "<u2"),
        ("megatron", 65_500, "<i4"),  # as `DType.optimal_dtype` of Megatron-LM
        ("megatron", 200_000, "<i4"),
        ("npy", 256, "|u1"),
        ("npy", 257, "<u2"),
        ("npy", 65_536, "<u2"),
        ("npy", 65_537, "<u4"),
    ],
)
def test_types_of_tokens(tmp_path: Path, small_blocks: None, to: str, vocabulary: int, kind: str) -> None:
    """Streams with documents of all lengths, one of them empty, in types that differ from those of the files."""
    eos, generator = vocabulary - 1, np.random.default_rng(1)
    stream_type = "<u2" if vocabulary <= 1 << 16 else "<u4"
    streams, ends, expected = [], [], list[list[int]]()
    for number, documents in enumerate((40, 0, 60)):
        lengths = generator.integers(1, 30, documents)
        made = [[*generator.integers(0, eos, length - 1).tolist(), eos] for length in lengths]
        path = tmp_path / f"{number}.bin"
        path.write_bytes(np.array([token for each in made for token in each], stream_type).tobytes() + b"rest")
        np.save(tmp_path / f"{number}.npy", np.cumsum(lengths))
        streams.append(Stream(path, int(lengths.sum())))
        ends.append(tmp_path / f"{number}.npy")
        expected += made
    form = {"megatron": MEGATRON, "npy": FLAT}[to]
    assert form.token_type(vocabulary) == kind
    borders = form.borders(streams, ends, 100)
    plan = TokenFilePlan(form, streams, ends, borders, stream_type, kind)
    out = tmp_path / "out"
    out.mkdir()
    for block in plan.blocks():
        block_writer(out, plan)(block)
    if to == "megatron":
        assert read_megatron(out / "text_document") == expected
    else:
        assert [each for file in read_npy(out, kind, eos) for each in file] == expected


def test_memory_does_not_grow_with_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tracemalloc

    peaks = []
    for documents in (300_000, 1_200_000):
        ends, tokens = tmp_path / f"{documents}.npy", tmp_path / f"{documents}.bin"
        np.save(ends, np.arange(1, documents + 1))
        np.zeros(documents, "<u2").tofile(tokens)
        plan = TokenFilePlan(MEGATRON, [Stream(tokens, documents)], [ends], [0, documents], "<u2", "<u2")
        monkeypatch.setattr(token_writers, "_AT_ONCE", 50_000)
        write = block_writer(tmp_path, plan)
        tracemalloc.start()
        for block in plan.blocks():
            write(block)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert (tmp_path / "text_document.idx").stat().st_size == 34 + 20 * documents + 8
        for path in tmp_path.glob("text_document*"):
            path.unlink()
    assert peaks[1] < 1.2 * peaks[0] < 8 << 20


def test_a_document_too_long_for_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_writers, "_LONGEST", 5)
    (tmp_path / "a").write_bytes(np.zeros(10, "<u2").tobytes())
    np.save(tmp_path / "ends.npy", np.array([4, 10]))
    plan = TokenFilePlan(MEGATRON, [Stream(tmp_path / "a", 10)], [tmp_path / "ends.npy"], [0, 10], "<u2", "<u2")
    with pytest.raises(UserError, match=r"document 1 has 6 tokens, but .* up to 5: leave it out with `max_tokens`"):
        [block_writer(tmp_path, plan)(block) for block in plan.blocks()]


@pytest.mark.parametrize("blocks", [[], [[]], [[3, 5], [], [9]], [[*range(1, 200_000)], [200_000]]])
def test_ends_are_an_array_of_numpy(tmp_path: Path, blocks: list[list[int]]) -> None:
    with (tmp_path / "ends.npy").open("wb") as file:
        write_ends(file, iter([np.array(block, np.int64) for block in blocks]))
    for mode in (None, "r"):
        assert np.load(tmp_path / "ends.npy", mmap_mode=mode).tolist() == [end for block in blocks for end in block]


def test_values_cross_streams(tmp_path: Path) -> None:
    streams = []
    for number, part in enumerate(([1, 2, 3], [], [4], [5, 6])):
        (tmp_path / str(number)).write_bytes(np.array([*part, 99], "<i8").tobytes())
        streams.append(Stream(tmp_path / str(number), len(part)))
    with StreamReader(streams, 8) as reader:
        for start in range(6):
            for stop in range(start + 1, 7):
                assert reader.values(start, stop, "<i8").tolist() == [*range(start + 1, stop + 1)]


# ---- What is refused, and what is said ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "mds"}, r"`to` is 'mds': it must be one of optimus, megatron, npy"),
        ({"to": "npy", "pack": "best-fit"}, r"`to` npy writes .*neither cut nor shuffled: leave out `pack`"),
        ({"to": "npy", "seed": 1, "context": 64}, r"leave out `context`, `seed`"),
        ({"to": "megatron", "shard_size": 100}, r"`to` megatron writes .* in one file, .*: leave out `shard_size`"),
        ({"to": "npy", "text_field": "chat:messages"}, r"`to` npy has no room for what the model predicts .*chat:messages"),
    ],
)  # fmt: skip
def test_contradictory_options(
    inputs: Path, tokenizer_file: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        prepare([inputs], tmp_path / "out", tokenizer=tokenizer_file, workers=1, **options)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("to", FORMS)
def test_a_repeated_call_and_others(
    run: Callable[..., dict[str, Any]], tmp_path: Path, stages: Any, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    index = run("out", to)
    before = contents(tmp_path / "out")
    assert run("out", to, progress=stages) == index
    assert stages.seen == {"already complete"}
    with pytest.raises(UserError, match=rf"output of another run \(.*to {to} there and optimus here"):
        run("out", "optimus", shard_size=2000)
    assert contents(tmp_path / "out") == before
    path = f"{to}:{tmp_path}/out/{token_writers.WRITTEN[to]}"
    with pytest.raises(UserError) as error:
        Shards(tmp_path / "out")
    assert str(error.value) == (
        f"{tmp_path}/out has token files of another trainer ({to}), not shards: name them as {path}, with "
        f"data.tokenizer {tmp_path}/out"
    )
    assert prepare_status(tmp_path / "out")["shards"] == len(index["blocks"])
    run("shards", "optimus", context=32)
    with pytest.raises(UserError, match=rf"output of another run \(.*to optimus there and {to} here"):
        run("shards", to)
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "_join", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run("begun", to)
    with pytest.raises(UserError, match=rf"unfinished run with other settings \(.*to {to} there and optimus here"):
        run("begun", "optimus", shard_size=2000)
    run("begun", to)
    assert contents(tmp_path / "begun") == before


def test_damaged_index(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    index = run("out", "npy")
    for wrong in ({"to": "mds"}, {"blocks": [{"file": "../x"}]}, {"settings": 3}):
        (tmp_path / "out" / "index.json").write_text(json.dumps(index | wrong), encoding="utf-8")
        with pytest.raises(UserError, match=r"index\.json is damaged"):
            run("out", "npy")


def test_no_text_and_no_space(
    run: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="the input contains no text"):
        run("out", "npy", min_tokens=100_000)
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        make_plan = preparation.make_plan

        def full(*args: Any) -> Any:
            patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
            return make_plan(*args)

        patch.setattr(preparation, "make_plan", full)
        with pytest.raises(UserError, match=r"too little disk space for .*out: about .* needed, 10 B free"):
            run("out", "npy")
    run("out", "npy")
    assert (tmp_path / "out" / "part-00000.npy").exists()


@pytest.mark.parametrize("to", FORMS)
def test_a_tokenizer_whose_settings_name_its_end_of_text_token(
    run: Callable[..., dict[str, Any]], sources: list[str], tmp_path: Path, to: str
) -> None:
    """The end-of-text token that a tokenizer_config.json names is that of the output, of one call and of tasks."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.train(sources[:2], 400, folder / "tokenizer.json")
    made = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    made["added_tokens"].append(made["added_tokens"][0] | {"id": 400, "content": "<|end|>"})
    (folder / "tokenizer.json").write_text(json.dumps(made), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}', encoding="utf-8")
    expected = run("one", to, tokenizer=folder)
    assert (expected["tokenizer"]["eos_id"], expected["tokenizer"]["eos_token"]) == (400, "<|end|>")
    for number in range(2):
        found = run("many", to, tokenizer=folder, tasks=2, task=number)
    assert found == expected
    assert contents(tmp_path / "many") == contents(tmp_path / "one")
    assert {each[-1] for each in documents_of(tmp_path / "one", to)} == {400}
    assert tokenizer.inspect(tmp_path / "one").eos_id == 400


def test_the_command(inputs: Path, tokenizer_file: Path, tmp_path: Path, no_helpers: None) -> None:
    words = ["prepare", str(inputs), "--output", str(tmp_path / "out"), "--tokenizer", str(tokenizer_file)]
    result = CliRunner().invoke(app, [*words, "--workers", "1", "--to", "megatron"])
    assert result.exit_code == 0, result.output
    path = f"megatron:{tmp_path}/out/text_document"
    text = "".join(result.output.split())
    assert f"in2files;trainonthemwithdata.path={path}data.tokenizer={tmp_path}/out" in text
    result = CliRunner().invoke(app, ["data", path, "--tokenizer", str(tmp_path / "out"), "--json"])
    assert json.loads(result.stdout)["documents"] == 124


def test_units_of_the_same_name_have_their_own_claims(tmp_path: Path) -> None:
    """Units of several tasks' folders whose results have the same name can be done at the same time."""
    found = [units.WorkUnit(tmp_path / name / "ends.bin", ()) for name in ("task-00000", "task-00001")]
    (tmp_path / units.CLAIMS).mkdir()
    claims: Iterator[Any] = (units._claim(units._claim_of(tmp_path, each), anyway=False) for each in found)
    held = [*claims]
    assert None not in held
    assert units._claim(units._claim_of(tmp_path, found[0]), anyway=False) is None
