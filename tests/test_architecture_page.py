"""The pictures of docs/architecture.md name functions that exist, in the order and nesting in which runs call them."""

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import yaml

from helpers.trained import train_here
from optimus import api
from optimus.config import load_config
from optimus.launch import here
from optimus.testing import run_ranks

ROOT = Path(__file__).resolve().parents[1]
_spec = spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
assert _spec is not None
assert _spec.loader is not None
pictures = module_from_spec(_spec)
sys.modules["pictures"] = pictures  # its rows are a class, which looks for its module
_spec.loader.exec_module(pictures)

NAMES = {name: [(row.module, row.function) for row in rows] for name, (_, rows) in pictures.PICTURES.items()}
Name = tuple[str, str]


def function_of(name: Name) -> Callable[..., Any]:
    """Returns the function of a row, without decorators."""
    module, path = name
    found = reduce(getattr, path.split("."), importlib.import_module(f"optimus.{module}"))
    unwrapped: Callable[..., Any] = inspect.unwrap(found)
    return unwrapped


@contextmanager
def tracing(names: Sequence[Name], until: str, begin: int = 1) -> Iterator[list[tuple[Name, Name | None]]]:
    """Yields a list of the functions called inside the block: each once, at its first call, with the nearest of the
    others that has called it.

    The list begins at the call number `begin` of the first name, and ends after the function `until` has begun, or at
    the next call of the first name.
    """
    codes: dict[CodeType, Name] = {function_of(name).__code__: name for name in names}
    found: list[tuple[Name, Name | None]] = []
    begun, ended = 0, False

    def profile(frame: Any, event: str, _argument: Any) -> None:
        nonlocal begun, ended
        name = codes.get(frame.f_code)
        if event != "call" or name is None or ended:
            return
        begun += name == names[0]
        ended = begun > begin
        if begun != begin or name in [each for each, _ in found]:
            return
        above = frame.f_back
        while above is not None and above.f_code not in codes:
            above = above.f_back
        found.append((name, None if above is None else codes[above.f_code]))
        ended = name[1] == until

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(before)


def drawn(rows: Sequence[Any]) -> list[tuple[Name, Name | None]]:
    """Returns the rows as `tracing` finds them, each with the row that it is below."""
    found: list[tuple[Name, Name | None]] = []
    for number, row in enumerate(rows):
        above = [each for each in rows[:number] if each.depth == row.depth - 1]
        found.append(((row.module, row.function), (above[-1].module, above[-1].function) if above else None))
    return found


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A small run whose steps are clipped from the first one."""
    monkeypatch.chdir(tmp_path)
    lines = "".join(f"line {number} says {number**2 % 1000}\n" for number in range(2000))
    (tmp_path / "some.txt").write_text(lines, encoding="utf-8")
    api.prepare(["some.txt"], "data", train_tokenizer=300, context=32, workers=1)
    return {
        "model": {"family": "olmo2", "hidden": 32, "layers": 2, "heads": 2, "intermediate": 64, "vocab": 300},
        "data": {"path": "data"},
        "train": {"output": "run", "steps": 2, "global_batch": 8, "micro_batch": 2, "sequence_length": 32},
        "optimizer": {"clip_during_warmup": True},
        "state": {"shard": "optimizer"},
        "lr_schedule": {"warmup_steps": 1},
    }


def test_a_start_is_drawn_as_it_is_called(config: dict[str, Any]) -> None:
    rows = [row for row in pictures.START if not row.several]
    with tracing([name for name, _ in drawn(rows)], until="training_step") as found:
        api.train(config)
    assert found == drawn(rows)


def test_several_ranks_are_started_where_the_picture_says() -> None:
    """The call that a run on one rank does not make stands in the source between its neighbours."""
    (number,) = [number for number, row in enumerate(pictures.START) if row.several]
    before, row = pictures.START[number - 1 : number + 1]
    assert row.module == "launch.local"
    assert here.start_ranks is function_of((row.module, row.function))
    source = inspect.getsource(here.train_or_check)
    assert 0 < source.index(f" {before.function}(") < source.index(f" {row.function}(")


def traced_step(text: str, names: Sequence[Name]) -> list[tuple[Name, Name | None]]:
    """Trains on this rank; returns the calls of the second step, whose parameters the first one has gathered."""
    with tracing(names, until="", begin=2) as found:
        train_here(load_config(yaml.safe_load(text)))
    return found


def test_a_step_is_drawn_as_it_is_called(config: dict[str, Any]) -> None:
    for found in run_ranks(traced_step, 2, yaml.safe_dump(config), NAMES["step.svg"]):
        assert found == drawn(pictures.STEP)


@pytest.mark.parametrize("name", NAMES)
def test_the_pictures_are_those_of_the_lists(name: str) -> None:
    title, rows = pictures.PICTURES[name]
    text = (ROOT / "docs" / "figures" / name).read_text(encoding="utf-8")
    assert text == pictures.picture(title, rows), "run `python docs/generate.py`"
    assert re.findall(r'class="name"[^>]*>([^<]+)<', text) == [function for _, function in NAMES[name]]
    assert f"figures/{name}" in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text


def imports(package: str) -> set[str]:
    """Returns the other packages that the modules of a package import anywhere, without `config`."""
    found = set()
    for path in (ROOT / "optimus" / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "optimus":
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("optimus."):
                found.add(str(node.module).split(".")[1])
    return {each for each in found if (ROOT / "optimus" / each).is_dir()} - {package, "config"}


def test_the_table_of_packages_has_the_imports_of_the_code() -> None:
    """A cell names all imports, or stands for the packages in the rows below it, but for those that it names."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)/` \| .* \| ([^|]*) \|$", page, re.MULTILINE)
    packages = [package for package, _ in rows]
    assert len(packages) > 20
    for number, (package, said) in enumerate(rows):
        named = {each for each in re.findall(r"`(\w+)`", said) if each in packages}
        if said == "everything":
            continue
        if said.startswith("everything below"):
            assert imports(package) <= set(packages[number + 1 :]) - named | {"testing"}, package
        else:
            assert imports(package) == named, package
