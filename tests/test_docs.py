"""Commands and programs of the documentation work as printed, and print what the pages show.

Every command and program of a page runs in order in an empty folder, with the sizes of SMALLER and the files that the
reader has. Training on several ranks is checked (`--check`) but not started, unless the page shows its output. Only the
options are read for commands in NOT_RUN. Numbers may differ from those shown, words may not.
"""

import ast
import inspect
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest
import torch
import typer
import yaml
from pydantic import BaseModel

import optimus
from helpers.pages import Step, masked, missing, steps
from helpers.sweep import in_turns
from optimus import api, cli
from optimus.config import RunConfig
from optimus.config.load import keys_of_section, other_names
from optimus.observe import progress
from optimus.observe.metrics import MetricsWriter
from optimus.plan.machine_template import machine_template

ROOT = Path(__file__).resolve().parents[1]

# Commands that take long, or need more machines or another program, with the reason.
NOT_RUN = {
    "source ": "a shell's own",
    "make ": "installs from a package index, or runs all tests",
    "optimus rendezvous": "serves until it is ended",
    "optimus launch run.yaml --nodes 16": "needs 18 nodes",
    "optimus lab": "takes a minute",
    "optimus bench machine": "measures for minutes",
}
OF_OTHER_PROGRAMS = {
    "--account": "sbatch",
    "--corpus": "benchmarks.experiments",
    "--dependency": "sbatch",
    "--depth": "git",
    "--enable-lora": "vllm",
    "--gpus-per-node": "sbatch",
    "--gpus-per-task": "srun",
    "--hostfile": "mpiexec",
    "--index-url": "pip",
    "--kill-on-bad-exit": "srun",
    "--logdir": "tensorboard",
    "--lora-modules": "vllm",
    "--mem": "sbatch",
    "--model-path": "sglang",
    "--nproc-per-node": "torchrun",
    "--ntasks-per-node": "srun",
    "--nv": "apptainer",
    "--ppn": "mpiexec",
    "--rehearse": "benchmarks.gpu_check",
}
ANY_TEXT = {"optimus generate": "what a model writes is not the same with other sizes"}

TINY = {"family": "olmoe", "hidden": 16, "layers": 8, "heads": 2, "intermediate": 8, "vocab": 4096, "experts": 8}
TINY_MODEL = yaml.safe_dump({**TINY, "experts_per_token": 2}, default_flow_style=True, width=200).strip()

SMALLER = {  # replacements: texts, tokenizer, context, model and run become small
    "prepare text/train ": "prepare text/train/json ",
    "text: text/held-out": "text: text/train/json/tool.py",
    "--text text/held-out": "--text text/train/json/tool.py",
    'text="text/held-out"': 'text="text/train/json/tool.py"',
    "prepare hello/text/train ": "prepare hello/text/train/json ",
    "--text hello/text/held-out": "--text hello/text/train/json/tool.py",
    '__init__(self" --temperature': '__init__(self" --max-tokens 4 --temperature',
    "--train-tokenizer 4096": "--train-tokenizer 400",
    "train_tokenizer=2048": "train_tokenizer=400",
    "--context 256": "--context 32",
    # Without a precision, the machine's faster one would apply.
    "sequence_length: 256}": "sequence_length: 32, precision: float32}",
    "context=128": "context=32",
    '"sequence_length": 128': '"sequence_length": 32',
    "steps: 1000": "steps: 2",
    "steps: 300": "steps: 12",
    "every: 100": "every: 4",
    "log_every: 25": "log_every: 1",
    "max_bytes: 65536": "max_bytes: 2000",
    "train.steps=20 lr_schedule.warmup_steps=5": "train.steps=2 lr_schedule.warmup_steps=1",
    "steps: 40": "steps: 2",
    "warmup_steps: 10": "warmup_steps: 1",
    '"steps": 60': '"steps": 3',
    '"lr_schedule.warmup_steps=10"': '"lr_schedule.warmup_steps=1"',
    "step-00000300": "step-00000009",
    "step-00000200": "step-00000006",
    "--step 200": "--step 6",
    "train.steps=240": "train.steps=9",
    "cooldown_steps=40": "cooldown_steps=3",
    "--max-tokens 60": "--max-tokens 4",
    "train.stop_at=150": "train.stop_at=5",
    "train.steps=500": "train.steps=2",
    "model: llama-3.2-1b": "model: {family: llama, hidden: 64, layers: 8, heads: 8, intermediate: 64, vocab: 4096}",
    "model: llama-3.1-8b": "model: {family: llama, hidden: 64, layers: 8, heads: 8, intermediate: 64, vocab: 4096}",
    "model: mula-7b-a1b": f"model: {TINY_MODEL}",
    "sequence_length: 4096}": "sequence_length: 32, precision: float32}",
    "sequence_length: 65536}": "sequence_length: 32, precision: float32}",
    "global_batch: 512": "global_batch: 64",
    "max_tokens=10": "max_tokens=4",
    "plan mula-7b-a1b --machine": "plan mula-7b-a1b --best 1 --machine",
    "plan first.yaml --machine": "plan first.yaml --best 1 --machine",
    "plan mula-220b-a10b --machine": "plan mula-7b-a1b --best 1 --machine",
    "--ranks 3072": "--ranks 96",
}
_ENTERS = re.compile(r"mkdir (\w+) && cd \1$")  # a page that works in a folder of its own
STOPPED = 5  # the step after which the tutorial's reader presses Ctrl-C


