"""Token files of other trainers: read as their formats say, and trained on like prepared data of the same tokens."""

import gzip
import json
import math
import os
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import zstandard

import optimus
from optimus.config import load_config
from optimus.config.data import SourceConfig
from optimus.data.preparation import prepare
from optimus.data.shards import BEGINS, INSIDE, Shards
from optimus.data.token_files import open_token_files
from optimus.data.training import TrainingData, open_validation
from optimus.errors import UserError
from optimus.observe.metrics import read_metrics

# ---- Writers, from the descriptions of the formats ----


def write_megatron(prefix: Path, documents: Sequence[Sequence[int]], kind: str = "<i4", parts: int = 1) -> None:
    """Writes PREFIX.bin and PREFIX.idx of Megatron-LM; a document has `parts` sequences."""
    code = {"<u1": 1, "<i4": 4, "<i8": 5, "<u2": 8}[kind]
    sequences, borders = [], [0]
    for document in documents:
        sequences += [each for each in np.array_split(np.array(document), parts) if len(each)]
        borders.append(len(sequences))
    sizes = [len(each) for each in sequences]
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]) * np.dtype(kind).itemsize
    prefix.with_name(f"{prefix.name}.bin").write_bytes(np.concatenate(sequences).astype(kind).tobytes())
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(borders))
    tables = np.array(sizes, "<i4").tobytes() + starts.astype("<i8").tobytes() + np.array(borders, "<i8").tobytes()
    prefix.with_name(f"{prefix.name}.idx").write_bytes(head + tables)


def write_npy(folder: Path, documents: Sequence[Sequence[int]], kind: str = "<u2", files: int = 3) -> None:
    """Writes flat files of OLMo-core, without headers."""
    folder.mkdir()
    for number, part in enumerate(np.array_split(np.concatenate([np.array(each) for each in documents]), files)):
        (folder / f"part-{number}.npy").write_bytes(part.astype(kind).tobytes())


def encoded(ids: np.ndarray[Any, Any], encoding: str) -> bytes:
    """Returns an array in an encoding of MosaicML Streaming."""
    name, *rest = encoding.split(":")
    if name == "bytes":
        return ids.astype("<i8").tobytes()
    kind = rest[0] if rest else "int32"
    head = b"" if rest else bytes([33])
    if len(rest) < 2:
        code = 0 if len(ids) < 256 else 1 if len(ids) < 65536 else 2
        head += bytes([1 << 2 | code]) + np.array([len(ids)], ("u1", "<u2", "<u4")[code]).tobytes()
    return head + ids.astype(kind).tobytes()


def write_mds(
    folder: Path, samples: Sequence[Any], encoding: str, *, beside: bool = False, packed: str | None = None
) -> None:
    """Writes a folder of MosaicML Streaming with up to 7 samples a shard; `beside` adds columns around the tokens."""
    folder.mkdir()
    columns = {"tokens": encoding} | ({"id": "str", "weight": "float32", "z": "bytes"} if beside else {})
    names = sorted(columns)
    fixed = {"float32": 4}
    shape = encoding.split(":")[2] if encoding.count(":") == 2 else None
    sizes = [
        fixed.get(
            columns[name],
            int(shape) * np.dtype(encoding.split(":")[1]).itemsize if name == "tokens" and shape else None,
        )
        for name in names
    ]
    head = {"column_encodings": [columns[name] for name in names], "column_names": names, "column_sizes": sizes}
    head |= {"compression": packed, "format": "mds", "hashes": [], "size_limit": 1 << 26, "version": 2}
    text, shards = json.dumps(head, sort_keys=True).encode(), []
    for first in range(0, len(samples), 7):
        rows = []
        for number, sample in enumerate(samples[first : first + 7]):
            values = {"tokens": encoded(np.array(sample), encoding), "id": b"x" * (number + 1), "z": b"end" * number}
            values["weight"] = struct.pack("<f", number)
            cells = [values[name] for name in names]
            own = [len(cell) for cell, size in zip(cells, sizes) if size is None]
            rows.append(np.array(own, "<u4").tobytes() + b"".join(cells))
        edges = np.cumsum([0, *map(len, rows)]) + 4 + 4 * (len(rows) + 1) + len(text)
        raw = struct.pack("<I", len(rows)) + edges.astype("<u4").tobytes() + text + b"".join(rows)
        name = f"shard.{first // 7:05}.mds"
        entry: dict[str, Any] = head | {"raw_data": {"basename": name, "bytes": len(raw), "hashes": {}}}
        entry |= {"samples": len(rows), "zip_data": None}
        if packed is not None:
            data = gzip.compress(raw) if packed == "gz" else zstandard.ZstdCompressor().compress(raw)
            name = f"{name}.{packed.partition(':')[0]}"
            entry["zip_data"] = {"basename": name, "bytes": len(data), "hashes": {}}
            raw = data
        (folder / name).write_bytes(raw)
        shards.append(entry)
    (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}), encoding="utf-8")


