"""Names, help texts and messages use the words of the field, a class name means one thing, and sentences are complete."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers.sources import tree_of

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("docs/architecture.md", "docs/checkpoints.md", "docs/config.md")

WORDS = {  # parts of identifiers, and the words to use
    "blame": "culprit",
    "blamed": "culprit",
    "boxes": "slices",
    "busiest": "max_load, slowest",
    "happened": "injected",
    "happens": "is_due",
    "heldout": "validation",
    "inward": "importing",
    "outward": "exporting",
}
NAMES = {  # whole identifiers, and the ones to use
    "Base": "Candidate",
    "Choosing": "RouterConfig",
    "Computing": "StageRunner",
    "Depths": "ShardDepths",
    "Dispatch": "TokenDispatcher",
    "Driver": "ProgressThread",
    "Gathering": "ParameterPrefetcher",
    "Overlapped": "OverlappedWork",
    "Ready": "ReadyQueue",
    "Recipe": "StateSpec",
    "Slot": "ParameterSlot",
    "Staged": "PipelineStages",
    "conclusion": "finalize",
    "device_states": "resident_fraction",
    "freed_memory": "malloc_trim",
    "going_back": "rollback",
    "coarsening": "all_reduce_tiles",
    "_is_of_torch_save": "_is_torch_save_file",
    "_masks_of_all": "_common_masks",
    "_of_another_program": "_describe_foreign",
    "_of_conversations": "_conversation_encoder",
    "_of_frozen": "_frozen_targets",
    "_of_nodes": "_node_bytes",
    "_of_rank": "_choose_for_rank, _rank_events",
    "_of_shards": "_buffer_elements",
    "_of_stage": "_chunks_by_stage",
    "_of_texts": "_text_encoder",
    "_read_own": "_read_local",
    "_reduced_each": "_reduce_depth",
    "choices_here": "count_local_choices",
    "facts_here": "measure_facts",
    "of_T": "values_T",
    "of_experts": "for_experts",
    "of_files": "from_files",
    "of_vocabulary": "is_vocabulary",
    "of_weight": "weight_gradient",
    "reduce_each": "microbatch_reduce",
    "resolve_here": "resolve_run",
    "run_here": "train_or_check",
    "stage_here": "local_stage_of",
    "stages_of_each": "part_counts_of_ranks",
    "written_here": "chunks_to_write",
    "window_except": "full_attention_every",
    "Given": "Job",
    "Held": "ChunkGroup",
    "HeldOut": "Validation",
    "Holding": "LeaseCheck",
    "Now": "OptimizerStep",
    "Question": "Job",
    "Setting": "Job",
    "Places": "AttentionPositions",
    "Share": "ShardStep",
    "Whole": "MatrixGroup",
    "Division": "BlockTiming",
    "Work": "RankCosts",
    "bytes_leaving_node": "internode_bytes",
    "choosing": "router_config",
    "comes": "receives, record_received",
    "dividing": "group_of",
    "division": "partition",
    "divisions": "partitions, planned",
    "divisions_of": "groups_of_mesh",
    "ends_apart": "first_last_apart",
    "host_room": "host_capacity",
    "keeps_whole": "keeps_unsharded",
    "kept": "saved, resident, retained, persistent",
    "leaving": "outgoing, sending",
    "left_out": "omitted",
    "level_divisions": "level_groups",
    "may_leave": "may_offload",
    "meeting_place": "report_folder",
    "Place": "CollectiveCall, ModulePosition",
    "place": "position, local_rank, node_rank, placement, path, where",
    "place_of_frozen": "frozen_folder_of",
    "places": "positions, locations",
    "recipe": "spec, state_spec",
    "recipe_of": "state_spec_of",
    "recipes_of": "state_specs_of",
    "_Room": "_DeviceMemory",
    "room": "receive_buffer, capacity, free_bytes",
    "room_of": "device_capacity",
    "rooms": "free_bytes",
    "_Rows": "_PartChunks",
    "_rows_of": "_chunks_of_part",
    "run_divisions": "run_groups",
    "share_left": "unpruned_share",
    "shared_divisions": "shared_groups",
    "state_divisions": "state_groups",
    "state_room": "free_after_state",
    "whole": "dense, unsharded, full, total, nbytes",
    "whole_masks": "all_masks",
    "whole_memory": "total_memory",
    "whole_model": "full_model",
    "whole_number": "integer_field",
    "whole_rows": "gathered_rows",
    "whole_slices": "full_slices",
    "whole_weights": "integer_weights",
    "WholeParameters": "UnshardedParameters",
    "with_room": "rows_by_free",
    "as_they_are": "local_matrices",
    "exchange_rows": "all_to_all_rows",
    "collect_on_first": "gather_object",
    "gather_rows": "all_gather_rows",
    "held_by": "chunk_groups",
    "keep_stages": "_select",
    "own_rows": "local_rows",
    "start_gathered": "all_gather_async",
    "start_summed": "reduce_scatter_async",
    "start_total": "all_reduce_async",
    "tell": "broadcast_object",
    "sum_over": "all_reduce_autograd",
    "sum_rows": "reduce_scatter_rows",
    "sum_shared": "reduce_from_group",
    "tied_ends": "tied_embeddings",
}
MEMBERS = {  # whole names of classes, functions, parameters, attributes and fields, to the ones to use; locals may have them
    "each": "what an element is",
    "given": "what the value is",
    "here": "local_..., this_..., is_present",
    "of": "from_..., for_..., ..._of",
    "own": "local_...",
}
PHRASES = {  # expressions in help texts, messages and pages, to the words to use
    r"\bblame[sd]?\b": "culprit, attributed to",
    r"\bheld-out\b": "validation",
    r"\bmade again\b": "recomputed",
    r"\bfor a moment besides\b": "transient",
    r"\bleaves idle\b": "bubble",
}
EXCEPTIONS: dict[tuple[str, str], str] = {  # (path, identifier) and the reason
}


class Finding(NamedTuple):
    where: str
    found: str
    use: str


def files(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    """Yields (path, syntax tree) of every module in these folders."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), tree_of(path)