class Reader:
    """Follows the steps of a page in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.variables = ""  # assignments for the shell

    def read(self, page: Path) -> None:
        found = steps(page)
        if enters := next((match for step in found if (match := _ENTERS.match(step.text))), None):
            self.folder /= enters[1]
            self.folder.mkdir()
            os.chdir(self.folder)
            found = [step for step in found if not _ENTERS.match(step.text)]
        # A page may mention files before it shows them.
        for step in sorted(found, key=lambda step: step.kind != "file"):
            for printed, smaller in SMALLER.items():
                step.text = step.text.replace(printed, smaller)
            self.do(step, f"{page.name}:{step.line}: {step.text}")

    def do(self, step: Step, where: str) -> None:
        if step.kind == "file":
            path = self.folder / step.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(step.text, encoding="utf-8")
            return
        if step.kind == "python":
            code, printed = ran(lambda: exec(compile(step.text, where, "exec"), self.names))
        elif any(step.text.startswith(beginning) for beginning in NOT_RUN):
            if step.text.startswith("optimus "):
                read_options(step.text)
            return
        else:
            code, printed = self.run(step)
        codes = {"error: ": 2, "stopped by SIGINT ": 130}
        expected = next((code for said, code in codes.items() for line in step.shown if line.startswith(said)), 0)
        assert code == expected, f"{where}\n{printed}"
        if not any(step.text.startswith(beginning) for beginning in ANY_TEXT):
            assert (line := missing(step.shown, printed)) is None, (
                f"{where}\nshows, but does not print:\n{line}\n\n{printed}"
            )

    def run(self, step: Step) -> tuple[int, str]:
        words = shlex.split(step.text.replace("\\\n", " "), comments=True)
        if words[0] == "torchrun":
            ranks = words[words.index("--nproc-per-node") + 1]
            words = ["optimus", *words[words.index("optimus") + 1 :], "--ranks", ranks]
        if words[0] != "optimus":
            if re.match(r"\w+=", step.text):
                self.variables += step.text + "\n"
            return self.shell(self.variables + step.text)
        if "--ranks" in words or any(word.startswith("parallel.") for word in words):
            if step.shown:  # by ranks, which do not print through this process
                return self.shell(shlex.join([sys.executable, "-m", "optimus", *words[1:]]))
            if words[1] == "train":
                words.append("--check")
        return command(words)

    def shell(self, text: str) -> tuple[int, str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(["bash", "-c", text], cwd=self.folder, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr


def command(words: list[str]) -> tuple[int, str]:
    argv, sys.argv = sys.argv, words
    try:
        return ran(cli.main)
    finally:
        sys.argv = argv


def ran(function: Callable[[], object]) -> tuple[int, str]:
    """Returns the exit code and all output of a function."""
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            function()
        except SystemExit as end:
            return int(end.code or 0), printed.getvalue()
    return 0, printed.getvalue()


def read_options(text: str) -> None:
    """Raises an error for an option or argument that the command lacks."""
    _, *words = shlex.split(text.replace("\\\n", " "), comments=True)
    found: Any = typer.main.get_command(cli.app)
    while hasattr(found, "commands"):
        found = found.commands[words.pop(0)]
    found.make_context(found.name, words)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"])
    return Reader(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reader who has trained a run with the checkpoints and files that the pages mention."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text").mkdir()
    shutil.copy(Path(__file__), folder / "text" / "some.py")
    config = {
        "model": {**TINY, "experts_per_token": 2, "hidden": 128, "layers": 2},
        "data": {"path": "data"},
        "train": {"output": "runs/first", "steps": 9, "global_batch": 8, "micro_batch": 8, "sequence_length": 32},
        "checkpoint": {"every": 3, "weights_every": 3},
    }
    (folder / "first.yaml").write_text(yaml.safe_dump(config))
    here = Path.cwd()
    os.chdir(folder)
    try:
        for text in ("prepare text --output data --train-tokenizer 400 --context 32", "train first.yaml"):
            code, printed = command(["optimus", *text.split()])
            assert code == 0, printed
    finally:
        os.chdir(here)
    return folder


def planned(folder: Path) -> None:
    """Writes the reader's own run, small enough for hundreds of planned ranks, and the file of a machine."""
    train = {"output": "runs/first", "steps": 300, "global_batch": 768, "micro_batch": 1, "sequence_length": 32}
    run = {"model": {**TINY, "experts_per_token": 2}, "data": {"path": "data"}, "train": train}
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    shutil.copy(ROOT / "optimus" / "plan" / "machines" / "laptop.yaml", folder / "node.yaml")
    (folder / "my-machine.yaml").write_text(machine_template())  # this shell has no `>`


