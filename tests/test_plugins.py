"""Plugins add rows to the library's tables from a module of their own, and only if somebody names them."""

import json
import mailbox
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import optimus
from helpers.plugin_tables import tables_restored
from helpers.sweep import in_turns
from helpers.wheels import build_wheel, install
from optimus import plugins
from optimus.config import load_config
from optimus.errors import UserError
from optimus.model.transformer import Transformer
from optimus.observe.metrics import MetricsWriter, read_metrics
from optimus.observe.sinks import check_sinks
from optimus.optim.rule import Rule
from optimus.pipeline.schedules import make_schedule
from optimus.resolve.rules import rules_of

ROOT = Path(__file__).resolve().parents[1]
RUN: dict[str, Any] = {
    "model": "mula-tiny",
    "data": {"path": "data"},
    "train": {"output": "run", "steps": 4, "global_batch": 4, "micro_batch": 2, "sequence_length": 16}
    | {"precision": "float32"},
}

ROWS = """
    from dataclasses import dataclass
    from optimus.extend import *
    from optimus.pipeline.schedules.gpipe import gpipe
    from optimus.comm.schedules import ring

    @dataclass(frozen=True, kw_only=True)
    class Sgd(UpdateRule):
        kinds = ("sgd.momentum",)
        momentum: float
        def apply(self, now, tile):
            tile.moments[0].mul_(self.momentum).add_(tile.gradient)
            tile.weight.sub_(tile.moments[0], alpha=self.rate(now))

    ROWS = [
        RuleRow("sgd", Sgd),
        LrRow("halves", lambda rule, step: rule.peak * 0.5 ** (step // rule.options["every"]), {"every": 2}),
        ScheduleRow("made-up", gpipe, live=lambda sizes, rank: sizes.microbatches),
        AllGatherRow("my-ring", lambda rank, shape: ring(rank, shape.ranks)),
    ]
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Writes a module that is importable during the test, and forgotten after it."""
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def write(name: str, source: str) -> str:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        names.append(name)
        return name

    with tables_restored():
        yield write
    for name in names:
        sys.modules.pop(name, None)


def test_rows_of_a_plugin_are_rows_of_the_tables(module: Any) -> None:
    named = {"optimizer": {"name": "sgd", "options": {"momentum": 0.5}}, "lr_schedule": {"name": "halves"}}
    named |= {"parallel": {"schedule": "made-up", "pipeline": 2}}
    with pytest.raises(UserError) as refused:
        load_config(RUN | named)
    assert "'optimizer.name' is 'sgd': it must be 'adamw', 'muon', 'lion' or 'schedule-free'" in str(refused.value)
    config = load_config(RUN | named | {"plugins": [module("rows", ROWS)]})
    assert config.optimizer.name == "sgd"
    assert config.lr_schedule.name == "halves"
    assert make_schedule("made-up", 3, 5).ranks == 3
    from optimus.comm.algorithms import names
    from optimus.comm.schedules import Shape

    assert "my-ring" in names("all_reduce", Shape(1, 4))


def test_an_override_names_a_plugin_before_what_it_adds(module: Any) -> None:
    module("rows", ROWS)
    config = load_config(RUN, ["lr_schedule.name=halves", "plugins=[rows]"])
    assert config.lr_schedule.name == "halves"


def test_plugins_of_included_files_are_joined(module: Any, tmp_path: Path) -> None:
    module("rows", ROWS)
    module("others", "from optimus.extend import LrRow\nROWS = [LrRow('flat', lambda rule, step: rule.peak)]")
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(RUN | {"plugins": ["rows"], "lr_schedule": {"name": "halves"}}))
    (tmp_path / "run.yaml").write_text("include: base.yaml\nplugins: [others]\nlr_schedule: {name: flat}\n")
    assert load_config(tmp_path / "run.yaml").plugins == ["rows", "others"]