def identifiers(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields (line, name) of the module and its definitions: classes, functions, arguments, variables, attributes."""
    yield 1, Path(path).stem
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr


def members(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of classes, functions, their parameters, attributes and fields; no locals, nor parameters of a lambda."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name, body=body):
                yield node.lineno, name
                for child in body:
                    targets = child.targets if isinstance(child, ast.Assign) else [getattr(child, "target", None)]
                    yield from ((each.lineno, each.id) for each in targets if isinstance(each, ast.Name))
            case ast.FunctionDef(name=name, args=args) | ast.AsyncFunctionDef(name=name, args=args):
                yield node.lineno, name
                every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
                yield from ((each.lineno, each.arg) for each in every if each is not None)
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr


def texts(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields (line, text) for users: help of options, descriptions of configuration fields and commands, errors."""
    for node in ast.walk(tree):
        match node:
            case ast.Raise(exc=ast.Call(args=args)):
                yield from (each for argument in args for each in constants(argument))
            case ast.keyword(arg="help" | "description", value=value):
                yield from constants(value)
            case ast.FunctionDef() if path.startswith("optimus/cli/"):
                yield node.lineno, ast.get_docstring(node) or ""
            case ast.ClassDef() if path.startswith("optimus/config/"):
                yield from (
                    each for child in node.body if isinstance(child, ast.Expr) for each in constants(child.value)
                )


def constants(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of the strings in an expression."""
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.lineno, each.value


def private_names(path: str, tree: ast.Module) -> Iterator[Finding]:
    """Yields the identifiers that are, or contain, a private word."""
    for line, name in identifiers(path, tree):
        if (path, name) in EXCEPTIONS:
            continue
        parts = re.findall(r"[A-Z]*[a-z0-9]+|[A-Z]+", name)
        found = {name: NAMES[name]} if name in NAMES else {p: WORDS[p.lower()] for p in parts if p.lower() in WORDS}
        yield from (Finding(f"{path}:{line}", f"{each} in {name}", use) for each, use in found.items())


def private_members(path: str, tree: ast.Module) -> Iterator[Finding]:
    """The members whose names, underscores aside, say nothing of what they are."""
    for line, name in members(tree):
        if (word := name.strip("_")) in MEMBERS:
            yield Finding(f"{path}:{line}", name, MEMBERS[word])


def private_phrases(where: str, text: str) -> Iterator[Finding]:
    """Yields the private phrases in a text."""
    for pattern, use in PHRASES.items():
        for found in re.findall(pattern, " ".join(text.split()), re.IGNORECASE):
            yield Finding(where, found, use)


def report(findings: list[Finding]) -> str:
    return "\n" + "\n".join(f"{each.where}: '{each.found}': say '{each.use}'" for each in findings)


def test_identifiers_use_the_words_of_the_field() -> None:
    found = [each for path, tree in files("optimus") for each in private_names(path, tree)]
    assert not found, report(found)


def test_names_of_members_say_what_they_are() -> None:
    found = [each for path, tree in files("optimus") for each in private_members(path, tree)]
    assert not found, report(found)


def test_help_texts_and_messages_use_the_words_of_the_field() -> None:
    found = [
        each
        for path, tree in files("optimus")
        for line, text in texts(path, tree)
        for each in private_phrases(f"{path}:{line}", text)
    ]
    assert not found, report(found)


@pytest.mark.parametrize("page", PAGES)
def test_pages_use_the_words_of_the_field(page: str) -> None:
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    found = [each for number, line in enumerate(lines, 1) for each in private_phrases(f"{page}:{number}", line)]
    assert not found, report(found)


def test_a_class_name_means_one_thing() -> None:
    """No two public classes, or named types, of the package have the same name."""
    places = defaultdict(list)
    for path, tree in files("optimus"):
        for node in tree.body:
            match node:
                case ast.ClassDef(name=name) if not name.startswith("_"):
                    places[name].append(f"{path}:{node.lineno}")
    assert not (twice := {name: where for name, where in places.items() if len(where) > 1}), twice


def module_packages() -> dict[str, set[str]]:
    """The packages in which each name is that of a module or a package."""
    packages = defaultdict(set)
    for path, _ in files("optimus"):
        *parents, name = Path(path).with_suffix("").parts
        if name == "__init__":
            *parents, name = parents
        packages[name].add(".".join(parents))
    return packages


def bare_modules(path: str, tree: ast.Module, packages: dict[str, set[str]]) -> Iterator[Finding]:
    """The modules of other packages that a file imports by a bare name, which modules of several packages have."""
    own = ".".join(Path(path).parent.parts)
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.module in (None, own):
            continue
        for imported in node.names:
            name = imported.asname or imported.name
            if node.module in packages.get(imported.name, ()) and len(packages.get(name, ())) > 1:
                yield Finding(f"{path}:{node.lineno}", f"{node.module}.{imported.name}", "names of its members")


def test_modules_of_one_name_are_told_apart() -> None:
    """Modules of several packages may share a name: only their own package imports them by the bare name."""
    packages = module_packages()
    found = [each for path, tree in files("optimus") for each in bare_modules(path, tree, packages)]
    assert not found, report(found)


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("from optimus.checkpoint import folder", 1),
        ("from optimus.checkpoint import folder as checkpoint_folder", 0),
        ("from optimus.checkpoint.folder import step_of", 0),
        ("from optimus.report import folder", 0),
        ("from optimus.checkpoint import slots", 0),
    ],
)
def test_bare_modules_are_found(line: str, count: int) -> None:
    assert len([*bare_modules("optimus/report/page.py", ast.parse(line), module_packages())]) == count


# ---- Sentences ----

# Words that begin a clause without a subject, or without a verb. No docstring begins with one of them.
OPENINGS = {
    *("What", "Of", "Whether", "How", "Where", "Those", "As", "That", "Which", "Who"),
    *("Whose", "When", "If", "Whatever", "In", "With", "By", "From"),
}
# Verbs in the third person, and words that begin a noun phrase. Add a missing word to the file if it is one of these.
FIRST_WORDS = set((ROOT / "tests" / "first_words.txt").read_text(encoding="utf-8").split())
LONG = 35  # the most words of a sentence
FOLDERS = ("optimus", "tests", "benchmarks", "examples", "docs")


class Docstring(NamedTuple):
    where: str
    text: str


def docstrings(path: str, tree: ast.Module) -> Iterator[Docstring]:
    """Yields the docstrings of modules, classes and functions; those of commands are help texts and may be imperative."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        command = path.startswith("optimus/cli/") and isinstance(node, ast.FunctionDef) and node.decorator_list
        if (text := ast.get_docstring(node)) and not command:
            yield Docstring(f"{path}:{getattr(node, 'lineno', 1)}", text)


def opening(text: str, *, listed: bool = True) -> Finding | None:
    """Returns an objection to the first word of a docstring, which must be in FIRST_WORDS if `listed`. Inline code or a
    shape counts as a noun."""
    first = text.split()[0]
    word = first.rstrip(",:.;")
    if word in OPENINGS:
        return Finding("", word, "a verb in the third person, or a noun phrase")
    if listed and re.fullmatch(r"[A-Za-z][\w/'-]*", word) and word not in FIRST_WORDS:
        return Finding(
            "", word, "a word of tests/first_words.txt, or add it there if it is a verb or begins a noun phrase"
        )
    return None


def long_sentences(text: str) -> Iterator[str]:
    """Yields sentences of more than `LONG` words. Indented lines (tables, legends) do not count."""
    for paragraph in re.split(r"\n\s*\n|\n\s*[-*] ", text):
        lines = [line for line in paragraph.splitlines() if not line.startswith("  ")]
        for sentence in re.split(r"(?<=[.!?:;])\s+", " ".join(" ".join(lines).split())):
            if len(sentence.split()) > LONG:
                yield sentence


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_verb_or_a_noun_phrase(folder: str) -> None:
    """No docstring has a forbidden opening; those of the package begin with a listed word."""
    found = [
        wrong._replace(where=each.where)
        for path, tree in files(folder)
        for each in docstrings(path, tree)
        if (wrong := opening(each.text, listed=folder == "optimus")) is not None
    ]
    assert not found, report(found)


@pytest.mark.parametrize("folder", FOLDERS)
def test_sentences_are_short(folder: str) -> None:
    found = [
        Finding(each.where, f"{sentence[:60]}...", f"it in at most {LONG} words")
        for path, tree in files(folder)
        for each in docstrings(path, tree)
        for sentence in long_sentences(each.text)
    ]
    assert not found, report(found)


def test_first_words_are_in_use_and_in_order() -> None:
    lines = (ROOT / "tests" / "first_words.txt").read_text(encoding="utf-8").split()
    used = {each.text.split()[0].rstrip(",:.;") for path, tree in files("optimus") for each in docstrings(path, tree)}
    assert lines == sorted(lines, key=str.lower)
    assert not FIRST_WORDS - used
    assert not FIRST_WORDS & OPENINGS


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("Whether it is there.", True),
        ("Of a run.", True),
        ("Flurbs the shards.", True),
        ("Returns the shards.", False),
        ("The shards of a chunk.", False),
        ("[T, H] rows.", False),
        ("`text` in lower case.", False),
    ],
)
def test_openings_are_found(text: str, wrong: bool) -> None:
    assert (opening(text) is not None) == wrong