# ---- The same tokens in all forms ----


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    sources = sorted((Path(__file__).resolve().parents[2] / "optimus" / "config").glob("*.py"))
    for number, path in enumerate(sources):
        (folder / f"{number:02}.txt").write_text(path.read_text(encoding="utf-8")[:4000], encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def ours(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Shards:
    """Prepared data with the seed of a run."""
    folder = tmp_path_factory.mktemp("ours") / "data"
    prepare([texts], folder, train_tokenizer=300, context=32, workers=1)
    return Shards(folder)


@pytest.fixture(scope="module")
def documents(texts: Path, ours: Shards) -> list[list[int]]:
    """The tokens of each document with its end-of-text token."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(ours.tokenizer_path))
    found = [tokenizer.encode(path.read_text(encoding="utf-8")).ids for path in sorted(texts.iterdir())]
    return [[*ids, ours.eos_id] for ids in found]


def rows_of(path: str, ours: Shards, tmp_path: Path, context: int = 32) -> Any:
    return open_token_files(path, tokenizer=str(ours.folder), context=context, seed=0, cache=str(tmp_path / "cache"))


def flat(documents: Sequence[Sequence[int]]) -> list[int]:
    return [token for document in documents for token in document]


def samples_of(documents: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Returns samples of `size` tokens, as LLM Foundry concatenates documents."""
    stream = flat(documents)
    return [stream[at : at + size] for at in range(0, len(stream), size)]


def fixed(documents: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    return [each for each in samples_of(documents, size) if len(each) == size]


FORMS: dict[str, Callable[[Path, Sequence[Sequence[int]]], str]] = {
    "megatron": lambda to, given: f"megatron:{to}/x{write_megatron(to / 'x', given) or ''}",
    "megatron uint16": lambda to, given: f"megatron:{to}/x{write_megatron(to / 'x', given, '<u2') or ''}",
    "megatron sentences": lambda to, given: f"megatron:{to}/x{write_megatron(to / 'x', given, '<i8', parts=3) or ''}",
    "npy": lambda to, given: f"npy:{to}/x/*.npy{write_npy(to / 'x', given) or ''}",
    "npy one file": lambda to, given: f"npy:{to}/x/part-0.npy{write_npy(to / 'x', given, files=1) or ''}",
    "mds": lambda to, given: f"mds:{to}/x{write_mds(to / 'x', samples_of(given, 300), 'ndarray:int32') or ''}",
    "mds bytes": lambda to, given: f"mds:{to}/x{write_mds(to / 'x', samples_of(given, 100), 'bytes') or ''}",
    "mds columns": lambda to, given: f"mds:{to}/x{write_mds(to / 'x', given, 'ndarray:uint16', beside=True) or ''}",
    "mds any type": lambda to, given: f"mds:{to}/x{write_mds(to / 'x', given, 'ndarray', beside=True) or ''}",
    "mds zstd": lambda to, given: f"mds:{to}/x{write_mds(to / 'x', given, 'ndarray:uint16', packed='zstd') or ''}",
    "mds gz": lambda to, given: f"mds:{to}/x{write_mds(to / 'x', given, 'bytes', beside=True, packed='gz') or ''}",
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_those_of_prepared_data(ours: Shards, documents: list[list[int]], tmp_path: Path, form: str) -> None:
    """The stream of the documents, cut and shuffled, has the rows that `prepare` writes."""
    rows = rows_of(FORMS[form](tmp_path, documents), ours, tmp_path)
    assert rows.instances == ours.instances
    np.testing.assert_array_equal(rows.stored_rows(0, rows.instances), ours.rows(0, ours.instances))
    np.testing.assert_array_equal(rows.stored_rows(3, 5), ours.rows(3, 5))


def test_samples_of_a_fixed_shape(ours: Shards, documents: list[list[int]], tmp_path: Path) -> None:
    write_mds(tmp_path / "x", fixed(documents, 64), "ndarray:uint16:64", beside=True)
    rows = rows_of(f"mds:{tmp_path}/x", ours, tmp_path)
    stream = rows._stream.read(0, rows._stream.tokens)
    np.testing.assert_array_equal(stream, flat(fixed(documents, 64)))


def test_an_array_of_numpy_is_read_by_its_header(ours: Shards, documents: list[list[int]], tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array(flat(documents), np.int64))
    rows = rows_of(f"npy:{tmp_path}/a.npy", ours, tmp_path)
    np.testing.assert_array_equal(rows.stored_rows(0, rows.instances), ours.rows(0, ours.instances))


@pytest.mark.parametrize("parts", [1, 2])
def test_documents_come_from_the_index(ours: Shards, documents: list[list[int]], tmp_path: Path, parts: int) -> None:
    """Documents without end-of-text tokens begin at flags; end-of-text tokens within a document end nothing."""
    bare = [document[:-1] for document in documents]
    bare[1][5] = ours.eos_id
    write_megatron(tmp_path / "x", bare, parts=parts)
    rows = rows_of(f"megatron:{tmp_path}/x", ours, tmp_path)
    order = rows._order(np.arange(rows.instances))
    stored = np.empty((rows.instances, 32), np.uint32)
    stored[order] = rows.stored_rows(0, rows.instances)
    stream = stored.ravel()
    starts = np.cumsum([0, *map(len, bare)])[1:-1]
    inner = [at for at in starts.tolist() if at < len(stream) and at % 32]  # the first token of a row begins anyway
    assert np.flatnonzero(stream & BEGINS).tolist() == inner
    assert np.flatnonzero(stream & INSIDE).tolist() == [len(bare[0]) + 5]
    np.testing.assert_array_equal(stream & (INSIDE - 1) & ~np.uint32(BEGINS), flat(bare)[: len(stream)])


def test_documents_may_end_with_one_ordinary_token(ours: Shards, tmp_path: Path) -> None:
    """Lines of code all end with a line break, which also occurs within documents."""
    documents = [[5, 7, 9, 7], [8, 7, 7], [7], [9, 9, 7]] * 30
    write_megatron(tmp_path / "x", documents)
    rows = rows_of(f"megatron:{tmp_path}/x", ours, tmp_path)
    assert rows.instances == len(flat(documents)) // 32
    write_megatron(tmp_path / "y", [[token for token in each if token != 7] + [7] for each in documents])
    with pytest.raises(UserError, match="documents end with the token 7, but"):
        rows_of(f"megatron:{tmp_path}/y", ours, tmp_path)


@pytest.mark.parametrize("packed", [None, "zstd"])
@pytest.mark.parametrize("url", [False, True])
def test_shards_of_merged_data_lie_in_folders(
    ours: Shards, documents: list[list[int]], tmp_path: Path, packed: str | None, url: bool
) -> None:
    """`merge_index` of MosaicML Streaming writes names such as 0/shard.00000.mds."""
    write_mds(tmp_path / "x", documents, "ndarray:uint16", packed=packed)
    (tmp_path / "x" / "0").mkdir()
    index = json.loads((tmp_path / "x" / "index.json").read_bytes())
    for shard in index["shards"]:
        for kind in ("raw_data", "zip_data"):
            if shard[kind] is not None:
                shard[kind]["basename"] = f"0/{shard[kind]['basename']}"
    (tmp_path / "x" / "index.json").write_text(json.dumps(index), encoding="utf-8")
    for file in (tmp_path / "x").glob("shard.*"):
        file.rename(tmp_path / "x" / "0" / file.name)
    path = f"mds:{tmp_path}/x"
    if url:
        fsspec.filesystem("memory").put(str(tmp_path / "x"), f"/merged-{packed}", recursive=True)
        path = f"mds:memory://merged-{packed}"
    rows = rows_of(path, ours, tmp_path)
    np.testing.assert_array_equal(rows.stored_rows(0, rows.instances), ours.rows(0, ours.instances))


@pytest.mark.parametrize("packed", [None, "zstd"])
def test_shards_at_a_url_are_copied(
    ours: Shards, documents: list[list[int]], tmp_path: Path, packed: str | None
) -> None:
    write_mds(tmp_path / "x", documents, "ndarray:uint16", packed=packed)
    system = fsspec.filesystem("memory")
    system.put(str(tmp_path / "x"), f"/bucket-{packed}", recursive=True)
    rows = rows_of(f"mds:memory://bucket-{packed}", ours, tmp_path)
    np.testing.assert_array_equal(rows.stored_rows(0, rows.instances), ours.rows(0, ours.instances))
    copied = {each.name for each in (tmp_path / "cache").rglob("*.mds")}
    assert copied == {f"shard.{number:05}.mds" for number in range(-(-len(documents) // 7))}


# ---- Runs ----


@pytest.mark.parametrize("form", ["megatron", "npy", "mds columns"])
def test_a_run_on_token_files_is_a_run_on_the_same_rows(
    small_run: dict[str, Any], ours: Shards, documents: list[list[int]], tmp_path: Path, form: str
) -> None:
    """Losses are bit for bit those of prepared data, alone, with masked documents and in a mixture."""
    path = FORMS[form](tmp_path, documents)
    for more in ({}, {"documents": "mask"}):
        losses = []
        for number, data in enumerate(({"path": str(ours.folder)}, {"path": path, "tokenizer": str(ours.folder)})):
            run = small_run | {"data": data | more}
            output = tmp_path / f"run-{more.get('documents')}-{number}"
            losses.append(optimus.train(run, [f"train.output={output}"])["loss"])
        assert losses[0] == losses[1]
    mixed = {"sources": [{"path": path, "weight": 1}, {"path": str(ours.folder), "weight": 3}]}
    config = load_config(small_run | {"data": mixed | {"tokenizer": str(ours.folder)}})
    assert TrainingData(config).phases[0].names == ["data" if form == "x" else "x", "data"]


@pytest.mark.parametrize("form", ["megatron", "npy", "mds columns"])
@pytest.mark.parametrize("documents_are", ["ignore", "mask"])
def test_validation_on_token_files_is_that_on_the_same_rows(
    small_run: dict[str, Any], ours: Shards, documents: list[list[int]], tmp_path: Path, form: str, documents_are: str
) -> None:
    """Losses are bit for bit those of prepared data, in runs on either; bytes are the text's within 2 %."""
    path = FORMS[form](tmp_path, documents)
    sets = [{"name": "prepared", "path": str(ours.folder), "tokens": 1 << 14}]
    sets += [{"name": "files", "path": path, "tokens": 1 << 14}]
    for number, source in enumerate(({"path": str(ours.folder)}, {"path": path, "tokenizer": str(ours.folder)})):
        output = tmp_path / f"run-{number}"
        run = small_run | {"data": source | {"documents": documents_are}, "validation": sets}
        optimus.train(run, [f"train.output={output}"])
        found = json.loads((output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
        assert found["loss/files"] == found["loss/prepared"]
        assert found["bits_per_byte/files"] == pytest.approx(found["bits_per_byte/prepared"], rel=0.02)


def loss_and_bytes(run: Path, pieces: Sequence[Sequence[int]], tokenizer: Any) -> tuple[float, float]:
    """Returns the loss and the bits per byte of pieces of documents, each by itself, in double precision."""
    model, nats, tokens, nbytes = optimus.load_model(run).double(), 0.0, 0, 0
    for piece in (piece for piece in pieces if len(piece) > 1):
        with torch.no_grad():
            log_p = torch.log_softmax(model(torch.tensor([piece]))[0, :-1].double(), -1)
        nats -= float(log_p.gather(1, torch.tensor(piece[1:])[:, None]).sum())
        tokens += len(piece) - 1
        nbytes += len(tokenizer.decode(piece[1:]).encode())
    return nats / tokens, nats / math.log(2) / nbytes


@pytest.mark.parametrize("documents_are", ["ignore", "mask"])
@pytest.mark.parametrize("ends", [False, True])
def test_validation_without_ends_in_the_files(
    small_run: dict[str, Any], ours: Shards, documents: list[list[int]], tmp_path: Path, documents_are: str, ends: bool
) -> None:
    """Documents of Megatron-LM need no end-of-text tokens, and may have one inside."""
    from tokenizers import Tokenizer

    given = [document[: None if ends else -1] for document in documents]
    given[1][5] = ours.eos_id
    write_megatron(tmp_path / "x", given, parts=2)
    stream, starts = flat(given), {*np.cumsum([0, *map(len, given)]).tolist()}
    cuts = [at for at in range(len(stream) // 32 * 32) if not at % 32 or (at in starts and documents_are == "mask")]
    pieces = [stream[start:end] for start, end in zip(cuts, [*cuts[1:], len(stream) // 32 * 32])]
    small_run["train"] |= {"precision": "float32", "steps": 1}
    small_run["lr_schedule"]["warmup_steps"] = 1
    small_run["data"] = {"path": str(ours.folder), "documents": documents_are}
    optimus.train(
        small_run | {"validation": [{"name": "files", "path": f"megatron:{tmp_path}/x", "tokens": len(stream)}]}
    )
    found = read_metrics(Path(small_run["train"]["output"]))[-1]
    expected = loss_and_bytes(tmp_path / "run", pieces, Tokenizer.from_file(str(ours.tokenizer_path)))
    assert (found["loss/files"], found["bits_per_byte/files"]) == pytest.approx(expected, rel=1e-6)


def test_validation_ends_documents_as_the_prepared_data_of_the_run(
    small_run: dict[str, Any], texts: Path, ours: Shards, documents: list[list[int]], tmp_path: Path
) -> None:
    """The end-of-text token that a tokenizer_config.json named for `prepare` is that of the data."""
    named, end = tmp_path / "tokenizer", ours.vocab_size
    named.mkdir()
    content = json.loads(ours.tokenizer_path.read_text(encoding="utf-8"))
    content["added_tokens"].append(content["added_tokens"][0] | {"id": end, "content": "<|done|>"})
    (named / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (named / "tokenizer_config.json").write_text('{"eos_token": "<|done|>"}', encoding="utf-8")
    prepare([texts], tmp_path / "data", tokenizer=named, context=32, workers=1)
    write_npy(tmp_path / "x", [[*document[:-1], end] for document in documents])
    sets = [{"name": "files", "path": f"npy:{tmp_path}/x/*.npy"}, {"name": "data", "path": str(tmp_path / "data")}]
    optimus.train(small_run | {"data": {"path": str(tmp_path / "data"), "documents": "mask"}, "validation": sets})
    found = read_metrics(Path(small_run["train"]["output"]))[-1]
    assert found["loss/files"] == found["loss/data"]
    rows = open_token_files(sets[0]["path"], tokenizer=str(tmp_path / "data"), context=32, seed=0, cache="")
    assert rows.eos_id == end


def test_validation_measures_the_files_that_it_has_opened(
    small_run: dict[str, Any], ours: Shards, documents: list[list[int]], tmp_path: Path
) -> None:
    """A file that a glob no longer finds changes no curve; a file that has shrunk ends the run, and its key is named."""

    class Changes(optimus.Hook):
        def __init__(self, path: Path, change: Callable[[Path], None]) -> None:
            self.path, self.change = path, change

        def after_step(self, trainer: Any, record: Any) -> None:
            if record.step == 2:
                self.change(self.path)

    run = small_run | {"data": {"path": str(ours.folder)}}
    run["optimizer"] = {"name": "adamw"}
    run["lr_schedule"] = {"lr": 1e-30, "min_lr": 1e-30, "warmup_steps": 0}  # so that the losses of all steps are equal
    for name, change in (
        ("kept", lambda path: None),
        ("gone", Path.unlink),
        ("cut", lambda path: os.truncate(path, 99)),
    ):
        write_npy(tmp_path / name, documents, files=2)
        sets = [{"name": "files", "path": f"npy:{tmp_path}/{name}/*.npy", "every": 1}]
        run["train"] |= {"output": str(tmp_path / f"run-{name}")}
        ended = pytest.raises(UserError, match=r"validation\.0\.path: .*part-1.npy has 99 bytes, but .* up to step 3\)")
        with ended if name == "cut" else nullcontext():
            optimus.train(run | {"validation": sets}, hooks=[Changes(tmp_path / name / "part-1.npy", change)])
    losses = [[each["loss/files"] for each in read_metrics(tmp_path / f"run-{name}")] for name in ("kept", "gone")]
    assert losses[0] == losses[1]


def test_validation_measures_the_same_tokens_whatever_the_seed(
    small_run: dict[str, Any], ours: Shards, documents: list[list[int]], tmp_path: Path
) -> None:
    write_npy(tmp_path / "x", documents)
    found = []
    for seed in (0, 7):
        small_run["train"] |= {"seed": seed}
        config = load_config(small_run | {"data": {"path": str(ours.folder)}})
        rows = open_validation(f"npy:{tmp_path}/x/*.npy", config, ours)
        found.append(rows.stored_rows(0, 4).tolist())
    assert found[0] == found[1] == ours.stored_rows(0, 4).tolist()


def test_validation_reads_token_files_before_the_first_step(
    small_run: dict[str, Any], ours: Shards, documents: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong token far from the samples is found before the first step, unless the run does not read it."""
    monkeypatch.setattr("optimus.data.token_files._SAMPLE", 1)
    stream = flat(documents)
    stream[6000] = ours.vocab_size
    write_npy(tmp_path / "x", [stream], files=1)
    run = small_run | {"data": {"path": str(ours.folder)}}
    sets = {"path": f"npy:{tmp_path}/x/*.npy"}
    with pytest.raises(UserError, match=rf"validation\.0\.path: .*byte 12,000 has the token {ours.vocab_size}, but"):
        optimus.train(run | {"validation": [sets]})
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert optimus.train(run | {"validation": [sets | {"tokens": 32}]})["step"] == 6


def test_token_files_for_validation_are_checked_before_the_first_step(
    small_run: dict[str, Any], ours: Shards, tmp_path: Path
) -> None:
    write_npy(tmp_path / "short", [[5, 7, ours.eos_id]], files=1)
    write_npy(tmp_path / "other", [[5, 7, ours.vocab_size, ours.eos_id] * 40], files=1)
    for name, match in (
        ("absent", r"validation\.0\.path: .*absent"),
        ("short", r"validation\.0\.path: .* has 3 tokens, fewer than one sequence of 32"),
        ("other", rf"validation\.0\.path: .* has the token {ours.vocab_size}, but"),
    ):
        run = small_run | {"data": {"path": str(ours.folder)}}
        with pytest.raises(UserError, match=match):
            optimus.train(run | {"validation": [{"path": f"npy:{tmp_path}/{name}/*.npy"}]})
        assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_run_goes_on_only_with_the_same_files(
    small_run: dict[str, Any], ours: Shards, documents: list[list[int]], tmp_path: Path
) -> None:
    write_megatron(tmp_path / "x", documents)
    data = {"path": f"megatron:{tmp_path}/x", "tokenizer": str(ours.folder)}
    run = small_run | {"data": data, "checkpoint": {"every": 3}}
    whole = optimus.train(run, [f"train.output={tmp_path / 'whole'}"])["loss"]
    optimus.train(run, ["train.stop_at=3"])
    write_megatron(tmp_path / "x", [*documents[::-1]])
    with pytest.raises(UserError, match="data"):
        optimus.train(run, resume=True)
    write_megatron(tmp_path / "x", documents)
    assert optimus.train(run, resume=True)["loss"] == whole


@pytest.mark.parametrize("form", ["megatron", "npy"])
def test_a_row_that_changes_after_its_first_read_is_named(
    ours: Shards, documents: list[list[int]], tmp_path: Path, form: str
) -> None:
    """The checksums are beside the run, so another object on the same files, as after a restart, finds the change."""
    path = FORMS[form](tmp_path, documents)
    rows, folder = rows_of(path, ours, tmp_path), tmp_path / "sums"
    with rows.keeping_checksums(folder):
        first = rows.stored_rows(0, 3)
        assert np.array_equal(rows.stored_rows(0, 3), first)
    (file,) = folder.iterdir()
    assert file.stat().st_size == 4 * rows.instances
    assert np.count_nonzero(np.fromfile(file, "<u4")) == 3
    again = rows_of(path, ours, tmp_path)
    (data, at), (_, unread) = again.locate(1), again.locate(4)
    byte = data.read_bytes()[at]
    for there, changed in ((unread, False), (at, True)):
        over(data, there, bytes([byte ^ 1]))
        with again.keeping_checksums(folder), pytest.raises(UserError) if changed else nullcontext() as caught:
            again.stored_rows(0, 3)
        if caught is not None:
            assert f"{data}, byte {at:,}: 32 tokens or their documents are others than when the run read" in str(
                caught.value
            )
            assert str(caught.value).endswith(f"delete {file}")
    over(data, at, bytes([byte]))
    with again.keeping_checksums(folder):
        assert np.array_equal(again.stored_rows(0, 3), first)
    with pytest.raises(UserError, match=r"cannot write .*Free space"), again.keeping_checksums(data):
        pass


def test_damaged_checksums_are_named_and_can_be_deleted(
    ours: Shards, documents: list[list[int]], tmp_path: Path
) -> None:
    rows, folder = rows_of(FORMS["npy"](tmp_path, documents), ours, tmp_path), tmp_path / "sums"
    with rows.keeping_checksums(folder):
        first = rows.stored_rows(0, 3)
    (file,) = folder.iterdir()
    file.write_bytes(b"\x07" * file.stat().st_size)
    with rows.keeping_checksums(folder), pytest.raises(UserError, match="If the file has not changed") as caught:
        rows.stored_rows(0, 3)
    Path(str(caught.value).rpartition("delete ")[2]).unlink()
    with rows.keeping_checksums(folder):
        assert np.array_equal(rows.stored_rows(0, 3), first)


@pytest.mark.parametrize("form", ["megatron", "npy", "mds"])
def test_a_file_that_is_truncated_after_it_was_opened_is_named(
    ours: Shards, documents: list[list[int]], tmp_path: Path, form: str
) -> None:
    """Reading a mapped file behind its end would kill the process (SIGBUS)."""
    rows = rows_of(FORMS[form](tmp_path, documents), ours, tmp_path)
    first = rows.stored_rows(0, rows.instances)
    for file in rows.files:
        content = file.read_bytes()
        os.truncate(file, 0)
        with pytest.raises(UserError, match=rf"^{file} has 0 bytes, "):
            rows.stored_rows(0, rows.instances)
        file.write_bytes(content)
    assert np.array_equal(rows.stored_rows(0, rows.instances), first)
    if form == "mds":  # which maps few shards at a time
        return
    for file in rows.files:
        file.unlink()
    assert np.array_equal(rows.stored_rows(0, rows.instances), first)  # the mapping keeps deleted files


def test_a_run_keeps_checksums_of_the_rows_that_it_reads(
    small_run: dict[str, Any], ours: Shards, documents: list[list[int]], tmp_path: Path
) -> None:
    path = FORMS["npy"](tmp_path, documents)
    optimus.train(small_run | {"data": {"path": path, "tokenizer": str(ours.folder)}}, ["train.steps=2"])
    (file,) = (tmp_path / "run" / "row-checksums").iterdir()
    rows = rows_of(path, ours, tmp_path, context=32)
    parts = rows._order(np.arange(2 * small_run["train"]["global_batch"])).tolist()
    sums = np.fromfile(file, "<u4")
    assert [sums[part] for part in parts] == [zlib.crc32(rows.stored_rows(n, n + 1)) for n in range(len(parts))]


def test_all_phases_need_the_same_tokenizer(
    small_run: dict[str, Any], ours: Shards, documents: list[list[int]], tmp_path: Path
) -> None:
    write_megatron(tmp_path / "x", documents)
    path, other = f"megatron:{tmp_path}/x", tmp_path / "tokenizer.json"
    phases = [{"name": "one", "steps": 3}, {"name": "two", "steps": 3, "data": {"path": path, "tokenizer": str(other)}}]
    run = small_run | {"data": {"path": path, "tokenizer": str(ours.folder)}, "phases": phases}
    run["train"] = {key: value for key, value in run["train"].items() if key != "steps"}
    other.write_bytes(ours.tokenizer_path.read_bytes())
    TrainingData(load_config(run))
    other.write_bytes(ours.tokenizer_path.read_bytes() + b" ")
    with pytest.raises(UserError, match=r"x has two tokenizers, .*: give the same data\.tokenizer in all phases"):
        TrainingData(load_config(run))


# ---- Bad input ----


def cut(path: Path, by: int) -> None:
    path.write_bytes(path.read_bytes()[:-by])


def over(path: Path, at: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(bytes(content))


def over_border(index: Path, number: int, value: int) -> None:
    """Replaces a border of the documents in an index of Megatron-LM."""
    sequences, borders = struct.unpack("<QQ", index.read_bytes()[18:34])
    over(index, 34 + 12 * sequences + 8 * (number % borders), struct.pack("<q", value))


def entry(to: Path, **more: Any) -> None:
    """Replaces settings of the first shard in an index of MosaicML Streaming."""
    file = to / "x" / "index.json"
    index = json.loads(file.read_bytes())
    index["shards"][0].update(more)
    file.write_text(json.dumps(index), encoding="utf-8")


@pytest.mark.parametrize(
    ("form", "damage", "message"),
    [
        ("megatron", lambda to: cut(to / "x.idx", 4), r"x.idx has version 1 and .* it is truncated or damaged"),
        ("megatron", lambda to: cut(to / "x.idx", 1), "x.idx has version 1"),
        ("megatron", lambda to: (to / "x.idx").write_bytes(b"TNTIDX\x00\x00"), "x.idx is not an index of Megatron-LM"),
        (
            "megatron",
            lambda to: cut(to / "x.bin", 4),
            "x.bin has .* but x.idx describes .*: one of the two files is truncated",
        ),
        ("megatron", lambda to: cut(to / "x.bin", 1), "x.bin has .* bytes of tokens, which is not a multiple of 4"),
        ("megatron", lambda to: (to / "x.bin").unlink(), "x.bin does not exist: give the common path"),
        (
            "megatron",
            lambda to: over(to / "x.bin", 400, b"\xff\xff\xff\x7f"),
            r"x.bin, byte 400 has the token 2147483647",
        ),
        ("megatron", lambda to: over(to / "x.bin", 404, b"\xff\xff\xff\xff"), r"x.bin, byte 404 has the token -1"),
        (
            "megatron",
            lambda to: over(to / "x.idx", 34, b"\x01\x00\x00\x00"),
            "sequence 1 does not begin where sequence 0 ends",
        ),
        (
            "megatron",
            lambda to: over_border(to / "x.idx", 1, 1 << 40),
            "document [0-9] does not begin after the document",
        ),
        ("megatron", lambda to: over_border(to / "x.idx", 2, -5), "document [0-9] does not begin after the document"),
        ("megatron", lambda to: over_border(to / "x.idx", -1, 3), "x.idx: the documents do not cover all sequences"),
        ("megatron", lambda to: over_border(to / "x.idx", 0, 1), "x.idx: the documents do not cover all sequences"),
        ("npy", lambda to: cut(to / "x" / "part-1.npy", 1), "part-1.npy has .* is not a multiple of 2"),
        ("npy", lambda to: over(to / "x" / "part-0.npy", 50, b"\xff\xff"), r"part-0.npy, byte 50 has the token 65535"),
        ("npy", lambda to: [each.unlink() for each in (to / "x").iterdir()], "names no file: give a file, or a glob"),
        ("mds", lambda to: cut(to / "x" / "shard.00000.mds", 1), "its samples end at .*: get it again"),
        (
            "mds",
            lambda to: (to / "x" / "index.json").write_text("{}"),
            r"index.json is no index of .* \(no entry 'shards'\)",
        ),
        ("mds", lambda to: (to / "x" / "index.json").unlink(), "cannot read .*index.json"),
        (
            "mds zstd",
            lambda to: cut(to / "x" / "shard.00000.mds.zstd", 3),
            "damaged or truncated|its samples end at|samples, but",
        ),
        ("mds", lambda to: (to / "x" / "shard.00000.mds").unlink(), "cannot read .*shard.00000.mds"),
        ("mds", lambda to: (to / "x" / "shard.00000.mds").write_bytes(b""), "shard.00000.mds has 0 bytes, too few for"),
        (
            "mds",
            lambda to: (to / "x" / "shard.00000.mds").write_bytes(bytes(9)),
            "shard.00000.mds has 9 bytes, too few",
        ),
        ("mds", lambda to: entry(to, raw_data={"basename": "../x"}), r"index.json is no index .*'..' is not a plain"),
        ("mds", lambda to: entry(to, raw_data={"basename": "a//x"}), r"index.json is no index .*'' is not a plain"),
        ("mds", lambda to: entry(to, raw_data={"basename": "/x"}), r"index.json is no index .*'' is not a plain"),
        ("mds", lambda to: entry(to, samples=-1), "index.json is no index .* must be integers from 0"),
        ("mds", lambda to: entry(to, column_sizes=[10**30]), "index.json is no index .* must be integers from 0"),
        ("mds", lambda to: entry(to, column_sizes=[]), "index.json is no index .* for all columns"),
        ("mds", lambda to: entry(to, column_encodings=[]), "index.json is no index .* for all columns"),
        ("mds", lambda to: entry(to, column_encodings=[5]), "index.json is no index .* texts of one line"),
        ("mds", lambda to: entry(to, column_names=["a\nb"]), "index.json is no index .* texts of one line"),
        ("mds", lambda to: entry(to, format="a\nb"), "a shard has the format 'a.nb', without token ids"),
        (
            "mds",
            lambda to: entry(
                to, column_names=["a", "tokens"], column_encodings=["str", "bytes"], column_sizes=[1 << 31, 8]
            ),
            "the sizes of its samples do not fit its columns",
        ),
    ],
)
def test_bad_files_are_one_message(
    ours: Shards, documents: list[list[int]], tmp_path: Path, form: str, damage: Callable[[Path], Any], message: str
) -> None:
    path = FORMS[form](tmp_path, documents)
    damage(tmp_path)

    def read() -> None:
        rows = rows_of(path, ours, tmp_path)
        rows.stored_rows(0, rows.instances)

    with pytest.raises(UserError, match=message) as error:
        read()
    assert "\n" not in str(error.value)


def test_a_row_reads_a_small_part_of_the_index(ours: Shards, tmp_path: Path) -> None:
    """The tables of an index lie at odd bytes; NumPy would copy the whole tables for a search."""
    documents = 50_000
    write_megatron(tmp_path / "x", [[5, ours.eos_id]] * documents)
    rows = rows_of(f"megatron:{tmp_path}/x", ours, tmp_path)
    tracemalloc.start()
    try:
        rows.stored_rows(0, 1)
        assert tracemalloc.get_traced_memory()[1] < 8 * documents / 4
    finally:
        tracemalloc.stop()


def test_a_damaged_packed_shard_leaves_nothing(ours: Shards, documents: list[list[int]], tmp_path: Path) -> None:
    path = FORMS["mds zstd"](tmp_path, documents)
    cut(tmp_path / "x" / "shard.00000.mds.zstd", 3)
    with pytest.raises(UserError, match="damaged or truncated compressed file"):
        rows_of(path, ours, tmp_path)
    assert [each.name for each in (tmp_path / "cache").rglob("*") if each.is_file()] == [".shard.00000.mds.lock"]


@pytest.mark.parametrize("prefix", [".", "/"])
def test_a_prefix_without_a_name_is_one_message(ours: Shards, tmp_path: Path, prefix: str) -> None:
    with pytest.raises(UserError, match=r"\.idx does not exist: give the common path"):
        rows_of(f"megatron:{prefix}", ours, tmp_path)


@pytest.mark.parametrize("form", ["megatron", "npy"])
def test_tokens_beyond_the_vocabulary_are_found_before_the_run(
    ours: Shards, documents: list[list[int]], tmp_path: Path, form: str
) -> None:
    path = FORMS[form](tmp_path, documents)
    last = tmp_path / ("x.bin" if form == "megatron" else "x/part-2.npy")
    over(last, last.stat().st_size - 4, b"\xff\x7f\x00\x00")
    with pytest.raises(UserError, match=f"{last.name}, byte .* has the token 32767"):
        rows_of(path, ours, tmp_path)


def test_a_small_foreign_file_is_found_before_the_run(ours: Shards, tmp_path: Path) -> None:
    """OLMo-core's files have tables of documents beside them, which a glob may match."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a.npy").write_bytes(np.tile(np.array([5, ours.eos_id], "<u2"), 1 << 22).tobytes())
    (tmp_path / "x" / "a.zcsv").write_bytes(b"\x1f\x8b\x08\x00")
    (tmp_path / "x" / "b.npy").write_bytes(np.tile(np.array([5, ours.eos_id], "<u2"), 1 << 22).tobytes())
    with pytest.raises(UserError, match=r"a\.zcsv, byte 0 has the token"):
        rows_of(f"npy:{tmp_path}/x/*", ours, tmp_path)


def test_names_with_brackets(ours: Shards, documents: list[list[int]], tmp_path: Path) -> None:
    """An existing file counts as it is; a glob needs [[]."""
    write_npy(tmp_path / "v[1]", documents, files=1)
    for path in ("v[1]/part-0.npy", "v[[]1]/*.npy"):
        rows = rows_of(f"npy:{tmp_path}/{path}", ours, tmp_path)
        np.testing.assert_array_equal(rows.stored_rows(0, rows.instances), ours.rows(0, ours.instances))
    with pytest.raises(UserError, match=r"names no file: .* \(write \[\[\] for a bracket in a glob\)"):
        rows_of(f"npy:{tmp_path}/v[1]/*.npy", ours, tmp_path)


def test_a_colon_may_belong_to_a_url_or_to_a_folder(
    small_run: dict[str, Any], ours: Shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A URL may have one slash, since `Path` merges two; ./ marks a folder whose name has a colon."""
    for path in ("memory:/bucket/x", "s3:/bucket/x"):
        source = SourceConfig(path=path)
        assert (source.path, source.format) == (path.replace(":/", "://"), None)
    (tmp_path / "c4:v1").symlink_to(ours.folder)
    monkeypatch.chdir(tmp_path)
    data = TrainingData(load_config(small_run | {"data": {"path": "./c4:v1"}}))
    assert data.first_folder.instances == ours.instances
    with pytest.raises(UserError, match=r"names token files of the format c4: write ./c4:v1 for the folder"):
        TrainingData(load_config(small_run | {"data": {"path": "c4:v1"}}))


def test_another_tokenizer_is_refused(ours: Shards, documents: list[list[int]], tmp_path: Path) -> None:
    other = ours.vocab_size - 1
    plain = [[5 if token in (other, ours.eos_id) else token for token in document[:-1]] for document in documents]
    wrong = [[*document, other] for document in plain]
    without = [[token if token < other else 5 for token in document] for document in wrong]
    write_megatron(tmp_path / "x", wrong)
    with pytest.raises(
        UserError, match=f"documents end with the token {other}, but the end-of-text token of .* is {ours.eos_id}"
    ):
        rows_of(f"megatron:{tmp_path}/x", ours, tmp_path)
    write_npy(tmp_path / "y", without)
    with pytest.raises(
        UserError, match=f"tokens is the end-of-text token {ours.eos_id} of .*: give the tokenizer that made"
    ):
        rows_of(f"npy:{tmp_path}/y/*", ours, tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"path": "megatron:x"}, "data.tokenizer is missing: megatron:.*x has token ids alone"),
        ({"path": "c4:x"}, "token format 'c4' does not exist; valid: mds, megatron, npy"),
        ({"path": "{ours}", "tokenizer": "{ours}"}, "tokenizer applies to a dataset or to token files"),
        ({"path": "mds:{to}", "tokenizer": "{ours}"}, "cannot read .*index.json"),
        ({"path": "npy:{to}/short.npy", "tokenizer": "{ours}"}, "has 4 tokens, fewer than one sequence of 32"),
    ],
)
def test_bad_settings_are_one_message(
    small_run: dict[str, Any], ours: Shards, tmp_path: Path, data: dict[str, str], message: str
) -> None:
    (tmp_path / "short.npy").write_bytes(bytes(8))
    data = {key: value.format(ours=ours.folder, to=tmp_path) for key, value in data.items()}
    with pytest.raises(UserError, match=message):
        optimus.train(small_run | {"data": data})