def test_a_file_of_a_run_imports_nothing(module: Any, tmp_path: Path) -> None:
    module("rows", ROWS)
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump(RUN | {"plugins": ["rows"], "lr_schedule": {"name": "halves"}})
    )
    with pytest.raises(
        UserError, match=r"written with the plugin rows, which is loaded only if named: add `plugins=rows`"
    ):
        load_config(tmp_path / "config.yaml", of_run=True)
    assert "rows" not in sys.modules
    plugins.load_plugins(["rows"])
    assert load_config(tmp_path / "config.yaml", of_run=True).lr_schedule.name == "halves"


def test_loading_twice_is_loading_once(module: Any) -> None:
    first = plugins.load_plugins([module("rows", ROWS)])
    assert plugins.load_plugins(["rows"]) == first == plugins.loaded_plugins()
    assert first[0].module == "rows"
    assert first[0].version is None
    assert len(first[0].sha256) == 64


WRONG = {
    "no module": (None, "plugins: rows cannot be imported (ModuleNotFoundError: No module named 'rows')"),
    "an error": ("1 / 0", "plugins: rows cannot be imported (ZeroDivisionError: division by zero)"),
    "an error of two lines": (
        "raise ValueError('one\\ntwo')",
        "plugins: rows cannot be imported (ValueError: one two): name an entry point",
    ),
    "a name that is a list": (
        "from optimus.extend import LossRow\nROWS = [LossRow(['x'], len)]",
        "plugins: rows: loss: its name is ['x']: give a text",
    ),
    "a row without a name": (
        "from optimus.extend import SinkRow\nROWS = [SinkRow(None, None)]",
        "plugins: rows: metric sink: its name is None: give a text",
    ),
    "an empty name": (
        "from optimus.extend import LossRow\nROWS = [LossRow('', len)]",
        "plugins: rows: loss: its name is '': give a text",
    ),
    "an exit": ("raise SystemExit(3)", "plugins: rows cannot be imported (SystemExit: 3)"),
    "no rows": ("", "plugins: rows: rows has no list `ROWS`"),
    "another object": ("ROWS = [3]", "plugins: rows: 3 in `ROWS` is no row of a table"),
    "a name of ours": (
        "from optimus.extend import LrRow\nROWS = [LrRow('cosine', lambda rule, step: 0.0)]",
        "plugins: rows: there is a learning-rate schedule 'cosine' already",
    ),
    "one name twice": (
        "from optimus.extend import LrRow\nROWS = [LrRow('x', lambda rule, step: 0.0)] * 2",
        "plugins: rows: there is a learning-rate schedule 'x' already",
    ),
    "rounds that raise a ValueError": (
        "from optimus.extend import AllGatherRow\nROWS = [AllGatherRow('x', lambda rank, shape: int('a'))]",
        "plugins: rows: all-gather algorithm: the rounds of 'x' are wrong on 1x2 ranks: invalid literal for int()",
    ),
    "rounds that lose a block": (
        "from optimus.extend import AllGatherRow\nROWS = [AllGatherRow('x', lambda rank, shape: [])]",
        "plugins: rows: all-gather algorithm: the rounds of 'x' are wrong on 1x2 ranks: a block is missing",
    ),
    "rounds that raise": (
        "from optimus.extend import AllToAllRow\nROWS = [AllToAllRow('x', lambda rank, shape: shape.nope)]",
        "plugins: rows: all-to-all algorithm: the rounds of 'x' are wrong on 1x2 ranks: AttributeError: 'Shape' object "
        "has no attribute 'nope'",
    ),
    "the backend's name": (
        "from optimus.extend import AllGatherRow\nROWS = [AllGatherRow('own', lambda rank, shape: [])]",
        "plugins: rows: all-gather algorithm: the name 'own' means an algorithm without rounds",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_plugin_is_one_message_and_adds_nothing(case: str, module: Any) -> None:
    source, message = WRONG[case]
    if source is not None:
        module("rows", source)
    before = [dict(table) for table in plugins._TABLES if table.what == "learning-rate schedule"]
    with pytest.raises(UserError) as refused:
        plugins.load_plugins(["rows"])
    assert message in str(refused.value)
    assert [dict(table) for table in plugins._TABLES if table.what == "learning-rate schedule"] == before
    assert not plugins.loaded_plugins()


def installed(folder: Path, package: str, entry: str) -> None:
    """Writes what an installed package of this name has, with the entry point `example = ENTRY`."""
    about = folder / f"{package}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[optimus.plugins]\nexample = {entry}\n")


@pytest.mark.parametrize("entry", ["rows", "rows:ROWS", "rows [extra]"])
def test_an_entry_point_is_the_name_of_its_module(entry: str, module: Any, tmp_path: Path) -> None:
    module("rows", ROWS)
    installed(tmp_path, "first", entry)
    (plugin,) = plugins.load_plugins(["example"])
    assert (plugin.name, plugin.module) == ("example", "rows")


def test_an_entry_point_of_two_packages_is_refused(module: Any, tmp_path: Path) -> None:
    module("rows", ROWS)
    installed(tmp_path, "first", "rows")
    installed(tmp_path, "second", "others")
    with pytest.raises(UserError) as refused:
        plugins.load_plugins(["example"])
    said = str(refused.value)
    assert said.startswith("plugins: example: the entry points ")
    assert "rows of first" in said
    assert "others of second" in said
    assert plugins.load_plugins(["rows"])[0].module == "rows"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plugins": "rows"}, "plugins is 'rows': give a list of modules or entry points"),
        ({"optimizer": {"name": "sgd"}}, "optimizer.options.momentum is missing: the update rule sgd needs it"),
        (
            {"optimizer": {"name": "sgd", "options": {"momentun": 0.9}}},
            "optimizer.options.momentun: sgd has no such hyperparameter: did you mean 'momentum'?",
        ),
        ({"optimizer": {"options": {"x": 1.0}}}, "optimizer.options.x: adamw has no such hyperparameter: remove it"),
        (
            {"lr_schedule": {"name": "halves", "options": {"evry": 1}}},
            "lr_schedule: options.evry: the halves schedule has no such parameter: did you mean 'every'?",
        ),
        ({"lr_schedule": {"name": "halve"}}, "'lr_schedule.name' is 'halve': it must be 'cosine'"),
    ],
)
def test_wrong_options_are_named(change: dict[str, Any], message: str, module: Any) -> None:
    module("rows", ROWS)
    with pytest.raises(UserError) as refused:
        rules_of_run(RUN | {"plugins": ["rows"]} | change)
    assert message in str(refused.value)