def test_words_outside_of_the_list_begin_docstrings_of_tests() -> None:
    assert opening("Flurbs the shards.", listed=False) is None
    assert opening("Whether it is there.", listed=False) is not None


def test_long_sentences_are_found() -> None:
    words = " ".join(["word"] * LONG)
    assert [*long_sentences(f"{words}. {words} more. Few.\n\n    {words} {words}")] == [f"{words} more."]


def test_exceptions_are_needed() -> None:
    names = {(path, name) for path, tree in files("optimus") for _, name in identifiers(path, tree)}
    assert EXCEPTIONS.keys() <= names


def test_private_words_are_found() -> None:
    """Private words are found in a name, a part of a name, a message and a help text."""
    source = (
        'def sum_rows(busiestRank):\n    raise ValueError(f"{1} is blamed")\n\nOption(help="of the held-out text")\n'
    )
    tree = ast.parse(source)
    assert [(each.where, each.use) for each in private_names("a.py", tree)] == [
        ("a.py:1", "reduce_scatter_rows"),
        ("a.py:1", "max_load, slowest"),
    ]
    phrases = [each for line, text in texts("a.py", tree) for each in private_phrases(f"a.py:{line}", text)]
    assert sorted((each.where, each.found) for each in phrases) == [("a.py:2", "blamed"), ("a.py:4", "held-out")]


def test_planted_members_are_found() -> None:
    """Functions, parameters, fields and attributes are found, locals and parameters of a lambda are not."""
    source = """
class Rows:
    own: int

    @classmethod
    def of(cls, count=lambda own: own, *, _given=None):
        here = sorted(count, key=lambda each: each)
        cls._here = [of for of in here]
        def each(): ...
"""
    found = [(each.where, each.found) for each in private_members("a.py", ast.parse(source))]
    assert sorted(found) == [
        ("a.py:3", "own"),
        ("a.py:6", "_given"),
        ("a.py:6", "of"),
        ("a.py:8", "_here"),
        ("a.py:9", "each"),
    ]