class Hurried:
    """Replaces the module `time` in progress reports: the clock runs so many times as fast."""

    def __init__(self, times: float) -> None:
        self._times = times

    def monotonic(self) -> float:
        return self._times * time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@pytest.mark.slow
@pytest.mark.parametrize("times", in_turns([1, 1000], 3), ids=["as fast as this machine", "slow"])
def test_tutorial(reader: Reader, monkeypatch: pytest.MonkeyPatch, times: float) -> None:
    """The output on the page holds at any speed: a slow machine prints more lines, which also say when it will end."""
    pytest.importorskip("lm_eval", reason="needs the extra `evaluate`")
    monkeypatch.setattr(progress, "time", Hurried(times))
    write, pressed = MetricsWriter.write, []

    def write_and_press(writer: MetricsWriter, record: dict[str, Any], *more: Any) -> None:
        write(writer, record, *more)
        if record["step"] == STOPPED and not pressed:
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(MetricsWriter, "write", write_and_press)
    outside = reader.folder
    reader.read(ROOT / "docs" / "tutorial.md")
    # Neither README's folder nor that of `make demo` appears.
    assert [path.name for path in outside.iterdir()] == ["tutorial"]


def test_readme(reader: Reader) -> None:
    """A newcomer only needs the block of commands in README."""
    reader.read(ROOT / "README.md")
    assert {path.name for path in (reader.folder / "hello").iterdir()} == {
        "text",
        "data",
        "run.yaml",
        "run",
        "huggingface",
    }


@pytest.mark.in_turn(1, 2)
@pytest.mark.parametrize("name", ["checkpoints", "data-format"])
def test_pages_about_a_run(name: str, trained: Path, reader: Reader) -> None:
    shutil.copytree(trained, reader.folder, dirs_exist_ok=True)
    reader.read(ROOT / "docs" / f"{name}.md")


def test_page_about_the_configuration(trained: Path, reader: Reader) -> None:
    shutil.copytree(trained, reader.folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("runs"))
    reader.read(ROOT / "docs" / "config.md")


@pytest.mark.parametrize("name", in_turns(["pipeline", "resilience", "planner"], 3, always=2))
def test_pages_about_more_ranks(name: str, trained: Path, reader: Reader) -> None:
    pytest.importorskip("matplotlib", reason="the planner's page draws")
    shutil.copytree(trained / "data", reader.folder / "data")
    planned(reader.folder)
    reader.read(ROOT / "docs" / f"{name}.md")


def test_no_page_is_left_out() -> None:
    """Every page with steps is read. Some programs are tested elsewhere: those that download a published model, with
    small models in tests/hub; those on serving, in tests/hub/test_gguf.py; those on hooks, in
    tests/training/test_users_hooks.py; those on plugins, in tests/test_plugins.py; those on models of one's own, in
    tests/model/foreign/test_own_model.py; that on data, in tests/training/test_user_objects.py."""
    read = {
        "tutorial",
        "checkpoints",
        "data-format",
        "config",
        "planner",
        "pipeline",
        "resilience",
        "transformers",
        "serving",
        "hooks",
        "plugins",
        "own_model",
        "data",
    }
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.stem not in read]
    assert not [(page.name, step.line) for page in pages for step in steps(page)]


