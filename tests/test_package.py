"""The contents of `import optimus`, as seen by `dir`, `help`, type checkers and scripts."""

import ast
import importlib
import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest

import optimus
import optimus.evaluation

ROOT = Path(__file__).resolve().parents[1]
FUNCTIONS = ["evaluate", "export", "generate", "import_folder", "load_model", "models", "prepare", "train"]


def test_dir_shows_what_users_call() -> None:
    """`dir` lists all exports before any of them is loaded."""
    code = "import optimus; print([name for name in dir(optimus) if not name.startswith('__')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(sorted(optimus.__all__))
    assert "__version__" in dir(optimus)
    assert {"bits_per_byte", "generate", "generate_text"} <= set(dir(optimus.evaluation))


@pytest.mark.parametrize(
    ("module", "page"),
    [
        ("optimus", "python"),
        ("optimus.api", "python"),
        ("optimus.checkpoint.reader", "python"),
        ("optimus.extend", "plugins"),
        ("optimus.pipeline", "pipeline"),
        ("optimus.testing", "python"),
    ],
)
def test_what_is_public_is_written_down(module: str, page: str) -> None:
    """A public name of a public module is in `__all__`, can be imported, and its module is on the page; names that the
    reference lists are all public."""
    loaded = importlib.import_module(module)
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert f"{module}" in text
    assert all(hasattr(loaded, name) for name in loaded.__all__)
    assert not [name for name in loaded.__all__ if name.startswith("_")]
    own = {
        name for name, value in vars(loaded).items()
        if not name.startswith("_") and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module
    }  # fmt: skip
    assert own <= set(loaded.__all__)
    if module in ("optimus", "optimus.api"):
        headings = set(re.findall(rf"^## `{re.escape(module)}\.(\w+)`$", text, re.MULTILINE))
        assert headings == set(loaded.__all__) - (set(optimus.__all__) if module == "optimus.api" else set())
        assert {name for name in dir(loaded) if not name.startswith("__")} == set(loaded.__all__)


def test_the_package_exports_no_function_by_accident() -> None:
    code = (
        "import inspect, optimus; print([name for name, value in vars(optimus).items() if not name.startswith('_') "
        "and (inspect.isfunction(value) or inspect.isclass(value)) and name not in optimus.__all__])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_one_version_everywhere() -> None:
    """The newest release of the changelog, the citation and the package have one version."""
    releases = re.findall(r"^## \[(\d\S*)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    cited = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert [releases[0]] == cited == [optimus.__version__]


def test_models_are_listed_without_torch() -> None:
    """`models` does not import torch, which would take longer than everything else in the command."""
    code = "import sys, optimus; assert optimus.models(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_says_arguments_types_and_an_example(name: str) -> None:
    function = getattr(optimus, name)
    signature = inspect.signature(function)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    assert not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    assert all(parameter.annotation is not inspect.Parameter.empty for parameter in signature.parameters.values())
    assert signature.return_annotation is not inspect.Signature.empty
    text = pydoc.render_doc(function, renderer=pydoc.plaintext)
    assert "Example:" in text
    assert f"optimus.{name}(" in text
    for argument in signature.parameters:
        assert argument in text
    assert str(signature) in text


def test_help_of_the_package_has_all_of_them() -> None:
    text = pydoc.render_doc(optimus, renderer=pydoc.plaintext)
    assert "Example:" in text
    for name in ("export_checkpoint", "generate_text", "import_folder", "load_model", "models", "prepare"):
        assert f"{name}(" in text


LAZY = [
    str(path.relative_to(ROOT))
    for path in sorted((ROOT / "optimus").rglob("*.py"))
    if "lazy_exports(" in path.read_text(encoding="utf-8") and path.name != "lazy.py"
]


@pytest.mark.parametrize("path", LAZY)
def test_type_checkers_know_what_is_loaded_later(path: str) -> None:
    """Every lazy export is imported under TYPE_CHECKING, and `__getattr__` is hidden: a type checker reads imports, and
    would take any name for one of a module with `__getattr__`."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    blocks = {ast.unparse(node.test): node for node in tree.body if isinstance(node, ast.If)}
    imported = [
        alias.asname or alias.name
        for node in blocks["TYPE_CHECKING"].body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    module = importlib.import_module(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    assert set(module.__all__) <= {*imported, *vars(module)}
    assert "__getattr__" in ast.unparse(blocks["not TYPE_CHECKING"])
    assert not any("__getattr__" in ast.unparse(node) for node in tree.body if not isinstance(node, ast.If))


@pytest.mark.in_turn(2, 3)
@pytest.mark.slow
def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    """Workers and ranks are programs of their own and do not run the script again."""
    script = tmp_path / "script.py"
    script.write_text(
        "import optimus\n"
        "print('runs')\n"
        "open('text.md', 'w').write('a line of text\\n' * 2000)\n"
        "optimus.prepare(['text.md'], 'data', train_tokenizer=300, context=16, workers=2)\n"
        "train = {'output': 'run', 'steps': 2, 'global_batch': 2, 'micro_batch': 1, 'sequence_length': 16}\n"
        "model = {'family': 'olmo', 'hidden': 16, 'layers': 1, 'heads': 2, 'intermediate': 16, 'vocab': 320}\n"
        "print(optimus.train({'model': model, 'data': {'path': 'data'}, 'train': train}, ranks=2)['step'])\n"
    )
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["runs", "2"], done.stderr
