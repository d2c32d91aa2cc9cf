"""The structure of the code: imports go down the list of rooms, and only the kernels know a maker's device."""

import ast
import re
import sys
from collections.abc import Collection, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from torch import nn

from helpers.sources import tree_of
from optimus.model.families import families
from optimus.pipeline.schedules import schedules

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "optimus"

# The order from the top down, as in docs/architecture.md. Only `hub` differs: it reads and writes checkpoints, so it
# stands above `checkpoint`.
ROOMS = [
    "__main__", "cli", "api", "extend", "plan", "launch", "training", "resolve", "evaluation", "resilience", "hub",
    "checkpoint", "report", "observe", "state", "parallel", "data", "config", "pipeline", "optim", "model", "comm",
    "kernels", "mesh",
]  # fmt: skip
BELOW_ALL = [
    "plugins",
    "functions",
    "step_context",
    "autograd",
    "section",
    "measurements",
    "disk",
    "copies",
    "cores",
    "parent",
    "lazy",
    "errors",
    "version",
]
_LAZY_NAME = re.compile(r"optimus(\.\w+)+(:\w+)?")
TESTING = "testing"  # for tests and benchmarks; may use every room


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room(module: str) -> str | None:
    """Returns the room of a dotted module name; None outside the package. The package itself, except its version,
    stands above all."""
    parts = module.split(".")
    if parts[0] != "optimus" or parts[1:] == ["__version__"]:
        return None
    return parts[1] if len(parts) > 1 else ""


def imported(file: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, module) of every import, also inside functions."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} imports relatively"
            for alias in node.names:  # both `from optimus import data` and `from optimus.data import x` name a room
                yield node.lineno, f"{node.module}.{alias.name}"


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, module) of every import and every lazy export."""
    yield from imported(file)
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _LAZY_NAME.fullmatch(node.value):
            yield node.lineno, node.value.replace(":", ".")


def rank(name: str) -> int:
    """Returns the place in the list of rooms, counted from the top."""
    return -1 if name in ("", TESTING) else (ROOMS + BELOW_ALL).index(name)


def test_every_file_is_in_a_room() -> None:
    found = {path.stem if path.is_file() else path.name for path in PACKAGE.iterdir() if path.suffix in ("", ".py")}
    assert found - {"__init__", "__pycache__"} <= {*ROOMS, *BELOW_ALL, TESTING}


def test_imports_go_down_the_list() -> None:
    upward = []
    for file in files():
        here = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if here == "__init__":
            continue
        for line, module in imports(file):
            there = room(module)
            if there is None or there == here:
                continue
            known = there in {*ROOMS, *BELOW_ALL}  # otherwise a function of the package itself, or the room for tests
            allowed = rank(here) < rank(there) if known else here in ("cli", TESTING)
            if not allowed:
                upward.append(f"{file.relative_to(ROOT)}:{line} {here} imports {module}")
    assert not upward, "\n".join(upward)


def test_no_module_imports_itself_by_way_of_others() -> None:
    """No import cycle exists, including imports for types and inside functions. Lazy exports do not count: no module
    needs them at import time."""
    modules = {}
    for file in files():
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        modules[name] = file
    known = {
        name: {found for _, each in imported(file) for found in [each if each in modules else each.rpartition(".")[0]]}
        & {*modules} - {name}
        for name, file in modules.items()
    }
    assert "optimus.config.tree" in known["optimus.config.phases"]  # imported for a type
    reached = {name: {*known[name]} for name in known}
    for middle in known:
        for name in known:
            if middle in reached[name]:
                reached[name] |= reached[middle]
    assert not {name for name in reached if name in reached[name]}


def test_the_scan_sees_the_imports_inside_functions() -> None:
    """The scan finds imports inside functions; otherwise the test above would always pass."""
    found = {(room(module), file.stem) for file in files() for _, module in imports(file)}
    assert ("evaluation", "validation") in found  # inside a method
    assert ("api", "train") in found  # inside a command
    assert ("hub", "api") in found  # by name, in a lazy export


def test_the_kernels_know_torch_only() -> None:
    allowed = {"torch", "triton", "optimus", *sys.stdlib_module_names}
    for file in (PACKAGE / "kernels").rglob("*.py"):
        for line, module in imports(file):
            assert module.split(".")[0] in allowed, f"{file}:{line} imports {module}"
            assert room(module) in (None, "kernels", *BELOW_ALL), f"{file}:{line} imports {module}"


def declared(section: str) -> set[str]:
    """Returns the packages in a list of pyproject.toml, by their import names."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(rf"^{section} = \[(.*?)\]$", text, re.DOTALL | re.MULTILINE)
    assert listed is not None
    names = re.findall(r'"([a-z0-9-]+)[>=;"]', listed[1])
    return {{"pyyaml": "yaml", "mlflow-skinny": "mlflow"}.get(name, name).replace("-", "_") for name in names}