@pytest.mark.parametrize("name", ["README", "CONTRIBUTING", "SECURITY", "CODE_OF_CONDUCT", "CHANGELOG"])
def test_links_of_pages_beside_the_site(name: str) -> None:
    """Links of pages outside `docs/` work; mkdocs only checks the links inside."""
    text = (ROOT / f"{name}.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text)
    assert links
    links += [(path, "") for path in re.findall(r'(?:href|src|srcset)="([^"]*)"', text)]
    for path, anchor in links:
        assert (ROOT / path).exists(), path
        if anchor:
            headings = re.findall(r"^#+ (.*)", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, anchor


def test_contributing_names_files_and_targets_that_exist() -> None:
    """CONTRIBUTING names existing files and make targets. NAME in a path stands for a new file, so only its folder must
    exist."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE)) <= set(targets)
    words = {word for quoted in re.findall(r"`([^`\n]+)`", text) for word in quoted.split() if "/" in word}
    words = {word for word in words if not word.startswith(("SWEEP=", "build/"))}
    assert len(words) > 30
    paths = {word.partition("NAME")[0].rpartition("/")[0] if "NAME" in word else word for word in words}
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_features_name_files_that_exist() -> None:
    """Paths in the code and tests columns exist, at the root or below `optimus/`."""
    rows = re.findall(r"^\| (.* \| .*) \|$", (ROOT / "docs" / "features.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = {
        path for row in rows for path in re.findall(r"`([\w./-]+(?:/|\.py|\.yaml))`", " ".join(row.split(" | ")[2:4]))
    }
    assert len(named) > 200
    assert not sorted(
        path for path in named if not any((folder / path).exists() for folder in (ROOT, ROOT / "optimus"))
    )


def keys_of(section: Any, before: str = "") -> set[str]:
    """Returns every key of the configuration with its path, including sections."""
    found = set()
    for name, field in section.model_fields.items():
        found.add(before + name)
        for annotation in (field.annotation, *get_args(field.annotation)):
            each = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
            if isinstance(each, type) and issubclass(each, BaseModel):
                found |= keys_of(each, f"{before}{name}.")
    return found


def options(group: Any = None, name: str = "optimus") -> dict[str, set[str]]:
    """Returns the options of every command's parser by the command's name."""
    found = {}
    group = group or typer.main.get_command(cli.app)
    for own, each in group.commands.items():
        if hasattr(each, "commands"):
            found |= options(each, f"{name} {own}")
        else:
            words = {word for param in each.params for word in (*param.opts, *param.secondary_opts)}
            found[f"{name} {own}"] = {word for word in words if word.startswith("--")} - {"--help"}
    return found


def test_the_reference_of_commands_has_the_options_of_the_parser() -> None:
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    known = options()
    said = {}
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        name = section.partition("\n")[0].strip("`")
        said[name] = set(re.findall(r"--[\w-]+", " ".join(re.findall(r"^\| `(--[^`]*)`", section, re.MULTILINE))))
    benchmarks = {name for name in known if name.startswith("optimus bench ")} - said.keys()
    assert set(re.findall(r"`(optimus bench [\w-]+)`", text)) - said.keys() == benchmarks
    assert said.pop("optimus bench NAME") == set()
    assert said == {name: words - {"--json"} for name, words in known.items() if name not in benchmarks}
    assert all("--json" in words for words in known.values())  # as the page says


def test_options_on_the_pages_exist() -> None:
    """Every option on a page exists, and belongs to the command with which the page shows it."""
    known = options()
    everywhere = set().union(*known.values(), {"--help", "--version"})
    pages = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md")), *(ROOT / "docs").rglob("*.md")]
    found = set()
    for page in pages:
        text = page.read_text(encoding="utf-8")
        if not page.name.startswith("from-"):  # other trainers have theirs there (tests/test_migration.py)
            found |= (here := set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)))
            assert here <= everywhere | OF_OTHER_PROGRAMS.keys(), page
        for span in re.findall(r"`(optimus [^`]+)`", text):
            words = re.split(r"[\s=]+", span)
            name = next((" ".join(words[:n]) for n in (3, 2) if " ".join(words[:n]) in known), None)
            if name is not None:
                said = {word for word in words if word.startswith("--")} - {"--"}
                assert said <= known[name] | {"--help"}, (page, span)
    assert found >= OF_OTHER_PROGRAMS.keys()


def test_pages_name_tests_that_exist() -> None:
    there = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    named = set(re.findall(r"`(test_\w+)`", pages))
    assert len(named) > 20
    assert named <= there


def test_synonyms_lead_to_keys_that_exist_and_none_is_missing() -> None:
    known, sections = keys_of(RunConfig), set(RunConfig.model_fields)
    elsewhere = set()
    for row in re.findall(r"^\| (.*) \|$", (ROOT / "docs" / "synonyms.md").read_text(encoding="utf-8"), re.MULTILINE):
        theirs, ours, _ = row.split(" | ")
        elsewhere |= {re.sub(r"[^a-z0-9]", "", name.lower()) for name in re.split("[`,(]", theirs)}
        keys = [word.partition(":")[0] for word in re.findall(r"`([^`]+)`", ours)]
        assert not [key for key in keys if key.partition(".")[0] in sections and key not in known], row
    assert not set(other_names()) - elsewhere


def test_keys_in_the_tables_of_a_section_exist() -> None:
    """Tables headed by "Key of `section`" name keys of that section."""
    found = 0
    for page in (ROOT / "docs").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        for section, table in re.findall(r"^\| Key of `(\w+)` \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE):
            named = set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))
            assert named <= {*keys_of_section([section], RunConfig)}, page.name
            found += len(named)
    assert found > 10


def test_everything_public_is_in_the_reference_of_python() -> None:
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    for name in optimus.__all__:
        assert f"## `optimus.{name}`\n" in text
    for name in set(api.__all__) - set(optimus.__all__):
        assert f"## `optimus.api.{name}`\n" in text


def test_signatures_in_the_reference_of_python_have_every_parameter() -> None:
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^## `([\w.]+)`\n\n```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    for path, signature in shown.items():
        name = path.rpartition(".")[2]
        value = getattr(api, name)
        main = getattr(value, name) if inspect.ismodule(value) else value
        if not inspect.isclass(main):
            for parameter in inspect.signature(main).parameters.values():
                assert re.search(rf"[(,*\s]{parameter.name}: ", signature), f"{path} does not show {parameter}"
                assert parameter.kind != parameter.VAR_KEYWORD or f"**{parameter.name}" in signature
        assert "'RunConfig'" not in signature  # without quotes of the source


SMALLER_EXAMPLES = {  # replacements in the examples of docs/python.md, for a small run and small data
    "best=3": "best=1",
    "last=5": "last=2",
    "max_tokens=40": "max_tokens=4",
    '"class A"]': '"class A"], max_tokens=4',
    '"Once upon a time")': '"Once upon a time", max_tokens=4)',
    '"data", train_tokenizer=4096, context=256': '"prepared", train_tokenizer=400, context=32',
    '{"path": "data"}': '{"path": "prepared"}',
    '"sequence_length": 256': '"sequence_length": 32',
    "train.steps=500": "train.steps=2",
    '"steps": 300': '"steps": 2',
}
# One goes back to an earlier step, two train where the others read: after all others, in this order.
LAST_EXAMPLES = ["optimus.api.rollback", "optimus.train", "optimus"]
CONVERTER = """
import sys

class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        return "olmo"

def main():
    open(sys.argv[sys.argv.index("--outfile") + 1], "w").write(TextModel().get_vocab_base_pre(None))

if __name__ == "__main__":
    main()
"""


def examples_of_python() -> dict[str, str]:
    """Returns the example of each name on docs/python.md, and that of the package's docstring."""
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    examples = {}
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        name, blocks = section.partition("\n")[0], re.findall(r"^```py\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
        assert len(blocks) == 2, f"{name} has no example in its docstring"
        examples[name.strip("`")] = blocks[1]
    assert len(examples) == len({*optimus.__all__, *api.__all__})
    return examples | {"optimus": inspect.cleandoc((optimus.__doc__ or "").partition("Example:\n")[2])}


def in_a_readers_folder(trained: Path, folder: Path) -> None:
    """Writes everything that the examples name: a run and copies, texts, tasks, a published model, a converter."""
    shutil.copytree(trained, folder, dirs_exist_ok=True)
    for name in ("runs/a", "runs/b", "runs/web", "runs/math", "demo/run"):
        shutil.copytree(trained / "runs" / "first", folder / name)
    for name in ("texts", "held-out"):
        shutil.copytree(trained / "text", folder / name)
    files = {
        "chats.jsonl": json.dumps(
            {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]}
        ),
        "tasks/datasets/sciq.test.jsonl": json.dumps(
            {"question": "Which?", "support": "", "correct_answer": "a"}
            | {f"distractor{n}": "b" * n for n in (1, 2, 3)}
        ),
        "tokenizer/tokenizer.json": (trained / "data" / "tokenizer.json").read_text(encoding="utf-8"),
        "llama.cpp/convert_hf_to_gguf.py": CONVERTER,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    config = (folder / "first.yaml").read_text(encoding="utf-8")
    (folder / "first.yaml").write_text(config.replace("micro_batch: 8", "micro_batch: 4"), encoding="utf-8")
    optimus.export("runs/first", "olmoe")
    factors = ["train.freeze=[matrix, embedding, expert, router]", "train.lora_rank=2", "checkpoint.load_path=olmoe"]
    optimus.train("first.yaml", ["train.output=runs/low-rank", "train.steps=1", *factors])


def test_examples_of_python_run(trained: Path, reader: Reader) -> None:
    """The example of every public function and class runs, and what its last line computes is there. Hooks that examples
    define also take part in a run."""
    examples = examples_of_python()
    transformers = pytest.importorskip("transformers", reason="some examples load a model with it")
    assert all(any(printed in example for example in examples.values()) for printed in SMALLER_EXAMPLES)
    in_a_readers_folder(trained, reader.folder)
    hooks, failed = list[type[optimus.Hook]](), dict[str, str]()
    for name in [*(name for name in examples if name not in LAST_EXAMPLES), *LAST_EXAMPLES]:
        if name in LAST_EXAMPLES[1:]:
            shutil.rmtree("runs", ignore_errors=True)
        for printed, smaller in SMALLER_EXAMPLES.items():
            examples[name] = examples[name].replace(printed, smaller)
        names = {"optimus": optimus, "api": api, "torch": torch, "transformers": transformers}
        *first, last = ast.parse(examples[name]).body
        try:
            exec(compile(ast.Module(first, []), name, "exec"), names)
            if isinstance(last, ast.Expr):
                assert eval(compile(ast.Expression(last.value), name, "eval"), names) is not None
            else:
                exec(compile(ast.Module([last], []), name, "exec"), names)
        except Exception as error:
            failed[name] = "".join(traceback.format_exception(error))
        hooks += [each for each in names.values() if isinstance(each, type) and issubclass(each, optimus.Hook)]
    assert not failed, "\n".join(failed.values())
    assert len(hooks) == 4
    optimus.train("first.yaml", ["train.output=runs/hooked", "train.steps=1"], hooks=hooks)


def test_everything_that_is_excepted_is_there() -> None:
    """Every exception still occurs on a page."""
    texts = [step.text for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")] for step in steps(page)]
    for beginning in [*NOT_RUN, *ANY_TEXT]:
        assert any(text.startswith(beginning) for text in texts), beginning
    for printed in SMALLER:
        assert any(printed in text for text in texts), printed


def test_numbers_may_differ_and_words_may_not() -> None:
    assert masked("step 148: loss 5.4795, 7,136 tokens/s 63.4 MiB") == masked("step 6: loss 8, 71 tokens/s 3 KiB")
    assert masked("Model [773, 221, 1e-05]") == masked("Model [1]")
    fast, slow = "training: 5/9 loss 2 63 MB", "training: 6/9 loss 1 71 MB  about 21 s left, until 02:24"
    assert masked(fast) == masked(slow) == masked(slow.replace("21 s", "3 d").replace("02", "2026-11-28 02"))
    assert masked("9 tokens in all, 3 s this time") == masked("9 tokens in all, 12 min this time")
    assert masked("about 21 s left, until 02:24, at 1 s a step") != masked("")
    assert missing(["a 1", "...", "c"], "a 2\nb\nc") is None
    assert missing(["c", "a"], "a\nb\nc") == "a"
    assert missing(["loss 1"], "Loss 1") == "loss 1"
