"""Small inputs for the tests of `optimus.data`: a tokenizer, and documents made of the standard library's sources."""

import gzip
import json
import sysconfig
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from optimus.data import preparation, streams, tokenizer
from optimus.data.inspection import Look
from optimus.data.preparation import prepare
from optimus.errors import UserError


class Here:
    """Stands in for helper processes, which take a second to start."""

    def __init__(self, count: int, threads: int = 1) -> None:
        self.count = count

    def serving(self, make: Callable[..., Callable[..., Any]], *args: Any) -> "ServedHere":
        return ServedHere(self.count, make(*args))

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class ServedHere:
    """Stands in for a function that helper processes serve."""

    def __init__(self, count: int, serve: Callable[..., Any]) -> None:
        self.count, self._serve = count, serve

    def submit(self, *args: Any) -> "Future[Any]":
        future = Future[Any]()
        try:
            future.set_result(self._serve(*args))
        except (UserError, OSError) as error:
            future.set_exception(error)
        return future


@pytest.fixture
def no_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `prepare` work in this process alone."""
    monkeypatch.setattr(preparation, "Helpers", Here)
    monkeypatch.setattr(streams, "Helpers", Here)


@pytest.fixture(scope="session")
def sources() -> list[str]:
    """Source files of the standard library, of some tens of KB each."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = ("argparse", "ast", "bdb", "calendar", "cgitb", "codecs", "copy", "csv", "dis", "heapq", "shutil", "types")
    return [path.read_text(encoding="utf-8") for name in names if (path := folder / f"{name}.py").exists()]


@pytest.fixture(scope="session")
def tokenizer_file(sources: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.train(sources, 600, path)
    return path


@pytest.fixture(scope="session")
def encode(tokenizer_file: Path) -> Callable[[str], list[int]]:
    """A function from text to token ids, by the tokenizers library."""
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(tokenizer_file))
    return lambda text: list(library.encode(text).ids)


@pytest.fixture
def lines_file(tmp_path: Path, sources: list[str]) -> Path:
    """A compressed JSON lines file of a few hundred documents of about 1 KB."""
    path = tmp_path / "documents.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for source in sources:
            for start in range(0, len(source), 1000):
                file.write(json.dumps({"text": source[start : start + 1000], "id": start}) + "\n")
    return path


@pytest.fixture(scope="session")
def prepared(sources: list[str], tokenizer_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder of several shards. Tests must not change the folder."""
    folder = tmp_path_factory.mktemp("prepared")
    for number, source in enumerate(sources):
        (folder / f"{number}.txt").write_text(source, encoding="utf-8")
    prepare([folder], folder / "data", tokenizer=tokenizer_file, context=64, seed=3, workers=1, shard_size=30_000)
    return folder / "data"


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    """A copy of the prepared folder that tests may damage."""
    import shutil

    return Path(shutil.copytree(prepared, tmp_path / "copy"))


@pytest.fixture
def stages() -> Any:
    """A progress callback that records the reported stages in `stages.seen`."""

    class Stages:
        def __init__(self) -> None:
            self.seen: set[str] = set()

        def __call__(self, stage: str, done: int, total: int | None) -> None:
            assert total is None or 0 <= done <= total
            self.seen.add(stage)

    return Stages()


@pytest.fixture
def no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the quick inspection of inputs find nothing, as if errors came late in a file."""
    monkeypatch.setattr(streams, "look", lambda text_field, whole, source: Look(None, True))