def rules_of_run(raw: dict[str, Any]) -> dict[str, Rule]:
    config = load_config(raw)
    with torch.device("meta"):
        return rules_of(config.optimizer, Transformer(config.model))


SINKS = """
    from optimus.extend import SinkRow

    class Fails:
        def __init__(self, folder, config, after_step):
            self.folder = folder
        def write(self, record):
            if record["step"] == 2:
                raise OSError("the line is cut")
        def close(self):
            with (self.folder / "closed").open("a") as file:
                file.write("closed ")

    ROWS = [SinkRow("fails", Fails)]
"""


def test_a_sink_that_fails_is_closed_and_dropped(
    module: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    observe = {"tensorboard": False, "sinks": [module("sinks", SINKS) and "fails"]}
    writer = MetricsWriter(tmp_path, load_config(RUN | {"plugins": ["sinks"], "observe": observe}), 0)
    for step in (1, 2, 3):
        writer.write({"step": step, "loss": 1.0})
    writer.close()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert (tmp_path / "closed").read_text(encoding="utf-8") == "closed "
    assert "the metric sink fails failed (OSError: the line is cut): from step 2 on, it gets no metrics" in said
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]
    with pytest.raises(UserError, match=r"observe\.sinks: metric sink 'fail' does not exist; did you mean 'fails'\?"):
        check_sinks(load_config(RUN | {"plugins": ["sinks"], "observe": observe | {"sinks": ["fail"]}}))


FAILING_SINK = """
    from optimus.extend import SinkRow

    class Fails:
        def __init__(self, *_):
            self.fail("make")
        def write(self, record):
            self.fail("write")
        def close(self):
            self.fail("close")
        def fail(self, method):
            if method == "METHOD":
                raise ERROR

    ROWS = [SinkRow("fails", Fails)]
"""