def test_what_is_imported_is_installed() -> None:
    """Every imported package is a dependency; a package of an extra is imported by that extra's files only."""
    required = {"triton", "pydantic_core", "typing_extensions"}  # by torch and pydantic
    installed = declared("dependencies") | {"optimus", *required, *sys.stdlib_module_names}
    extras = {
        "evaluation/signals.py": "plot", "pipeline/draw.py": "plot", "plan/scaling.py": "plot",
        "evaluation": "evaluate", "hub/drop_in.py": "evaluate", "observe/wandb.py": "wandb", "observe/mlflow.py": "mlflow",
        "model/foreign": "hf", "hub/foreign.py": "hf", "data/hub_datasets.py": "hf", "data/vocabularies.py": "hf",
        "data/selection.py": "dedup", "data/duplicates.py": "dedup", "data/remote.py": "remote", "copies.py": "remote",
    }  # fmt: skip
    missing = []
    for file in files():
        name = file.relative_to(PACKAGE).as_posix()
        extra = next((declared(extra) for where, extra in extras.items() if name.startswith(where)), set())
        if not name.startswith(TESTING):
            tops = {(line, module.split(".")[0]) for line, module in imports(file)}
            missing += [f"{name}:{line} imports {top}" for line, top in sorted(tops) if top not in installed | extra]
    assert not missing, "\n".join(missing)


def cuda_uses(tree: ast.Module) -> Iterator[int]:
    """Yields lines that name the maker's device in code: as an attribute or name, or in a text that is not prose.

    Prose is docstrings and the values of `help` and `description`, which users read.
    """
    prose = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            prose.add(node.value)
        elif isinstance(node, ast.keyword) and node.arg in ("help", "description"):
            prose.update(child for child in ast.walk(node.value) if isinstance(child, ast.Constant))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            named = isinstance(node.value, str) and node not in prose and "cuda" in node.value.lower()
        else:
            named = any("cuda" in str(getattr(node, field, "")).lower() for field in ("attr", "id", "arg", "module"))
        if named:
            yield node.lineno  # type: ignore[attr-defined]


def test_no_room_but_the_kernels_names_cuda() -> None:
    found = []
    for file in files():
        if file.is_relative_to(PACKAGE / "kernels"):
            continue
        tree = tree_of(file)
        found += [f"{file.relative_to(ROOT)}:{line}" for line in cuda_uses(tree)]
    assert not found, "ask torch.accelerator and the device's own name instead: " + ", ".join(found)


def naming(tree: ast.Module, words: Collection[str]) -> Iterator[int]:
    """Yields lines with one of these words, as an identifier or in a text that is not a docstring."""
    # llama.cpp is a program.
    texts = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, words))})(?![\w-]|\.cpp)")
    names = {name.replace("-", "_") for name in words}
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            named = isinstance(node.value, str) and node not in docstrings and texts.search(node.value) is not None
        else:
            named = any(getattr(node, field, "") in names for field in ("attr", "id", "arg", "name"))
        if named:
            yield node.lineno  # type: ignore[attr-defined]


def named_outside(words: Collection[str], *rooms: str) -> list[str]:
    """Returns the places outside these rooms that have one of the words."""
    outside = [file for file in files() if not any(file.is_relative_to(PACKAGE / room) for room in rooms)]
    trees = {file.relative_to(ROOT): tree_of(file) for file in outside}
    return [f"{name}:{line}" for name, tree in trees.items() for line in naming(tree, words)]


