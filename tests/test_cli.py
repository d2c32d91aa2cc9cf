"""The commands as a shell runs them: output, failures, and imported modules."""

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from optimus import cli
from optimus.config import preset_names

ROOT = Path(__file__).resolve().parents[1]


def optimus(*words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "optimus", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == code, done.stderr
    return done


def here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: object) -> tuple[int, str, str]:
    """Returns (exit code, standard output, standard error) of a command run in this process, where torch is loaded
    already."""
    monkeypatch.setattr(sys, "argv", ["optimus", *map(str, words)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def result(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: object) -> Any:
    """Returns the JSON that a command prints with --json; asserts that standard output has nothing else."""
    code, out, err = here(capsys, monkeypatch, *words, "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize("words", ["--help", "train --help", "prepare --help", "bench --help"])
def test_help_loads_nothing_heavy(words: str) -> None:
    script = (
        "import sys; from optimus import cli; sys.argv = ['optimus', *sys.argv[1:]]\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "print('LOADED', sorted({name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", script, *words.split()], capture_output=True, text=True, check=True)
    text, _, loaded = done.stdout.partition("LOADED")
    assert "Usage:" in text
    assert "optimus" in loaded
    heavy = {"torch", "numpy", "transformers", "yaml", "rich", "pyarrow", "lm_eval", "tokenizers"}
    if words == "--help":  # typer itself imports pydantic for a command's parameters
        heavy.add("pydantic")
    assert not [name for name in sorted(heavy) if f"'{name}'" in loaded]


def test_help_names_every_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, out, _ = here(capsys, monkeypatch, "--help")
    for command in ("prepare", "train", "evaluate", "generate", "export", "import", "models", "schedule", "bench"):
        assert f"  {command} " in out


@pytest.mark.parametrize("group", ["", "config", "checkpoint", "bench"])
def test_the_help_of_a_group_has_whole_sentences(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    _, out, _ = here(capsys, monkeypatch, *group.split(), "--help")
    commands = out.partition("\nCommands:\n")[2]
    assert commands
    assert "..." not in commands
    assert max(map(len, out.splitlines())) <= 80


def test_help_breaks_no_option(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Help lines never break inside an option at a hyphen, such as `--` with `account=physics` on the next line."""
    monkeypatch.setenv("TERMINAL_WIDTH", "80")

    def commands(group: Any, *words: str) -> Iterator[tuple[str, ...]]:
        for name, command in group.commands.items():
            yield from commands(command, *words, name) if hasattr(command, "commands") else [(*words, name)]

    for words in commands(typer.main.get_command(cli.app)):
        lines = here(capsys, monkeypatch, *words, "--help")[1].splitlines()
        assert [line for line in lines if line.endswith("-") or len(line) > 80] == [], words


@pytest.mark.parametrize("command", ["train", "prepare", "doctor", "merge"])
def test_usage_has_each_mark_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Usage lines show the brackets and dots around arguments, which typer adds, only once."""
    usage = here(capsys, monkeypatch, command, "--help")[1].partition("\n\n")[0]
    assert "[[" not in usage
    assert usage.count("...") <= 1


def test_prepare_says_what_it_left_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, prepared: Path, tmp_path: Path
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("some words " * 50)
    words = ("prepare", texts, "--tokenizer", prepared, "--context", 8, "--workers", 1, "--output")
    assert "skipped" not in here(capsys, monkeypatch, *words, tmp_path / "first")[1]
    for name in ("1.jpg", "2.jpg", "3.pdf"):
        (texts / name).touch()
    code, out, _ = here(capsys, monkeypatch, *words, tmp_path / "second")
    assert code == 0
    assert out.splitlines()[1:] == ["skipped: 3 file(s) of other kinds (2 .jpg, 1 .pdf)"]


def test_prepare_says_what_is_contaminated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, prepared: Path, tmp_path: Path
) -> None:
    question = "Which of these tall trees loses all its broad leaves when the cold weather begins in late autumn?"
    for name in ("trees", "Other"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"q": question.replace("trees", name)}))
    texts = ["some words " * 50, f"{question} A beech.", "a text", question.upper()]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ("prepare", tmp_path / "in.jsonl", "--tokenizer", prepared, "--context", 8, "--workers", 1)
    sets = [word for name in ("Other", "trees") for word in ("--exclude", tmp_path / f"{name}.jsonl")]
    code, out, _ = here(capsys, monkeypatch, *words, *sets, "--exclude-words", 9, "--output", tmp_path / "out")
    assert code == 0
    assert " tokens of 2 documents in " in out
    assert out.splitlines()[1:] == [
        "left out: documents 2 contaminated",
        '  trees.jsonl: 2 contaminated, such as document 2 of in.jsonl: "which of these tall trees loses all its broad"',
    ]
    code, out, _ = here(capsys, monkeypatch, "data", tmp_path / "out")
    assert "2 contaminated" in out


def test_prepare_lists_what_cannot_be_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, prepared: Path, tmp_path: Path
) -> None:
    """The message lists unreadable files with options that work."""
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.jsonl").write_text(json.dumps({"content": "some words " * 50}))
    (texts / "b.txt").write_bytes("déjà vu ".encode("latin-1") * 50)
    words = ("prepare", texts, "--tokenizer", prepared, "--context", 8, "--workers", 1, "--output", tmp_path / "out")
    code, _, err = here(capsys, monkeypatch, *words)
    assert code == 2
    assert "error: 2 of 2 input files cannot be read:" in err
    code, out, _ = here(capsys, monkeypatch, *words, *re.findall(r"(--text-field) '(\w+)'", err)[0], "--skip-bad")
    assert code == 0
    assert " tokens of 1 document in " in out
    assert out.splitlines()[1] == "skipped: 1 file that cannot be read"
    assert out.splitlines()[2].startswith("  b.txt: not UTF-8 at byte 1 (invalid continuation byte). Convert it")
    given = [part for name in ("text-field", "encoding") for part in re.findall(rf"(--{name}) '(\w+)'", err)[0]]
    code, out, _ = here(capsys, monkeypatch, *words[:-1], tmp_path / "both", *given)
    assert code == 0
    assert " tokens of 2 documents in " in out


def test_models(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameter counts are those of the paper's table 1, within its rounding."""
    rows = result(capsys, monkeypatch, "models")
    assert [row["name"] for row in rows] == preset_names()
    billions = {row["name"]: (row["total_parameters"] / 1e9, row["active_parameters"] / 1e9) for row in rows}
    paper = {
        "mula-1b": (1.3, 1.3), "mula-7b-a1b": (6.9, 1.3), "mula-20b-a2b": (20, 2.4), "mula-100b-a7b": (100, 7.6),
        "mula-220b-a10b": (220, 10),
    }  # fmt: skip
    for name, counts in paper.items():
        for found, printed in zip(billions[name], counts):
            assert round(found, 1 if printed < 10 else 0) == pytest.approx(
                printed, abs=0.0501 if printed < 10 else 0
            ), name
    _, out, _ = here(capsys, monkeypatch, "models")
    assert [line.split()[0] for line in out.splitlines()] == preset_names()


@pytest.mark.parametrize("columns", [80, 40, None])
def test_a_list_is_wrapped_between_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int | None
) -> None:
    """A terminal wraps long entries between words; elsewhere, each entry is a line."""
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = here(capsys, monkeypatch, "models", "--families")[1].splitlines()
    presets = "mula-7b-a1b, mula-20b-a2b, mula-100b-a7b, mula-220b-a10b, mula-tiny-moe"
    begin = next(at for at, line in enumerate(lines) if line.startswith("olmoe "))
    if columns is None:
        assert lines[begin] == f"olmoe            {presets}"
        return
    assert max(map(len, lines)) <= columns
    end = next(at for at, line in enumerate(lines) if line.startswith("opt "))
    assert all(line.startswith(" " * min(17, columns // 2)) for line in lines[begin + 1 : end])
    assert " ".join(" ".join(lines[begin:end]).split()) == f"olmoe {presets}"


def test_an_error_is_one_line() -> None:
    done = optimus("train", "no-such-file.yaml", code=2)
    assert done.stderr == "error: config file no-such-file.yaml does not exist\n"
    assert done.stdout == ""


@pytest.mark.parametrize(
    "words",
    [
        ["train", "CONFIG", "train.sed=1"],
        ["train", "CONFIG", "train.sequence_length=64"],
        ["train", "CONFIG", "--ranks", "3"],
        ["train", "CONFIG", "--ranks", "0"],
        ["train", "CONFIG", "--ranks", "-1"],
        ["train", "CONFIG", "--ranks", "-1", "--auto-plan", "laptop"],
        ["train", "CONFIG", "--ranks", "0", "--check"],
        ["plan", "CONFIG", "--ranks", "-1", "--machine", "laptop"],
        ["config", "show", "CONFIG", "--resolved", "--ranks", "0"],
        ["config", "show", "CONFIG", "--resolved", "--ranks", "-2"],
        ["evaluate", "no-such-checkpoint"],
        ["generate", "no-such-checkpoint", "--prompt", "x"],
        ["export", "no-such-checkpoint", "--output", "OUT"],
        ["gguf", "no-such-folder", "--converter", "no-such-checkout", "--output", "OUT"],
        ["import", "no-such-folder", "--output", "OUT"],
        ["prepare", "no-such-file", "--output", "OUT", "--train-tokenizer", "300"],
        ["prepare", "SELF", "--output", "OUT"],
        ["prepare", "SELF", "--output", "OUT", "--train-tokenizer", "300", "--shard-size", "much"],
    ],
)
def test_every_command_fails_in_one_line(
    words: list[str],
    small_run: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(small_run))
    places = {"CONFIG": tmp_path / "run.yaml", "OUT": tmp_path / "out", "SELF": __file__}
    code, out, err = here(capsys, monkeypatch, *(places.get(word, word) for word in words))
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "run").exists()


def test_check_runs_nothing(
    small_run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(small_run))
    before = sorted(tmp_path.rglob("*"))
    found = result(capsys, monkeypatch, "train", config, "--check")
    placement = found.pop("placement")
    assert placement.startswith("1 rank on 1 node")
    expected = {
        "ok": True,
        "output": small_run["train"]["output"],
        "steps": 6,
        "ranks": 1,
        "warmup_steps": 2,
        "held": None,
    }
    assert found.items() >= (expected | {"tokens": 6 * 8 * 32, "precision": "bfloat16", "warnings": []}).items()
    code, out, _ = here(capsys, monkeypatch, "train", config, "--check", "train.steps=9")
    first, *summary = out.splitlines()
    assert (code, first) == (0, f"{config} is ready to run: 9 steps on 1 rank(s)")
    labels = [line.split(":")[0] for line in summary]
    assert labels[:6] == ["model", "length", "warm-up", "batch", "layout", "precision"]
    assert {*labels[6:]} == {"decided"}
    code, out, _ = here(capsys, monkeypatch, "train", config, "--check", "--verbose", "parallel.tensor=2")
    first, *table = out.splitlines()
    table = [line for line in table[6:] if not line.startswith("decided: ")]
    assert (code, first) == (0, f"{config} is ready to run: 6 steps on 2 rank(s)")
    assert table[0] == "2 ranks on 1 node; the last axis varies fastest"
    assert [row.split() for row in table[-2:]] == [[axis, "2", "1", "0", "0", "1"] for axis in ("tp_out", "edp")]
    _, out, _ = here(capsys, monkeypatch, "train", config, "--check", "parallel.tensor=2")
    assert "tp_out" not in out
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_stops_early_says_how_to_go_on(
    small_run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(small_run))
    _, out, err = here(capsys, monkeypatch, "train", config, "train.stop_at=2", "observe.log_every=1")
    assert "stopped before step 6; continue with: optimus train " in out
    assert "training: 1/2 loss " in err
    assert result(capsys, monkeypatch, "train", config, "--resume")["step"] == 6


@pytest.mark.in_turn(1, 3)
def test_paths_are_expanded_where_no_shell_has_seen_them(
    small_run: dict[str, Any],
    prepared: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every command expands the home and variables in paths that it reads or writes."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PLACE", str(tmp_path))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some text\n" * 400)
    small_run["data"]["path"] = "$PLACE/data"
    small_run["train"] |= {"output": "~/run", "steps": 2}
    small_run["validation"] = [{"every": 2, "text": "${PLACE}/text", "max_bytes": 64}]
    small_run["tuning"] = {"cache": "$PLACE/cache"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(small_run))
    tokenizer = prepared / "tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.read_bytes())

    def run(*words: object) -> str:
        code, out, err = here(capsys, monkeypatch, *words)
        assert code == 0, err
        return out

    run("prepare", "~/text/*.txt", "--output", "$PLACE/data", "--tokenizer", "~/tokenizer.json", "--context", 32,
        "--workers", 1)  # fmt: skip
    run("train", "~/run.yaml", "checkpoint.weights_every=1")
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["tuning"]["cache"] == str(tmp_path / "cache")
    run("evaluate", "~/run", "--text", "$PLACE/text", "--output", "~/scores.json")
    run("generate", "$PLACE/run", "--prompt", "x", "--max-tokens", 1)
    run("export", "~/run", "--output", "$PLACE/hf")
    run("import", "~/hf", "--output", "$PLACE/imported")
    run("train", "$PLACE/run.yaml", "model=~/hf", "train.output=$PLACE/again", "--check")
    run("train", "~/run.yaml", "checkpoint.load_path=~/imported", "train.output=~/again", "--check")
    run("checkpoint", "list", "~/run")
    run("checkpoint", "verify", "$PLACE/run")
    run("checkpoint", "show", "~/run")
    run("checkpoint", "convert", "~/run", "--output", "$PLACE/weights.pt", "--to", "torch")
    run("rollback", "~/run", "--step", 1)
    run("launch", "~/run.yaml", "--scheduler", "slurm", "--output", "$PLACE/job.sh")
    run("plan", "~/run.yaml", "--machine", "dgx-h100", "--ranks", 8, "--output", "~/planned.yaml")
    run("plan", "~/hf", "--machine", "dgx-h100", "--ranks", 8)
    (tmp_path / "faults.yaml").write_text("[{kind: kill, rank: 9, step: 1}]")
    code, _, err = here(capsys, monkeypatch, "launch", "~/run.yaml", "--inject", "~/faults.yaml")
    assert (code, "there is no rank 9" in err) == (2, True), err
    expected = {"data", "run", "scores.json", "hf", "imported", "weights.pt", "job.sh", "planned.yaml"}
    assert expected <= {path.name for path in tmp_path.iterdir()}
    assert not list(work.iterdir())


def test_from_text_to_a_converted_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """prepare, train, evaluate, generate, export and import work in a chain; the imported model has the same score."""
    pytest.importorskip("transformers")

    def run(*words: object) -> Any:
        return result(capsys, monkeypatch, *words)

    data, text = tmp_path / "data", ROOT / "optimus" / "config" / "load.py"
    index = run("prepare", ROOT / "optimus" / "config", "--output", data, "--train-tokenizer", 300, "--context", 32,
                "--workers", 1)  # fmt: skip
    assert index["context"] == 32
    assert index["instances"] > 50
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump(
            {
                "model": "mula-tiny-moe",
                "data": {"path": str(data)},
                "train": {
                    "output": str(tmp_path / "run"),
                    "steps": 12,
                    "global_batch": 8,
                    "micro_batch": 4,
                    "sequence_length": 32,
                },
                "observe": {"tensorboard": False},
            }
        )
    )
    small = [
        "model.hidden=32",
        "model.layers=2",
        "model.intermediate=16",
        "model.vocab=320",
        "lr_schedule.warmup_steps=3",
    ]
    summary = run("train", tmp_path / "run.yaml", *small)
    assert (summary["step"], summary["tokens"]) == (12, 12 * 8 * 32)
    checkpoint = summary["checkpoint"]

    scores = run("evaluate", tmp_path / "run", "--text", text, "--output", tmp_path / "scores.json")
    assert json.loads((tmp_path / "scores.json").read_text())["bits_per_byte"] == scores["bits_per_byte"]
    assert 1 < scores["bits_per_byte"] < 8
    assert scores["tasks"] == {}
    generated = run("generate", checkpoint, "--prompt", "import", "--max-tokens", 8)
    assert generated["prompt"] == "import"
    assert isinstance(generated["text"], str)

    run("export", checkpoint, "--output", tmp_path / "hf")
    from transformers import AutoModelForCausalLM

    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "hf")).__name__ == "OlmoeForCausalLM"
    run("import", tmp_path / "hf", "--output", tmp_path / "imported")
    again = run("evaluate", tmp_path / "imported", "--text", text)
    assert again["bits_per_byte"] == scores["bits_per_byte"]
    assert run("generate", tmp_path / "imported", "--prompt", "import", "--max-tokens", 8) == generated


def commands() -> dict[str, typer.core.TyperCommand]:
    """Returns every command by its words, such as `checkpoint list`."""

    def below(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        if isinstance(command, typer.core.TyperGroup):
            for name, each in command.commands.items():
                yield from below(each, (*words, name))
        else:
            yield " ".join(words), command

    return dict(below(typer.main.get_command(cli.app), ()))


def test_every_command_has_the_same_options() -> None:
    """All commands name equal options equally: `--json` is a flag, and `--output` (besides `--plot` and `--html`) names
    written files.

    `bench collectives --write` adds to an existing machine file.
    """
    assert {"train", "bench moe", "checkpoint convert"} <= commands().keys()
    for words, command in commands().items():
        options = {name: option for option in command.params for name in option.opts}
        assert options["--json"].is_flag, words
        others = {"--out", "--write", "--json-file", "--to-file", "-o"} - ADDS.get(words, set())
        assert not options.keys() & others, words
        if "--output" not in options:
            assert words in WRITES_NOTHING, words


ADDS = {"bench collectives": {"--write"}}

FUNCTIONS = {  # functions of `optimus.api` with other names than their commands
    "import": "import_folder", "sample-text": "sample_text", "config show": "config", "checkpoint list": "list_checkpoints",
    "checkpoint show": "show_checkpoint", "checkpoint verify": "verify_checkpoints",
    "checkpoint convert": "convert_checkpoint", "config migrate": "migrate", "data": "describe_data",
}  # fmt: skip
NO_FUNCTIONS = {  # commands without functions, with the reason
    "launch": "a program on each node", "rendezvous": "a program of its own", "lab": "a rehearsal of programs",
    "schedule": "`optimus.pipeline` has schedules", "config diff": "`config` gives what it compares",
}  # fmt: skip


def test_every_command_is_a_function() -> None:
    from optimus import api

    own = {words for words in commands() if not words.startswith("bench ")} - NO_FUNCTIONS.keys()
    assert own >= FUNCTIONS.keys() | {"train", "plan", "report", "runs", "doctor"}
    for words in own:
        assert callable(getattr(api, FUNCTIONS.get(words, words))), words


# Commands that write nothing, or only into folders named by the configuration.
WRITES_NOTHING = {
    "config diff", "config migrate", "config show", "data", "doctor", "runs",
    "train", "generate", "models", "rollback", "lab", "rendezvous", "checkpoint list", "checkpoint verify",
    "checkpoint show",
}  # fmt: skip


def test_a_report_and_nothing_else_is_printed_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--json` prints the report only, on standard output; `--output` writes the same report."""
    from benchmarks import optimizer
    from benchmarks.harness import Result

    @functools.wraps(optimizer.run)
    def quick(ranks: int, steps: int) -> Result:
        return Result([{"ranks": ranks, "steps": steps}], {"ratio": 2.0})

    monkeypatch.setattr(optimizer, "run", quick)
    report = result(capsys, monkeypatch, "bench", "optimizer", "--ranks", 2, "--output", tmp_path / "report.json")
    assert (report["rows"], report["ratios"]) == ([{"ranks": 2, "steps": 15}], {"ratio": 2.0})
    assert json.loads((tmp_path / "report.json").read_text()) == report
    _, out, err = here(capsys, monkeypatch, "bench", "optimizer")
    assert "ratio: 2.000" in out
    assert err == ""


def test_schedule_as_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert result(capsys, monkeypatch, "schedule", "1f1b")["bubble"] == pytest.approx(3 / 8)


def test_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import optimus

    assert here(capsys, monkeypatch, "--version") == (0, f"optimus {optimus.__version__}\n", "")


def test_an_error_names_arguments_in_python_and_options_in_the_shell(
    small_run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import optimus

    (tmp_path / "run.yaml").write_text(yaml.safe_dump(small_run))
    Path(small_run["train"]["output"]).mkdir()
    (Path(small_run["train"]["output"]) / "metrics.jsonl").touch()
    cases: list[tuple[Callable[[], object], str, list[object], str]] = [
        (lambda: optimus.train(small_run), "continue it with `resume=True` or",
         ["train", tmp_path / "run.yaml"], "continue it with --resume or"),
        (lambda: optimus.train(small_run, ["train.sequence_length=64"]), "prepare the data with `context=64`",
         ["train", tmp_path / "run.yaml", "train.sequence_length=64"], "prepare the data with --context 64"),
        (lambda: optimus.prepare([__file__], tmp_path / "x"), "(`tokenizer`, `train_tokenizer`)",
         ["prepare", __file__, "--output", tmp_path / "x"], "(--tokenizer, --train-tokenizer)"),
        (lambda: optimus.prepare([__file__], tmp_path / "x", train_tokenizer=300, shard_size=0), "`shard_size` must be",
         ["prepare", __file__, "--output", tmp_path / "x", "--train-tokenizer", 300, "--workers", 0], "--workers must be"),
        (lambda: optimus.evaluate(tmp_path, tasks=["sciq"]), "the folder of the data, `task_data`",
         ["evaluate", tmp_path, "--tasks", "sciq"], "the folder of the data, --task-data"),
        (lambda: optimus.train(small_run, ["parallel.tensor=2"], ranks=3), "use `ranks=2`",
         ["train", tmp_path / "run.yaml", "parallel.tensor=2", "--ranks", 3], "use --ranks 2"),
    ]  # fmt: skip
    for call, in_python, words, in_the_shell in cases:
        with pytest.raises(optimus.UserError) as caught:
            call()
        assert in_python in str(caught.value)
        assert "--" not in str(caught.value)
        code, _, err = here(capsys, monkeypatch, *words)
        assert (code, in_the_shell in err, "`" in err) == (2, True, False), err


@pytest.mark.parametrize("command", ["train", "launch", "plan"])
def test_a_mistake_costs_no_import_of_torch(command: str, small_run: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(small_run))
    code = """
import sys
from optimus import cli
try:
    cli.main()
except SystemExit as error:
    print(error.code, "torch" in sys.modules)
"""
    words = [command, str(tmp_path / "run.yaml"), "train.lr=1"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.stdout == "2 False\n"
    assert "unknown key 'train.lr': did you mean 'lr_schedule.lr'?" in done.stderr


def test_a_name_that_is_no_unicode_is_printed(tmp_path: Path) -> None:
    """A name that is not valid Unicode is printed with escapes, even if the terminal is strict."""
    folder = tmp_path / os.fsdecode(b"run\xff")
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    (folder / "config.yaml").touch()
    code = "from optimus.cli import main; main()"
    told = subprocess.run(
        [sys.executable, "-c", code, "checkpoint", "list", str(folder)],
        env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"},
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    assert r"run\udcff" in told.stdout