@pytest.mark.parametrize(("error", "said"), [("OSError('a\\nb')", "OSError: a b"), ("SystemExit(3)", "SystemExit: 3")])
@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("make", "the metric sink fails cannot be made ({}): it gets no metrics; metrics.jsonl has them"),
        ("write", "the metric sink fails failed ({}): from step 1 on, it gets no metrics; metrics.jsonl has them"),
        ("close", "the metric sink fails failed at its end ({})"),
    ],
)
def test_a_sink_that_fails_anywhere_is_one_message(
    method: str, message: str, error: str, said: str, module: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module("sinks", FAILING_SINK.replace("METHOD", method).replace("ERROR", error))
    observe = {"tensorboard": False, "sinks": ["fails"]}
    writer = MetricsWriter(tmp_path, load_config(RUN | {"plugins": ["sinks"], "observe": observe}), 0)
    for step in (1, 2):
        writer.write({"step": step, "loss": 1.0})
    writer.close()
    assert capsys.readouterr().err == f"{message.format(said)}\n"
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]


READERS = """
    from optimus.extend import record_reader

    def records(file):
        for number, line in enumerate(file):
            if line.startswith(b"bad"):
                raise ValueError("it is bad")
            yield {b"three\\n": 3, b"none\\n": None}.get(line, {"text": line.decode()})

    ROWS = [record_reader("lines", (".lines",), records)]
"""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"good\nbad\n", "the reader lines failed after 1 records (ValueError: it is bad)"),
        (b"good\ngood\nthree\n", "record 3 of the reader lines is no text or mapping: 3"),
        (b"good\nnone\ngood\n", "record 2 of the reader lines is no text or mapping: None"),
    ],
)
def test_a_reader_that_fails_is_named(content: bytes, message: str, module: Any, tmp_path: Path) -> None:
    (tmp_path / "in.lines").write_bytes(content)
    with pytest.raises(UserError, match=r"in\.lines") as refused:
        optimus.prepare(
            [tmp_path / "in.lines"], tmp_path / "out", train_tokenizer=300, plugins=[module("reading", READERS)]
        )
    assert message in str(refused.value)


def test_a_reader_that_is_no_generator_is_named(module: Any, tmp_path: Path) -> None:
    (tmp_path / "in.rec").write_text("not json")
    source = """
        import json
        from optimus.extend import record_reader
        ROWS = [record_reader("rec", (".rec",), lambda file: json.load(file))]
    """
    plugins = [module("rec_reader", source)]
    with pytest.raises(UserError, match=r"the reader rec failed after 0 records \(JSONDecodeError"):
        optimus.prepare([tmp_path / "in.rec"], tmp_path / "out", train_tokenizer=300, plugins=plugins)


@pytest.mark.parametrize(("how", "got"), [("", "c3a9"), (", binary=True", "e9")])
def test_a_reader_of_binary_files_gets_their_own_bytes(how: str, got: str, module: Any, tmp_path: Path) -> None:
    (tmp_path / "in.bin").write_bytes("é".encode("cp1252"))
    source = f"""
        from optimus.extend import record_reader
        def records(file):
            raise ValueError(file.read().hex())
        ROWS = [record_reader("bin", (".bin",), records{how})]
    """
    given = {"train_tokenizer": 300, "encoding": "cp1252", "plugins": [module(f"bin_reader_{got}", source)]}
    with pytest.raises(UserError, match=rf"the reader bin failed after 0 records \(ValueError: {got}\)"):
        optimus.prepare([tmp_path / "in.bin"], tmp_path / "out", **given)