def test_schedules_register_themselves() -> None:
    """No file of the package outside `pipeline/schedules` names a schedule."""
    found = named_outside(schedules(), "pipeline/schedules")
    assert not found, "ask the row in optimus.pipeline.schedules.schedules() instead: " + ", ".join(found)


def test_families_are_files() -> None:
    """No file of the package outside `model/families` names a family, except testing code and kernel timings, which
    choose models."""
    assert len(families()) > 10
    found = named_outside(families(), "model/families", TESTING, "plan/measure")
    assert not found, "what a family's models compute is in ModelConfig: " + ", ".join(found)


@pytest.mark.parametrize(
    ("code", "uses"),
    [
        ("x = '1f1b'", 1), ("f'parallel.schedule=zbv{x}'", 1), ("from a import gpipe", 1), ("zb_h1(2)", 1),
        ("'zbv is a schedule'", 0), ("kind = 'interleaved'", 0),
    ],
)  # fmt: skip
def test_the_rule_about_schedules(code: str, uses: int) -> None:
    assert len(list(naming(ast.parse(code), schedules()))) == uses


@pytest.mark.parametrize(
    ("code", "uses"),
    [
        ("if config.family == 'olmoe': f()", 1), ("olmoe(config)", 1), ("f'{x} of gpt_oss'", 1), ("'''as olmo'''", 0),
        ("kind = 'llama3'", 0), ("from transformers.models.olmoe.modeling_olmoe import OlmoeExperts", 0),
    ],
)  # fmt: skip
def test_the_rule_about_families(code: str, uses: int) -> None:
    assert len(list(naming(ast.parse(code), families()))) == uses


@pytest.mark.parametrize(
    ("code", "uses"),
    [
        ("x.cuda()", 1), ("torch.cuda.synchronize()", 1), ("y.to('cuda')", 1), ("y.to(f'cuda:{i}')", 1),
        ("from torch.cuda import Stream", 1), ("'''about cuda'''", 0), ("Option(help='cpu, cuda')", 0), ("x.cpu()", 0),
    ],
)  # fmt: skip
def test_the_rule_about_cuda(code: str, uses: int) -> None:
    assert len(list(cuda_uses(ast.parse(code)))) == uses


COMPOSED = ("model", "kernels", "parallel", "comm")  # rooms whose objects are complete when made


def patches(tree: ast.Module, room: str) -> Iterator[int]:
    """Yields lines that change finished objects instead of making them from other parts.

    Such lines are global statements, assignments to `forward`, and attributes set on parameters. In the rooms of
    `COMPOSED`, any attribute of another object counts; in `parallel`, also functions that set parts of an existing
    model.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = ast.unparse(node.value)
            hung = owner.split(".")[-1] in ("parameter", "param", "weight", "bias") and not hasattr(
                nn.Parameter, node.attr
            )
            if node.attr == "forward" or hung or (room in COMPOSED and owner not in ("self", "ctx")):
                yield node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            if ast.unparse(node.args[1]) == "'forward'":
                yield node.lineno
        elif isinstance(node, ast.FunctionDef) and room == "parallel" and node.name.startswith("set_"):
            yield node.lineno


def test_models_are_composed_and_not_patched() -> None:
    found = []
    for file in files():
        here = file.relative_to(PACKAGE).parts[0]
        if file.is_relative_to(PACKAGE / "model" / "foreign"):
            continue  # it changes the classes of others' modules, which cannot declare what is replaceable
        lines = patches(tree_of(file), here)
        found += [f"{file.relative_to(ROOT)}:{line}" for line in lines]
    assert not found, "let its class say that it is replaceable (parallel/parallelize.py): " + ", ".join(found)


def test_models_are_known_by_their_protocol() -> None:
    """No room but `model` asks for the class of a model, which a plugin's models would not have."""
    classes = {"Transformer", "ForeignModel"}
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in files()
        if file.relative_to(PACKAGE).parts[0] != "model"
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass")
        if classes
        & {ast.unparse(each) for each in ast.walk(node.args[1]) if isinstance(each, ast.Name | ast.Attribute)}
    ]
    assert not found, f"ask the protocol `CausalModel`: {', '.join(found)}"


