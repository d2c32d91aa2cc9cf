"""The configurations in `examples/` are read without warnings, fit the machines that they are for, and train."""

import math
import re
import shlex
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from helpers.sweep import in_turns
from helpers.trained import train_here
from optimus import api, cli
from optimus.config import load_config
from optimus.config.load import dump_config
from optimus.observe.metrics import read_metrics
from optimus.plan.prediction import dry_run
from optimus.plan.report import verdict
from optimus.testing import run_ranks
from optimus.training.summary import warnings

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples"
sys.path.insert(0, str(FOLDER))
import plans  # noqa: E402

NAMES = [example.name for example in plans.EXAMPLES]
CONTEXT = 32

OLMO = "{family: olmo2, hidden: 32, layers: 2, heads: 2, intermediate: 64, vocab: 400}"
LLAMA = "{family: llama, hidden: 32, layers: 2, heads: 2, intermediate: 64, vocab: 400}"
SPARSE = (
    "{family: olmoe, hidden: 32, layers: 2, heads: 2, intermediate: 32, experts: 8, experts_per_token: 2, vocab: 400}"
)
SHORT = ["train.steps=2", f"train.sequence_length={CONTEXT}", "lr_schedule.warmup_steps=1"]
# By example: the ranks, and the sizes that are smaller. All else is as written, the layout too.
SMALLER: dict[str, tuple[int, list[str]]] = {
    "laptop.yaml": (4, SHORT),
    "one-node.yaml": (
        2,
        [*SHORT, f"model={OLMO}", "train.tokens=null", "train.global_batch=32", "lr_schedule.cooldown_steps=1"],
    ),
    "moe-four-nodes.yaml": (4, [*SHORT, f"model={SPARSE}", "train.tokens=null", "train.global_batch=32"]),
    "continued-pretraining.yaml": (2, [*SHORT, "train.tokens=null", "train.global_batch=8"]),
    "chat.yaml": (1, [*SHORT, "train.global_batch=8"]),
}
OF_HUB = {"Llama-3.1-8B": LLAMA, "OLMo-2-0425-1B-Instruct": OLMO}  # folders that a reader downloads


def commands(name: str) -> list[list[str]]:
    """Returns the commands in the first lines of an example."""
    head = (FOLDER / name).read_text(encoding="utf-8").partition("\n\n")[0]
    return [shlex.split(text) for text in re.findall(r"^#   (\S.*)$", head, re.MULTILINE)]


def call(words: list[str]) -> None:
    """Runs a command in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        code: Any = None
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
    if code:
        pytest.fail(f"{words} has failed")


def keys_in(tree: Any, before: str = "") -> set[str]:
    """Returns the dotted names of the keys that a file sets; a section's own name stands for its short form."""
    if isinstance(tree, list):
        return set().union(*(keys_in(each, before) for each in tree))
    if not isinstance(tree, dict):
        return {before}
    return set().union(*(keys_in(value, f"{before}.{key}" if before else key) for key, value in tree.items()))


def smaller(name: str) -> list[str]:
    """Returns the overrides of an example's small copy."""
    options, tree = SMALLER[name][1], yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    sets = [{**each, "every": 1} | ({"max_bytes": 500} if "text" in each else {}) for each in tree["validation"]]
    return [*options, f"validation={yaml.safe_dump(sets, default_flow_style=True, width=1000).strip()}"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the inputs that the commands of the examples name."""
    folder = tmp_path_factory.mktemp("inputs")
    some = "".join(f"line {number} of {number % 7} says {number**2 % 1000}\n" for number in range(4000))
    for path in ("text/train", "text/held-out", "new", "general", "held-out/new", "held-out/general"):
        (folder / path).mkdir(parents=True)
        (folder / path / "some.txt").write_text(some, encoding="utf-8")
    chat = '{"messages": [{"role": "user", "content": "%d?"}, {"role": "assistant", "content": "says %d"}]}\n'
    chats = "".join(chat % (number, number**2) for number in range(400))
    (folder / "chats.jsonl").write_text(chats, encoding="utf-8")
    (folder / "held-out.jsonl").write_text(chats, encoding="utf-8")
    first = folder / "first"
    words = f"optimus prepare {folder / 'new'} --output {first / 'data'} --train-tokenizer 400 --context {CONTEXT}"
    call([*words.split(), "--workers", "1"])
    for name, model in OF_HUB.items():
        train = {
            "output": str(first / name),
            "steps": 1,
            "global_batch": 2,
            "micro_batch": 2,
            "sequence_length": CONTEXT,
        }
        config = {"model": yaml.safe_load(model), "data": {"path": str(first / "data")}, "train": train}
        api.train(config, ["observe.report=false"])
        api.export(str(first / name), str(folder / name))
    (folder / "tokenizer.json").write_bytes((folder / "Llama-3.1-8B" / "tokenizer.json").read_bytes())
    return folder


def prepared(name: str, texts: Path, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Enters a new folder with the inputs, and runs the commands that prepare the example's data."""
    patch.chdir(folder)
    for path in texts.iterdir():
        (folder / path.name).symlink_to(path)
    for words in commands(name):
        if words[:2] == ["optimus", "prepare"] and "--preview" not in words:
            assert words[words.index("--context") + 1] == str(sequence_length(name))
            words[words.index("--context") + 1] = str(CONTEXT)
            words = [
                {"4096": "400", "allenai/OLMo-2-0425-1B": "OLMo-2-0425-1B-Instruct"}.get(word, word) for word in words
            ]
            call([*words, "--workers", "1"])


def sequence_length(name: str) -> int:
    """Returns the sequence length of an example as written."""
    length: int = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))["train"]["sequence_length"]
    return length


