"""An opened folder returns the written data, and detects missing, damaged and changed files."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from optimus.data import tokenizer as tokenizers
from optimus.data.shards import Shards
from optimus.errors import UserError


def test_rows(prepared: Path) -> None:
    shards = Shards(prepared)
    arrays = [np.load(prepared / entry["file"]) for entry in shards.index["shards"]]
    everything = np.concatenate(arrays)
    first = len(arrays[0])
    assert shards.instances == len(everything)
    assert (shards.context, shards.vocab_size, shards.eos_id) == (64, 600, 0)
    assert np.array_equal(shards.row(first), everything[first])
    for start, stop in ((0, 1), (0, first), (first - 2, first + 3), (0, len(everything))):
        assert np.array_equal(shards.rows(start, stop), everything[start:stop])
    with pytest.raises(IndexError):
        shards.rows(0, len(everything) + 1)
    shards.verify()


def test_check_model(prepared: Path) -> None:
    shards = Shards(prepared)
    shards.check_model(context=64, vocab_size=600)
    with pytest.raises(UserError, match=r"prepared with context 64, but the run needs 128"):
        shards.check_model(context=128, vocab_size=600)
    with pytest.raises(UserError, match=r"has 600 tokens, but the model's vocabulary only 512"):
        shards.check_model(context=64, vocab_size=512)


def test_missing_shard(copy: Path) -> None:
    (copy / "shard-00001.npy").unlink()
    with pytest.raises(UserError, match=r"shard-00001\.npy is missing, though index\.json lists it"):
        Shards(copy)


@pytest.mark.parametrize("left", [0, 50, 5000])
def test_truncated_shard(copy: Path, left: int) -> None:
    path = copy / "shard-00001.npy"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(UserError, match=r"shard-00001\.npy is truncated or damaged"):
        Shards(copy)


@pytest.mark.parametrize("name", ["shard-00001.npy", "sums.npy"])
def test_a_file_that_is_truncated_after_it_was_opened(copy: Path, name: str) -> None:
    """Reading a mapped file behind its end would kill the process (SIGBUS)."""
    shards = Shards(copy)
    size = (copy / name).stat().st_size
    os.truncate(copy / name, 300)
    with pytest.raises(UserError, match=rf"{name} has 300 bytes, but {size:,} when it was opened: .* Restore it$"):
        shards.rows(0, shards.instances)


def test_shard_of_another_shape(copy: Path) -> None:
    np.save(copy / "shard-00001.npy", np.zeros((3, 64), dtype=np.uint16))
    with pytest.raises(UserError, match=r"shard-00001\.npy contains uint16 of shape \(3, 64\), but index\.json says"):
        Shards(copy)


@pytest.mark.parametrize("sums", [True, False])
def test_corrupted_shard_is_noticed(copy: Path, sums: bool) -> None:
    """Instance checksums detect the damage when the instance is read; without them, the first use of the shard does."""
    path = copy / "shard-00001.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    if not sums:
        forget_sums(copy)
    shards = Shards(copy)
    first, count = (entry["instances"] for entry in shards.index["shards"][:2])
    shards.rows(0, first)
    last = first + count - 1
    start, stop = (last - 1, last + 2) if sums else (first - 1, first + 1)
    for _ in range(2):
        with pytest.raises(UserError, match=r"shard-00001\.npy is corrupted: its checksum differs"):
            shards.rows(start, stop)
    with pytest.raises(UserError, match=r"shard-00001\.npy is corrupted"):
        shards.verify()


def forget_sums(folder: Path) -> None:
    """Removes the instance checksums, as in folders that an earlier `prepare` wrote."""
    index = json.loads((folder / "index.json").read_bytes())
    (folder / index.pop("sums")).unlink()
    (folder / "index.json").write_text(json.dumps(index))


def test_wrong_sums(copy: Path) -> None:
    path = copy / "sums.npy"
    sums = np.load(path)
    assert len(sums) == Shards(copy).instances
    sums[3] ^= 1
    np.save(path, sums)
    with pytest.raises(UserError, match=r"differs from sums\.npy at instance 3"):
        Shards(copy).verify()
    np.save(path, sums[1:])
    with pytest.raises(UserError, match=r"sums\.npy contains uint32 of shape"):
        Shards(copy)
    path.unlink()
    with pytest.raises(UserError, match=r"sums\.npy is missing, though index\.json lists it"):
        Shards(copy)


def test_changed_or_missing_tokenizer(copy: Path) -> None:
    path = copy / "tokenizer.json"
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(UserError, match=r"tokenizer changed since prepare: .*tokenizer\.json"):
        Shards(copy)
    path.unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json is missing"):
        Shards(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": None}, r"index\.json is damaged \(no entry 'context'\)"),
        ({"instances": 5}, r"index\.json is damaged \(the instances of the shards do not add up\)"),
        ({"dtype": "<f4"}, r"index\.json is damaged \(unknown dtype"),
        ({"format": "other"}, r"index\.json is damaged \(its format is 'other'"),
        (
            {"sums": "../sums.npy"},
            r"index\.json is damaged \(its checksums are in '\.\./sums\.npy', not in 'sums\.npy'",
        ),
        ({"settings": "none"}, r"index\.json is damaged"),
        ({"masked": 1}, r"index\.json is damaged \(masked and parse_special must be true or false"),
        ({"chat": {"template": "a", "tokens": []}}, r"index\.json is damaged \(the tokens of chat must be an object"),
        ({"tokens": None}, r"index\.json is damaged \(no entry 'tokens'"),
        ({"dropped_tokens": "3"}, r"index\.json is damaged \(numbers of tokens must be integers"),
        ({"tokenizer": {"vocab_size": 5, "eos_id": 5, "sha256": ""}}, r"eos_id less than vocab_size"),
        ({"tokenizer": {"vocab_size": 5, "eos_id": 1}}, r"no entry 'sha256'"),
        ({"version": 9}, r"index\.json has version 9; this Optimus reads version 1"),
    ],
)
def test_damaged_index(copy: Path, change: dict[str, object], message: str) -> None:
    index = {**json.loads((copy / "index.json").read_bytes()), **change}
    (copy / "index.json").write_text(json.dumps({key: value for key, value in index.items() if value is not None}))
    with pytest.raises(UserError, match=message):
        Shards(copy)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"file": "../copy/shard-00000.npy"}, r"'\.\./copy/shard-00000\.npy' is not a plain file name"),
        ({"instances": -1}, "context and instances must be positive"),
        ({"instances": True}, "context and instances must be positive"),
    ],
)
def test_a_shard_that_cannot_be(copy: Path, entry: dict[str, object], message: str) -> None:
    index = json.loads((copy / "index.json").read_bytes())
    first, second, *_ = index["shards"]
    second["instances"] += first["instances"] - int(entry.get("instances", first["instances"]))  # keeps the total
    first |= entry
    (copy / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=rf"index\.json is damaged \({message}"):
        Shards(copy)


def rewritten(folder: Path, write: Callable[[Path], None]) -> None:
    """Rewrites the second shard by `write`, and updates its checksum."""
    write(folder / "shard-00001.npy")
    index = json.loads((folder / "index.json").read_bytes())
    index["shards"][1]["sha256"] = tokenizers.file_sha256(folder / "shard-00001.npy")
    (folder / "index.json").write_text(json.dumps(index))


def test_what_others_have_written_as_a_shard(copy: Path) -> None:
    """Files that NumPy could load, but that are no valid shard, are refused: Fortran order, an archive, half a header."""
    forget_sums(copy)
    array = np.load(copy / "shard-00001.npy")

    def archive(path: Path) -> None:
        with path.open("wb") as file:
            np.savez(file, array)

    def with_half_a_header(path: Path) -> None:
        path.write_bytes(path.read_bytes().replace(b"(", b"[", 1))

    writers: list[Callable[[Path], None]] = [
        lambda path: np.save(path, np.asfortranarray(array)),
        archive,
        with_half_a_header,
    ]
    for write in writers:
        rewritten(copy, write)
        with pytest.raises(UserError, match=r"shard-00001\.npy is truncated or damaged"):
            Shards(copy)
    array[2, 3] = 600
    rewritten(copy, lambda path: np.save(path, array))
    shards = Shards(copy)
    first = shards.index["shards"][0]["instances"]
    shards.rows(first, first + 2)
    with pytest.raises(UserError, match=r"shard-00001\.npy contains the token 600, but the vocabulary has \d+ tokens"):
        shards.rows(first, first + 3)


def test_no_index(copy: Path) -> None:
    (copy / "index.json").write_text("{")
    with pytest.raises(UserError, match=r"index\.json is damaged"):
        Shards(copy)
    (copy / "index.json").unlink()
    with pytest.raises(UserError, match=r"is not a folder of prepared data: it has no index\.json"):
        Shards(copy)