@pytest.mark.parametrize(
    ("code", "room", "lines"),
    [
        ("def f():\n    global x", "train", 1), ("module.forward = f", "state", 1), ("setattr(m, 'forward', f)", "state", 1),
        ("parameter.sink = s", "state", 1), ("self.weight.sink = s", "bench", 1), ("parameter.grad = g", "state", 0),
        ("layer.dispatch = d", "parallel", 1), ("self.dispatch = d", "parallel", 0), ("ctx.group = g", "parallel", 0),
        ("def set_dispatch(model): ...", "parallel", 1), ("run.x = 3", "train", 0), ("def forward(self): ...", "model", 0),
    ],
)  # fmt: skip
def test_the_rule_about_patches(code: str, room: str, lines: int) -> None:
    assert len(list(patches(ast.parse(code), room))) == lines


_CHANGES = re.compile("append|add|update|setdefault|pop|clear|extend|insert|remove|discard|popitem|popleft|appendleft")
_OF_THE_PROCESS = {"os", "sys"}  # the environment, and the path of modules
_LETS_THINGS_FAIL = PACKAGE / "training" / "injection.py"
_TABLES = (
    PACKAGE / "plugins.py"
)  # the rows that plugins add belong to the process, like the modules that it has imported


def mutated(tree: ast.Module) -> Iterator[int]:
    """Yields lines in functions that change a module's state: its variables and classes, or those of imported modules."""
    own = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assigned = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    targets = [each for node in assigned for each in (node.targets if isinstance(node, ast.Assign) else [node.target])]
    own |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        inside = list(ast.walk(function))
        local = {node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        local |= {node.arg for node in inside if isinstance(node, ast.arg)} | _OF_THE_PROCESS
        for node in inside:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                changes = own if _CHANGES.fullmatch(node.func.attr) else set()
                owner = _root(node.func)
            elif isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
                changes, owner = own | imported, _root(node)
            else:
                continue
            if owner in changes - local:
                yield node.lineno


def _root(node: ast.expr) -> str | None:
    """Returns the variable at the root of an attribute or element, through any nesting."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def test_modules_have_no_state() -> None:
    found = []
    for file in files():
        if file not in (_LETS_THINGS_FAIL, _TABLES) and not file.is_relative_to(PACKAGE / TESTING):
            lines = sorted(set(mutated(tree_of(file))))
            found += [f"{file.relative_to(ROOT)}:{line}" for line in lines]
    assert not found, "let an object have it that is made for a run (step_context.py): " + ", ".join(found)


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("x = {}\ndef f():\n    x[1] = 2", 1), ("x: list[int] = []\ndef f():\n    x.append(2)", 1),
        ("import a\ndef f():\n    a.g = h", 1), ("from a import b\ndef f():\n    b.c.g = h", 1),
        ("x = {}\ndef f():\n    del x[1]", 1), ("x = [1]\ndef f():\n    return x[0]", 0), ("x = {}\nx[1] = 2", 0),
        ("x = {}\ndef f(x):\n    x[1] = 2", 0), ("x = {}\ndef f():\n    x = []\n    x.append(2)", 0),
        ("import os\ndef f():\n    os.environ['A'] = 'b'", 0), ("import torch\ndef f():\n    torch.add(2)", 0),
        ("class A: ...\ndef f():\n    A.n = 1", 1), ("class A:\n    def f(self):\n        self.n = 1", 0),
    ],
)  # fmt: skip
def test_the_rule_about_state_of_modules(code: str, lines: int) -> None:
    assert len(list(mutated(ast.parse(code)))) == lines


def test_generated_pages_are_current() -> None:
    """The generated references of configuration, commands and Python are up to date."""
    spec = spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = module_from_spec(spec)
    spec.loader.exec_module(generate)
    for name, text in generate.pages().items():
        page = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert page == text, f"docs/{name} is out of date: run `make docs`"