def train_two_steps(text: str) -> list[float]:
    """Trains on each rank; returns the losses of the steps."""
    trainer = train_here(load_config(yaml.safe_load(text)))
    return [each["loss"] for each in read_metrics(trainer.folder)]


@pytest.mark.parametrize("name", NAMES)
def test_keys_are_in_the_reference_and_comments_give_reasons(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    reference = set(re.findall(r"^\| `([\w.]+)` \|", (ROOT / "docs" / "config.md").read_text("utf-8"), re.MULTILINE))
    found = keys_in(yaml.safe_load(text))
    assert len(found) > 6
    assert found <= reference | {"model"}, found - reference
    assert f"`{name}`" in (FOLDER / "README.md").read_text(encoding="utf-8")
    assert text.count(" # ") >= 6


@pytest.mark.parametrize("name", NAMES)
def test_commands_have_the_options_that_they_name(name: str) -> None:
    found = [words for words in commands(name) if words[0] == "optimus"]
    assert {"prepare", "train"} <= {words[1] for words in found} | ({"train"} if "four-nodes" in name else set())
    for _, *words in found:
        command: Any = typer.main.get_command(cli.app)
        command = command.commands[words[0]]
        command.make_context(words[0], words[1:])
        if words[0] in ("train", "launch"):
            assert words[1] == name
    ranks = next(example.ranks for example in plans.EXAMPLES if example.name == name)
    started = " ".join(found[-1] if "launch" in found[-1] else next(each for each in found if each[1] == "train"))
    said = {int(number) for number in re.findall(r"--(?:ranks|nodes|ranks-per-node) (\d+)", started)}
    assert math.prod(said) == ranks


def test_links_of_the_page_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)", (FOLDER / "README.md").read_text(encoding="utf-8"))
    assert set(NAMES) < set(links)
    assert all((FOLDER / link).exists() for link in links)


def shown(command: str) -> str:
    """Returns what the page shows of a command."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8").partition(f"$ {command}\n")[2]
    assert text, command
    return text.partition("\n...\n")[0]


_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def same_within_rounding(one: str, other: str) -> bool:
    """Returns whether two texts have the same words, and numbers that differ by one in their last place at most.

    A number without its last zeros has the places of the other. Columns may be wider.
    """

    def unit(number: Decimal) -> Decimal:
        return Decimal(1).scaleb(int(number.as_tuple().exponent))

    words, others = (re.sub(r"[\s─]+", " ", _NUMBER.sub("#", text)) for text in (one, other))
    numbers = [
        tuple(Decimal(each.replace(",", "")) for each in pair)
        for pair in zip(_NUMBER.findall(one), _NUMBER.findall(other))
    ]
    return words == others and all(abs(a - b) <= min(unit(a), unit(b)) for a, b in numbers)


def test_texts_are_compared() -> None:
    assert same_within_rounding("1  dp4  5.313 s, 24,773", "1  dp4    5.314 s, 24,774")
    assert same_within_rounding("12 s", "12 s")
    assert not same_within_rounding("dp4 5.313 s", "dp4 5.315 s")
    assert not same_within_rounding("dp4 5.313 s", "tp4 5.313 s")
    assert not same_within_rounding("2 rows", "2 rows 3")


@pytest.mark.parametrize("example", plans.EXAMPLES, ids=NAMES)
def test_examples_fit_their_machines_and_take_what_the_page_says(example: plans.Example) -> None:
    """The planner resolves the run with the facts of the machine file, as `--check` does with those of a machine."""
    assert warnings(load_config(FOLDER / example.name, example.overrides), None) == []
    (plan,) = api.plan(
        FOLDER / example.name, example.overrides, machine=example.machine, ranks=example.ranks, as_is=True
    ).plans
    for rank in {0, example.ranks - 1}:
        fits, said = verdict(sum(dry_run(plan.job, rank).values()), plan.job)
        assert fits, said
    printed, page = example.printed(as_is=True), shown(example.command(as_is=True))
    assert same_within_rounding(printed, page), f"run `python examples/plans.py`:\n{printed}\n{page}"


@pytest.mark.parametrize("example", in_turns(plans.EXAMPLES, 5, always=1))
def test_best_layouts_are_those_on_the_page(example: plans.Example) -> None:
    printed, page = example.printed(as_is=False), shown(example.command(as_is=False))
    assert same_within_rounding(printed, page), f"run `python examples/plans.py`:\n{printed}\n{page}"


@pytest.mark.parametrize("name", NAMES)
def test_examples_train(name: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps on small data with smaller sizes, in the layout as written, after the check of a start."""
    prepared(name, texts, tmp_path, monkeypatch)
    ranks, options = SMALLER[name][0], smaller(name)
    config = api.config(FOLDER / name, options)
    written = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    for section in ("parallel", "state", "moe", "checkpoint"):
        for key, value in written.get(section, {}).items():
            assert getattr(getattr(config, section), key) == value
    checked = api.train(FOLDER / name, options, ranks=ranks, check=True)
    assert checked["ok"]
    assert checked["warnings"] == []
    first, *others = run_ranks(train_two_steps, ranks, dump_config(config))
    assert len(first) == 2
    assert all(math.isfinite(loss) for loss in first)
    assert all(each == first for each in others)