def test_reptile_goes_around_rules_with_counters_and_refuses_averages(module: Any) -> None:
    source = """
        from dataclasses import dataclass
        from optimus.extend import RuleRow, UpdateRule

        @dataclass(frozen=True, kw_only=True)
        class Counting(UpdateRule):
            counters = ("sum",)
            def count(self, counters, step, lr):
                return {"sum": counters["sum"] + lr}
            def apply(self, now, tile):
                tile.weight.sub_(tile.gradient, alpha=now.counters["sum"])

        @dataclass(frozen=True, kw_only=True)
        class Averaging(UpdateRule):
            averages = True
            def apply(self, now, tile): ...

        ROWS = [RuleRow("counting", Counting), RuleRow("averaging", Averaging)]
    """
    change = {"plugins": [module("around", source)]}
    rules = rules_of_run(RUN | change | {"optimizer": {"name": "counting", "reptile_every": 2}})
    assert {rule.counters for rule in rules.values() if rule.trains} == {("sum",)}
    assert next(iter(rules.values())).count({"sum": 1.0}, 3, 0.5) == {"sum": 1.5}
    with pytest.raises(UserError, match=r"optimizer\.reptile_every: averaging averages its weights already"):
        rules_of_run(RUN | change | {"optimizer": {"name": "averaging", "reptile_every": 2}})


def test_the_page_about_plugins(module: Any) -> None:
    """The module of docs/plugins.md adds the rule that its configuration chooses."""
    text = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    python, config = (text.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("python", "yaml"))
    module("rules_of_page", python)
    raw = yaml.safe_load(config.replace("my_package.rules", "rules_of_page"))
    rules = rules_of_run(RUN | raw)
    assert {(type(rule).__name__, rule.momentum) for rule in rules.values()} == {("Sgd", 0.95)}  # type: ignore[attr-defined]


