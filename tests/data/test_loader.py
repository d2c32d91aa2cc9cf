"""The loader gives each rank its part of every global batch, from any first step, and reads ahead."""

import gc
import threading
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from optimus.data.loader import TokenLoader
from optimus.data.shards import Shards
from optimus.data.training import DataPhase
from optimus.errors import UserError


def loader_of(shards: Shards, global_batch: int, **settings: int) -> TokenLoader:
    """Returns a loader of one source from the start."""
    return TokenLoader([DataPhase.from_shards(shards, global_batch)], **settings)


def rows(loader: TokenLoader, step: int) -> np.ndarray:
    """Returns the rows of the loader's only source that a step reads."""
    phase, positions = loader.positions(step)
    found, parts = phase.sources[0].rows(phase.mixture.locate(positions)[1], loader._seed)
    assert not parts.any()
    return found


def take(shards: Shards, count: int, **settings: int) -> list[np.ndarray]:
    with loader_of(shards, **settings) as loader:
        return [batch.tokens_BS for batch in islice(loader, count)]


def threads() -> int:
    return sum(thread.name.startswith("token-loader") for thread in threading.enumerate())


def test_first_epoch_is_the_stored_order(prepared: Path) -> None:
    shards = Shards(prepared)
    batches = take(shards, 20, global_batch=48)
    assert {batch.dtype for batch in batches} == {np.dtype(np.int64)}
    assert np.array_equal(np.concatenate(batches), shards.rows(0, 20 * 48))


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_partition_every_global_batch(prepared: Path, ranks: int) -> None:
    shards = Shards(prepared)
    start = shards.instances // 24 - 2  # continues into the second epoch
    whole = take(shards, 5, global_batch=24, start_step=start, seed=5)
    parts = [take(shards, 5, global_batch=24, rank=r, ranks=ranks, start_step=start, seed=5) for r in range(ranks)]
    for step in range(5):
        assert np.array_equal(np.concatenate([part[step] for part in parts]), whole[step])


def test_resumes_exactly_from_a_step(prepared: Path) -> None:
    shards = Shards(prepared)
    steps = 3 * shards.instances // 100
    whole = take(shards, steps, global_batch=100, seed=1)
    for start in (1, steps // 3, steps - 4):
        resumed = take(shards, 4, global_batch=100, seed=1, start_step=start)
        assert all(np.array_equal(a, b) for a, b in zip(resumed, whole[start:]))


def test_every_epoch_holds_every_instance_once_in_a_new_order(prepared: Path) -> None:
    shards = Shards(prepared)
    n = shards.instances
    with loader_of(shards, global_batch=7, seed=2) as loader, loader_of(shards, global_batch=7, seed=3) as other:
        steps = 3 * n // 7 + 1
        found = np.concatenate([rows(loader, step) for step in range(steps)])
        others = np.concatenate([rows(other, step) for step in range(steps)])
    epochs = [found[epoch * n : (epoch + 1) * n] for epoch in range(3)]
    assert np.array_equal(epochs[0], np.arange(n))
    for epoch in epochs[1:]:
        assert np.array_equal(np.sort(epoch), np.arange(n))
        assert (epoch == np.arange(n)).mean() < 0.05
    assert (epochs[1] == epochs[2]).mean() < 0.05
    assert (others[n : 2 * n] == epochs[1]).mean() < 0.05


def test_a_batch_across_the_end_of_an_epoch(prepared: Path) -> None:
    shards = Shards(prepared)
    size = shards.instances - 3
    with loader_of(shards, global_batch=size) as loader:
        second = rows(loader, 1)
        next(loader)
        batch = next(loader).tokens_BS
    assert second[:3].tolist() == [size, size + 1, size + 2]
    assert np.array_equal(batch, np.stack([shards.row(int(row)) for row in second]))


def test_a_batch_larger_than_the_data(prepared: Path) -> None:
    shards = Shards(prepared)
    batch = take(shards, 1, global_batch=2 * shards.instances)[0]
    assert np.array_equal(batch[: shards.instances], shards.rows(0, shards.instances))
    assert sorted(map(bytes, batch[: shards.instances])) == sorted(map(bytes, batch[shards.instances :]))


def test_reads_ahead_and_no_further(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = Shards(prepared)
    read: list[int] = []
    original = shards.stored_rows
    monkeypatch.setattr(shards, "stored_rows", lambda start, stop: read.append(start) or original(start, stop))
    with loader_of(shards, global_batch=4) as loader:
        next(loader)
        time.sleep(0.3)
        ahead = len(read)
        time.sleep(0.3)
        assert 3 <= ahead == len(read) <= 7
        assert loader.step == 1


def test_a_failure_of_the_reader_reaches_the_consumer(copy: Path) -> None:
    path = copy / "shard-00001.npy"
    data = bytearray(path.read_bytes())
    data[130] ^= 1  # in the shard's first instance
    path.write_bytes(data)
    shards = Shards(copy)
    good = shards.index["shards"][0]["instances"] // 10
    loader = loader_of(shards, global_batch=10)
    assert len(list(islice(loader, good))) == good
    with pytest.raises(UserError, match=r"shard-00001\.npy is corrupted"):
        next(loader)
    assert list(loader) == []
    assert threads() == 0


def test_threads_end(prepared: Path) -> None:
    loader = loader_of(Shards(prepared), global_batch=4)
    next(loader)
    assert threads() == 1
    loader.close()
    assert threads() == 0
    assert list(loader) == []
    dropped = loader_of(Shards(prepared), global_batch=4)
    del dropped
    gc.collect()
    time.sleep(0.6)
    assert threads() == 0


def test_a_later_epoch_begins_without_reading_all_shards(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The instances of a later epoch are spread over all shards, so the loader checks no checksums of whole shards."""
    shards = Shards(prepared)
    hashed: list[Path] = []
    monkeypatch.setattr("optimus.data.tokenizer.file_sha256", hashed.append)
    take(shards, 1, global_batch=16, start_step=shards.instances // 16 + 1)
    assert hashed == []


def test_batch_must_divide(prepared: Path) -> None:
    with pytest.raises(UserError, match="a global batch of 10 cannot be divided evenly among 4 data-parallel ranks"):
        loader_of(Shards(prepared), global_batch=10, ranks=4)
