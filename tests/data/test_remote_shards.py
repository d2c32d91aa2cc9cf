"""Prepared data at URLs: fsspec's memory file system, and a local web server."""

import copy
import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import optimus
from optimus.data.preparation import prepare
from optimus.data.remote import RemoteFolder
from optimus.data.shards import Shards
from optimus.errors import UserError
from optimus.observe.metrics import read_metrics


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of prepared data in several shards."""
    folder = tmp_path_factory.mktemp("prepared") / "data"
    sources = Path(__file__).resolve().parents[2] / "optimus" / "config"
    prepare([sources], folder, train_tokenizer=300, context=32, workers=1, shard_size=20_000)
    assert len(Shards(folder).index["shards"]) > 3
    return folder


@pytest.fixture
def memory(local: Path) -> Iterator[str]:
    system = fsspec.filesystem("memory")
    system.put(str(local), "/prepared", recursive=True)
    yield "memory://prepared"
    system.rm("/prepared", recursive=True)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def web(local: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(local))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("place", ["memory", "web"])
def test_rows_are_those_of_the_folder(place: str, local: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Rows from a URL equal those of the folder. Each used shard, and the shard after it, is fetched once."""
    there, here = Shards(request.getfixturevalue(place), tmp_path), Shards(local)
    assert (there.index, there.instances, there.eos_id) == (here.index, here.instances, here.eos_id)
    first = here.index["shards"][0]["instances"]
    assert np.array_equal(there.rows(0, first), here.rows(0, first))
    there._fetched[1].result()
    assert len(list(there.folder.glob("*.npy"))) == 3  # two shards and the checksums
    assert np.array_equal(there.rows(0, there.instances), here.rows(0, here.instances))
    times = {path: path.stat().st_mtime_ns for path in there.folder.glob("*.npy")}
    again = Shards(request.getfixturevalue(place), tmp_path)
    again.verify()
    assert times == {path: path.stat().st_mtime_ns for path in again.folder.glob("*.npy")}


def test_a_run_is_that_of_the_folder(memory: str, local: Path, small_run: dict[str, Any], tmp_path: Path) -> None:
    """Losses from a URL equal those from the folder bit for bit, in training and validation. Changed content at the URL
    gets a new cache folder."""
    small_run["train"] |= {"precision": "float32", "data_cache": str(tmp_path / "cache")}
    runs = []
    for number, path in enumerate((str(local), memory)):
        run = copy.deepcopy(small_run)
        run["data"], run["train"]["output"] = {"path": path}, str(tmp_path / f"run-{number}")
        run["validation"] = [{"name": "rows", "path": path, "tokens": 64}]
        optimus.train(run)
        runs.append([(each["loss"], each.get("loss/rows")) for each in read_metrics(tmp_path / f"run-{number}")])
    assert runs[0] == runs[1]
    assert runs[0][-1][1] is not None
    (cached,) = (tmp_path / "cache").iterdir()
    with fsspec.open("memory://prepared/index.json", "ab") as file:
        file.write(b"\n")
    assert Shards(memory, tmp_path / "cache").folder != cached


def test_what_cannot_be_read_is_one_message(memory: str, web: str, tmp_path: Path, small_run: dict[str, Any]) -> None:
    def refused(url: str, expected: str) -> None:
        with pytest.raises(UserError, match=expected):
            Shards(url, tmp_path).rows(0, 1)

    refused("http://127.0.0.1:9/data", r"cannot read http://127.0.0.1:9/data/index.json: .*Check the URL, the network")
    refused("memory://nowhere", r"cannot read memory://nowhere/index.json: .*Check the URL")
    refused(f"{web}/nowhere", r"cannot read http://.*/nowhere/index.json")
    refused("nofs://data", r"cannot read nofs://data/index.json: Protocol not known")
    small_run["data"] = {"path": "memory://nowhere"}
    with pytest.raises(UserError, match=r"cannot read memory://nowhere/index.json"):
        optimus.train(small_run)
    name = Shards(memory, tmp_path).index["shards"][0]["file"]
    system = fsspec.filesystem("memory")
    whole = system.cat_file(f"/prepared/{name}")
    system.pipe_file(f"/prepared/{name}", whole[:-1] + bytes([whole[-1] ^ 1]))
    refused(memory, rf"memory://prepared/{name} is corrupted: its checksum differs from index.json")
    system.pipe_file(f"/prepared/{name}", whole)
    assert len(Shards(memory, tmp_path).rows(0, 1)) == 1  # the damaged copy is removed
    system.rm(f"/prepared/{name}")
    with pytest.raises(UserError, match=rf"cannot read memory://prepared/{name}: "):
        Shards(memory, tmp_path / "other").rows(0, 1)


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("absolute", [True, False])
def test_nothing_outside_of_the_cache_is_touched(
    memory: str, local: Path, tmp_path: Path, there: bool, absolute: bool
) -> None:
    """An `index.json` that names a file outside the cache is refused; the file is neither deleted nor written."""
    shard, other = local / Shards(local).index["shards"][0]["file"], tmp_path / "other.npy"
    content = shard.read_bytes()
    if there:
        other.write_bytes(content)
    index = json.loads((local / "index.json").read_bytes())
    index["shards"][0] |= {"file": str(other) if absolute else "../../other.npy", "sha256": "0" * 64}
    system = fsspec.filesystem("memory")
    system.pipe_file("/prepared/index.json", json.dumps(index).encode())
    system.pipe_file("/other.npy", content)
    with pytest.raises(UserError, match=r"index\.json is damaged \('.*other\.npy' is not a plain file name"):
        Shards(memory, tmp_path / "cache").verify()
    assert (other.read_bytes() == content) if there else not other.exists()
    folder = RemoteFolder(memory, tmp_path / "cache", "index.json")
    for touch in (folder.fetch, folder.forget):
        with pytest.raises(ValueError, match="not a plain file name"):
            touch(index["shards"][0]["file"])


def test_a_shard_that_could_not_be_fetched_is_fetched_again(
    memory: str, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards, fetch, tried = Shards(memory, tmp_path), RemoteFolder.fetch, list[str]()

    def fails_once(self: RemoteFolder, name: str) -> Path:
        tried.append(name)
        if tried.count(name) == 1:
            raise UserError(f"{name}: the network is gone")
        return fetch(self, name)

    monkeypatch.setattr(RemoteFolder, "fetch", fails_once)
    with pytest.raises(UserError, match="the network is gone"):
        shards.row(0)
    assert (shards.row(0) == Shards(local).row(0)).all()


def test_a_shard_that_is_damaged_in_the_cache_is_fetched_again(memory: str, local: Path, tmp_path: Path) -> None:
    shards = Shards(memory, tmp_path)
    expected, copied = shards.row(0), shards.folder / shards.index["shards"][0]["file"]
    copied.write_bytes(copied.read_bytes()[:-1] + b"\xff")
    with pytest.raises(UserError, match="is corrupted"):
        shards.verify()
    assert (shards.row(0) == expected).all()
    shards.verify()