# ---- The example, installed ----


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a process that finds Optimus and the example as installed packages, and no checkout."""
    folder = tmp_path_factory.mktemp("installed")
    library = build_wheel(
        ROOT, ["optimus", "pyproject.toml", "README.pypi.md", "LICENSE"], tmp_path_factory.mktemp("library")
    )
    names = ["pyproject.toml", "README.md", "optimus_example"]
    example = build_wheel(ROOT / "examples" / "plugin", names, tmp_path_factory.mktemp("example"))
    install(folder, library, example)
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    """A folder with prepared mail, and with a run on two ranks that uses all rows of the example."""
    folder = tmp_path_factory.mktemp("run")
    box = mailbox.mbox(folder / "letters.mbox")
    for number in range(300):
        letter = mailbox.mboxMessage()
        letter["Subject"] = f"Letter {number}"
        letter.set_payload(f"This is the text of letter {number}, which says what letter {number - 1} did not.")
        box.add(letter)
    box.flush()
    model = {"family": "seed_oss", "hidden": 16, "layers": 2, "heads": 4, "kv_heads": 2, "head_size": 8}
    model |= {"intermediate": 32, "vocab": 320}
    config = RUN | {
        "plugins": ["example"],
        "model": model,
        "train": RUN["train"] | {"hooks": ["early-stop"]},
        "optimizer": {"name": "sgd", "options": {"momentum": 0.8}},
        "lr_schedule": {"name": "step", "options": {"every": 2}, "warmup_steps": 1, "lr": 0.1, "min_lr": 0.001},
        "checkpoint": {"every": 2},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    prepare = "prepare letters.mbox --output data --train-tokenizer 300 --context 16 --workers 1 --plugin example"
    assert run(folder, environment, prepare).returncode == 0
    trained = run(folder, environment, "train run.yaml --ranks 2")
    assert trained.returncode == 0, trained.stderr
    return folder


def run(folder: Path, environment: dict[str, str], words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of the installed package."""
    command = [sys.executable, "-m", "optimus", *words.split()]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_two_ranks_train_with_the_example_like_one(folder: Path, environment: dict[str, str]) -> None:
    one = run(folder, environment, "train run.yaml train.output=one")
    assert one.returncode == 0, one.stderr
    losses = [
        [json.loads(line)["loss"] for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("run", "one")
    ]
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    recorded = json.loads((folder / "run" / "environment.jsonl").read_text())["plugins"]
    described = json.loads((folder / "run" / "checkpoints" / "step-00000004" / "checkpoint.json").read_text())[
        "plugins"
    ]
    assert recorded == described
    assert (recorded[0]["name"], recorded[0]["module"], recorded[0]["version"]) == ("example", "optimus_example", "1.0")


WITH_A_SPARE = """
import json, sys
from pathlib import Path
from optimus.launch.nodes import NodeJob
from optimus.testing.faults import FaultPlan
from optimus.testing.lab import rehearse

FaultPlan().kill_agent(1, 3).write(Path("plan.yaml"))
job = NodeJob(Path("run.yaml"), ["train.output=spare"], 2, 1, 1, (1, 4), 60.0)
print(json.dumps(rehearse(job, inject=Path("plan.yaml"), limit=240.0, plain=True)))
"""


@pytest.mark.in_turn(1, 3)
def test_a_spare_takes_over_with_the_example(folder: Path, environment: dict[str, str]) -> None:
    """Three nodes load the plugin from the wheel; the spare replaces the node that is killed in the third step."""
    done = subprocess.run(
        [sys.executable, "-c", WITH_A_SPARE], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["finished"]
    assert [event["kind"] for event in result["events"] if event["kind"] != "injected"] == [
        "failure",
        "restart",
        "recovered",
        "finished",
    ]
    losses = [
        [json.loads(line)["loss"] for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("run", "spare")
    ]
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    "command",
    in_turns(
        [
            "evaluate run --text letters.txt",
            "generate run --prompt Letter --max-tokens 4",
            "export run --output hf-{}",
            "merge run/checkpoints/step-00000002 run/checkpoints/step-00000004 --output merged-{}",
        ],
        2,
        always=1,
    ),
)
def test_what_reads_its_checkpoints_asks_for_the_plugin(
    command: str, folder: Path, environment: dict[str, str]
) -> None:
    (folder / "letters.txt").write_text("This is the text of a letter.\n" * 20)
    refused = run(folder, environment, command.format("a"))
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "family 'seed_oss' is unknown" in refused.stderr
    assert "(written with the plugin example, which is loaded only if named: add --plugin example)" in refused.stderr
    done = run(folder, environment, f"{command.format('b')} --plugin example")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.in_turn(0, 3)
def test_an_export_of_its_family_is_what_transformers_computes(
    folder: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "SeedOssForCausalLM"):
        pytest.skip("this version of transformers has no Seed-OSS")
    assert run(folder, environment, "export run --output hf --plugin example").returncode == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf")
    monkeypatch.syspath_prepend(ROOT / "examples" / "plugin")
    tokens_BS = torch.arange(24).view(2, 12)
    with tables_restored():
        ours = optimus.load_model(folder / "run", plugins=["optimus_example"])
        found_BSV = ours(tokens_BS)
        imported = optimus.import_folder(folder / "hf", folder / "imported", plugins=["optimus_example"])
    sys.modules.pop("optimus_example")
    assert imported["family"] == "seed_oss"
    torch.testing.assert_close(found_BSV, theirs(tokens_BS).logits.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.in_turn(1, 3)
def test_plans_and_checks_know_it(folder: Path, environment: dict[str, str]) -> None:
    planned = run(folder, environment, "plan run.yaml --machine dgx-h100 --ranks 2 --best 1")
    assert planned.returncode == 0, planned.stderr
    checked = run(folder, environment, "train run.yaml train.output=other --check")
    assert checked.returncode == 0, checked.stderr


@pytest.mark.in_turn(0, 3)
def test_a_plugin_that_has_changed_is_noted(folder: Path, environment: dict[str, str]) -> None:
    same = run(folder, environment, "generate run --prompt Letter --max-tokens 2 --plugin example")
    assert same.stderr == ""
    module = Path(environment["PYTHONPATH"]) / "optimus_example" / "sgd.py"
    source = module.read_text()
    try:
        module.write_text(f"{source}\n# mended\n")
        read = run(folder, environment, "export run --output hf-changed --plugin example")
        resumed = run(folder, environment, "train run.yaml train.steps=5 --resume")
    finally:
        module.write_text(source)
    assert (read.returncode, resumed.returncode) == (0, 0)
    for said in (read.stderr, resumed.stderr + resumed.stdout):
        assert "the plugin example has changed since run/checkpoints/step-00000004 was written" in said
