"""Inputs from fsspec's memory file system and from a local web server."""

import gzip
import json
import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from optimus.data import documents, remote, stream_writer
from optimus.data.files import resolve
from optimus.data.preparation import prepare
from optimus.errors import UserError


@pytest.fixture
def local(tmp_path: Path, sources: list[str]) -> Path:
    """A folder with every kind of file."""
    folder = tmp_path / "texts"
    (folder / "more").mkdir(parents=True)
    (folder / "a.txt").write_text(sources[0], encoding="utf-8")
    (folder / "b.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in sources[1:4]).encode())
    )
    pq.write_table(pa.table({"text": sources[4:6]}), folder / "more" / "c.parquet")
    (folder / "more" / ".hidden.txt").write_text("not me")
    (folder / "more" / "d.jpg").write_text("nor me")
    return folder


@pytest.fixture
def memory(local: Path) -> Iterator[str]:
    system = fsspec.filesystem("memory")
    system.put(str(local), "/texts", recursive=True)
    yield "memory://texts"
    system.rm("/texts", recursive=True)


class Ranges(SimpleHTTPRequestHandler):
    """Serves byte ranges, as data servers do."""

    ranges = True

    def do_GET(self) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if not self.ranges or asked is None or not path.is_file():
            super().do_GET()
            return
        data = path.read_bytes()
        part = data[int(asked[1]) : int(asked[2] or len(data)) + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {asked[1]}-{int(asked[1]) + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(local: Path) -> Iterator[ThreadingHTTPServer]:
    handler = type("Handler", (Ranges,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(local))) as server:
        server.handler = handler  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def url(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.npy")}


def test_the_same_shards_from_every_file_system(
    tmp_path: Path, local: Path, memory: str, server: ThreadingHTTPServer, tokenizer_file: Path
) -> None:
    given: dict[str, Any] = {"tokenizer": tokenizer_file, "context": 32, "workers": 1}
    index = prepare([local], tmp_path / "local", **given)
    files = [f"{url(server)}/{name}" for name in ("a.txt", "b.jsonl.gz", "more/c.parquet")]
    for name, inputs in {
        "folder": [memory],
        "globs": [f"{memory}/*.*", f"{memory}/**/*.parquet"],
        "http": files,
    }.items():
        found = prepare(inputs, tmp_path / name, **given)
        assert shards(tmp_path / name) == shards(tmp_path / "local")
        assert found["text_bytes"] == index["text_bytes"]
        if name == "folder":
            assert found["skipped_by_ending"] == index["skipped_by_ending"] == {".jpg": 1}
    names = [source.name for source in resolve([memory]).files]
    assert names == ["a.txt", "b.jsonl.gz", "more/c.parquet"]
    names = [source.name for source in resolve([f"{memory}/mor?/*.parquet"]).files]
    assert names == ["more/c.parquet"]


def test_resumes_within_a_remote_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str, tokenizer_file: Path
) -> None:
    monkeypatch.setattr(documents, "BLOCK", 5000)
    monkeypatch.setattr(stream_writer, "COMMIT_SECONDS", 0.0)
    given: dict[str, Any] = {"tokenizer": tokenizer_file, "context": 32, "workers": 1}
    prepare([f"{memory}/b.jsonl.gz"], tmp_path / "whole", **given)
    seen = []

    def interrupt(stage: str, done: int, total: int | None) -> None:
        seen.append(done)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([f"{memory}/b.jsonl.gz"], tmp_path / "out", progress=interrupt, **given)
    assert json.loads((tmp_path / "out.partial" / "journal.json").read_text())["mark"]["position"][1] > 0
    prepare([f"{memory}/b.jsonl.gz"], tmp_path / "out", **given)
    assert shards(tmp_path / "out") == shards(tmp_path / "whole")
    before = resolve([memory]).identity_digests
    with fsspec.open(f"{memory}/a.txt", "w") as file:
        file.write("another text")
    after = resolve([memory]).identity_digests
    assert before[1] != after[1]


def test_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str, server: ThreadingHTTPServer, tokenizer_file: Path
) -> None:
    closed = url(server)
    for wrong, message in (
        (f"{memory}/absent", "cannot read memory://texts/absent: no file found"),
        (f"{memory}/*.pdf", "no file found"),
        (f"{memory}/mor*", r"cannot read memory://texts/mor\*: no file found"),  # a folder
        (f"{memory}/more/.hid*", "no file found"),
        ("nowhere://a/b.txt", "cannot read nowhere://a/b.txt: Protocol not known"),
        (f"{closed}/absent.txt", "cannot read .*/absent.txt"),
        ("http://127.0.0.1:9/a.txt", "cannot read http://127.0.0.1:9/a.txt"),
    ):
        with pytest.raises(UserError, match=message):
            resolve([wrong])
    monkeypatch.setattr(remote, "_READ", 1000)  # a whole file would fit into one block
    server.handler.ranges = False  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"its server does not support range requests. Download the file"):
        prepare([f"{closed}/more/c.parquet"], tmp_path / "out", tokenizer=tokenizer_file, context=8, workers=1)


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(url: str) -> Any:
        raise ImportError("HTTPFileSystem requires requests and aiohttp to be installed")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(UserError, match=r"requires requests and aiohttp .*remote"):
        list(remote.expand("https://example.org/a.txt", (".txt",)))
