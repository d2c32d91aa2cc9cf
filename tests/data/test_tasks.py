"""Tasks on any number of machines write the output of one call of `prepare`, byte for byte."""

import csv
import gzip
import itertools
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers.forks import forked
from helpers.sweep import in_turns
from optimus.data import files, joining, journal, packing, preparation, stream_writer, units
from optimus.data.preparation import prepare
from optimus.data.ranges import numbers_of_task, task_range
from optimus.data.tasks import prepare_status, status_text, task_name
from optimus.errors import UserError

SETS = "sets"  # stands for the folder of the evaluation sets
CHATS = {"text_field": "chat:messages"}
SELECTIONS: dict[str, dict[str, Any]] = {
    "concatenate": {},
    "best-fit": {"pack": "best-fit", "min_tokens": 20},
    "exact": {"dedup": "exact"},
    "minhash": {"dedup": "minhash", "pack": "best-fit"},
    "chats": {**CHATS, "dedup": "exact", "pack": "best-fit"},
    "trained": {"train_tokenizer": 300},
    "exclude": {"exclude": SETS, "dedup": "exact", "pack": "best-fit"},
}


@pytest.fixture
def folder(tmp_path: Path, sources: list[str]) -> Path:
    """Documents in files that can be divided, and in others; a third of them are duplicates or near-duplicates."""
    generator, made = random.Random(4), tmp_path / "in"
    made.mkdir()
    texts = [source[at : at + 700] for source in sources[:3] for at in range(0, 14_000, 700)]
    texts += [text.upper() if number % 2 else f"{text} end" for number, text in enumerate(generator.sample(texts, 25))]
    generator.shuffle(texts)
    rows = [{"text": text, "messages": chat(text)} for text in texts]
    write_lines(made / "0.jsonl", rows[:40])
    write_lines(made / "1.jsonl", rows[40:55])
    with gzip.open(made / "2.jsonl.gz", "wt", encoding="utf-8") as packed:
        packed.writelines(json.dumps(row) + "\n" for row in rows[50:60])
    pq.write_table(pa.Table.from_pylist(rows[60:]), made / "3.parquet", row_group_size=4)
    (tmp_path / SETS).mkdir()
    for name, every in (("often", 3), ("seldom", 40)):
        found = [{"q": text[100:400]} for text in texts[1::every]]
        write_lines(
            tmp_path / SETS / f"{name}.jsonl", [*found, {"q": "a text that is long enough but nowhere in the inputs"}]
        )
    return made


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text[:200]}, {"role": "assistant", "content": text[200:]}]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def run(
    folder: Path, tokenizer_file: Path, tmp_path: Path, no_helpers: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    monkeypatch.setattr(packing, "WINDOW", 40)

    def call(output: str, *inputs: Path, **options: Any) -> dict[str, Any]:
        if "train_tokenizer" not in options:
            options = {"tokenizer": tokenizer_file} | options
        options = {"context": 32, "workers": 1, "shard_size": 4000} | options
        if options.get("exclude") == SETS:
            options["exclude"] = tmp_path / SETS
        return prepare(inputs or [folder], tmp_path / output, **options)

    return call


@pytest.mark.parametrize("tasks", [1, 3, 8])
@pytest.mark.parametrize("selection", [*SELECTIONS])
def test_the_output_is_that_of_one_call(
    run: Callable[..., dict[str, Any]], folder: Path, tmp_path: Path, selection: str, tasks: int
) -> None:
    options = SELECTIONS[selection]
    if selection != "chats":
        for name, text in (("4.txt", "a text " * 90), ("5.md", "a text " * 90), ("6.csv", 'text\n"one, two"\nthree\n')):
            (folder / name).write_text(text, encoding="utf-8")
    expected = run("one", **options)
    assert ("exclude" in options) == (expected["contaminated"] > 20)
    numbers = [*range(tasks)]
    random.Random(tasks).shuffle(numbers)
    for number in numbers[:-1]:
        assert number not in run("many", tasks=tasks, task=number, **options)["missing"]
    assert run("many", tasks=tasks, task=numbers[-1], **options) == expected
    assert contents(tmp_path / "many") == contents(tmp_path / "one")
    assert not (tmp_path / "many.partial").exists()
    assert run("many", **options) == expected  # the settings do not tell the number of tasks


class Stopped(Exception):
    """Stands for the end of a process at a moment that a test chooses."""


@contextmanager
def killed_at(call: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kills this process before or after the numbered call of a function that writes."""
    calls = 0

    def watched(module: Any, name: str) -> None:
        function = getattr(module, name)

        def counting(*args: Any, **named: Any) -> Any:
            nonlocal calls
            for moment in (0, 1):
                if moment:
                    result = function(*args, **named)
                calls += 1
                if calls == call:
                    os.kill(os.getpid(), signal.SIGKILL)
            return result

        monkeypatch.setattr(module, name, counting)

    with monkeypatch.context() as patch:
        patch.setattr(stream_writer, "COMMIT_SECONDS", 0.0)
        for module, names in (
            (stream_writer.StreamWriter, ("_end_document",)),
            (os, ("fsync",)),
            (Path, ("replace", "rename", "unlink")),
            (shutil, ("rmtree",)),
        ):
            for name in names:
                watched(module, name)
        yield


@pytest.mark.parametrize(
    ("selection", "tasks"), in_turns([("minhash", 3), *itertools.product([*SELECTIONS], [1, 3, 8])], 1, always=1)
)
def test_fifty_kills(
    run: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    selection: str,
    tasks: int,
) -> None:
    """Tasks in any order, killed at random moments and started again, write the bytes of one call."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # the tokenizers' threads do not survive a fork
    options, generator, kills = SELECTIONS[selection], random.Random(f"{selection} {tasks}"), 0
    run("one", **options)

    def take_part() -> None:
        with killed_at(generator.randrange(1, 300 // tasks), monkeypatch):
            run("many", tasks=tasks, task=generator.randrange(tasks), **options)

    while kills < 50:
        child = forked(take_part)
        generator.seed(f"{generator.random()}")  # the child has used its copy
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        kills += os.WIFSIGNALED(status)
        if (tmp_path / "many").exists():
            run("many", tasks=tasks, task=0, **options)
            assert contents(tmp_path / "many") == contents(tmp_path / "one")
            shutil.rmtree(tmp_path / "many")
    for number in range(tasks):
        run("many", tasks=tasks, task=number, **options)
    assert contents(tmp_path / "many") == contents(tmp_path / "one")


def test_the_second_stage_is_shared(
    run: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that write shards at the same time share the units, and all return the index."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    run("one", dedup="minhash")
    for number in range(4):
        assert run("many", tasks=4, task=number, dedup="minhash", stage="streams")["tasks"] == 4

    def share(number: int) -> None:
        done = run("many", tasks=4, task=number, dedup="minhash", stage="shards")
        assert "shards" in done
        assert "settings" in done

    children = [forked(partial(share, number)) for number in range(4)]
    assert [os.WEXITSTATUS(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert contents(tmp_path / "many") == contents(tmp_path / "one")


@pytest.mark.parametrize("name", ["begin_tasks", "prepare_status", "_join"])
def test_a_task_that_looks_while_another_one_ends_returns_the_output(
    run: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    expected = run("one")
    for number in range(3):
        run("many", tasks=3, task=number, stage="streams")
    function = getattr(preparation, name)
    with monkeypatch.context() as patch:

        def late(*args: Any) -> Any:
            patch.undo()
            run("many", tasks=3, task=1)
            return function(*args)

        patch.setattr(preparation, name, late)
        assert run("many", tasks=3, task=0) == expected
    assert contents(tmp_path / "many") == contents(tmp_path / "one")
    assert not (tmp_path / "many.partial").exists()


def test_a_unit_of_a_process_that_hangs_is_done_by_another(
    run: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "PATIENCE", 0.3)
    run("one")
    run("many", tasks=2, task=0)
    run("many", tasks=2, task=1, stage="streams")
    claims = tmp_path / "many.partial" / units.CLAIMS
    claims.mkdir()
    held = [units._claim(claims / name, anyway=False) for name in ("plan.json", "shard-00001.npy.sha256")]
    assert None not in held
    assert "settings" in run("many", tasks=2, task=1)
    assert contents(tmp_path / "many") == contents(tmp_path / "one")


def test_a_task_that_is_done_leaves_the_second_stage_alone(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """A finished task that starts again does not delete what other processes are writing."""
    run("many", tasks=2, task=0)
    unfinished = tmp_path / "many.partial" / task_name(0) / "unique.bin.host.1.tmp"
    unfinished.touch()
    run("many", tasks=2, task=0)
    assert unfinished.exists()


DAMAGES = {  # the file, the step that reads it, what the user is told to delete, options
    "plan.json": ("write_output", "plan.json", {}),
    "packed.npy": ("write_output", "plan.json", {"pack": "best-fit"}),
    "00000-packed.npy": ("_write_packed_plan", "00000-packed.npy", {"pack": "best-fit"}),
    "task-00000/ends.npy": ("write_packed", "task-00000/ends.npy", {"pack": "best-fit"}),
    "task-00000/tokens.bin": ("write_output", "task-00000", {}),
    "task-00000/unique.bin": ("write_output", "task-00000", {"dedup": "exact"}),
    "task-00000/documents.bin": ("_find_duplicates", "task-00000", {"dedup": "exact"}),
    "task-00000/runs.json": ("find_duplicates", "task-00000/runs.json", {"dedup": "exact"}),
    "task-00000/run-*-00.npy": ("find_duplicates", "task-00000/runs.json", {"dedup": "minhash"}),
    "task-00000/repeated-*.npy": ("remove_duplicates", "task-00000/runs.json", {"dedup": "exact"}),
    "found-00000.json": ("remove_duplicates", "found-00000.json", {"dedup": "exact"}),
    "found-00000-*.npy": ("remove_duplicates", "found-00000.json", {"dedup": "minhash"}),
}


@pytest.mark.parametrize(("name", "damage"), in_turns([*itertools.product(DAMAGES, ["shortened", "deleted"])], 6))
def test_damaged_files_of_the_second_stage(
    run: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, damage: str
) -> None:
    """One message says what to delete; after that, the output is that of one call."""
    step, delete, options = DAMAGES[name]
    run("one", **options)
    for number in range(2):
        run("many", tasks=3, task=number, **options)
    with monkeypatch.context() as patch:
        patch.setattr(preparation if hasattr(preparation, step) else joining, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            run("many", tasks=3, task=2, **options)
    partial = tmp_path / "many.partial"
    (path,) = sorted(partial.glob(name))[:1]
    if damage == "shortened":
        os.truncate(path, path.stat().st_size // 3)
    else:
        path.unlink()
    told = "is damaged|is shorter than its journal says|is missing"
    if damage == "shortened" or name != delete:  # otherwise it is written again
        with pytest.raises(UserError, match=told) as caught:
            run("many", tasks=3, task=2, **options)
        assert str(caught.value).endswith(f"Delete {partial / delete} and run again.")
        target = partial / delete
        shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
    for number in range(3):
        run("many", tasks=3, task=number, **options)
    assert contents(tmp_path / "many") == contents(tmp_path / "one")


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_bad_files_are_left_out_by_tasks_as_by_one_call(
    run: Callable[..., dict[str, Any]], folder: Path, tmp_path: Path
) -> None:
    (folder / "0.jsonl").write_bytes((folder / "0.jsonl").read_bytes() + b"not json\n")
    (folder / "7.txt").write_bytes(b"\xff\xfe\xfd")
    expected = run("one", skip_bad=True, dedup="exact")
    assert len(expected["bad_files"]) == 2
    for number in range(3):
        found = run("many", tasks=3, task=number, skip_bad=True, dedup="exact")
    assert found == expected
    assert contents(tmp_path / "many") == contents(tmp_path / "one")


def test_a_bad_line_has_its_number_in_the_file(
    run: Callable[..., dict[str, Any]], folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "lines.jsonl"
    rows = [json.dumps({"text": f"text {number}"}) for number in range(400)]
    path.write_text("\n".join([*rows[:290], "{", *rows[290:]]) + "\n", encoding="utf-8")
    assert run("out", path, tasks=4, task=1, stage="streams")["missing"] == [0, 2, 3]
    with pytest.raises(UserError, match=r"lines\.jsonl:291: not valid JSON"):
        run("out", path, tasks=4, task=2)
    status = prepare_status(tmp_path / "out")
    assert [each["state"] for each in status["states"]] == ["not begun", "done", "failed", "not begun"]
    assert "lines.jsonl:291" in status["states"][2]["error"]
    assert "task 0: not begun; start it" in status_text(status)
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"begun with other settings \(other input files\)"):
        run("out", path, tasks=4, task=2)


def test_ranges_are_contiguous_and_about_equal(folder: Path, tmp_path: Path) -> None:
    for number in range(3):
        write_lines(tmp_path / f"big{number}.jsonl", [{"text": "word " * (each % 90)} for each in range(3000)])
    sources = files.resolve([*sorted(tmp_path.glob("big*.jsonl")), folder])
    for tasks in (1, 2, 7, 40):
        found = [task_range(sources, tasks, number) for number in range(tasks)]
        assert (found[0][:2], found[-1][2:4]) == ((0, 0), (len(sources.files), None))
        for left, right in itertools.pairwise(found):
            assert (left.last - (left.stop is not None), left.stop or 0) == right[:2]
        assert sum(each.size for each in found) == sum(source.size for source in sources.files)
    assert all(
        each.stop is None and not each.start
        for each in (task_range(sources, 7, number, divide=False) for number in range(7))
    )
    sources = files.resolve(sorted(tmp_path.glob("big*.jsonl")))
    sizes = [task_range(sources, 7, number).size for number in range(7)]
    line = len('{"text": ""}') + 90 * len("word ")  # a border moves to the next line
    assert max(sizes) - min(sizes) <= 2 * line


def slurm(task: int, first: int, last: int) -> dict[str, str]:
    numbers = {"ID": task, "COUNT": last - first + 1, "MIN": first, "MAX": last}
    return {f"SLURM_ARRAY_TASK_{name}": str(number) for name, number in numbers.items()}


@pytest.mark.parametrize(
    ("variables", "tasks", "task", "expected"),
    [
        ({}, None, None, None),
        ({}, 3, 2, (3, 2)),
        ({"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "4"}, None, None, None),
        (
            slurm(1, 0, 3),
            "array", None, (4, 1),
        ),
        ({"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "1"}, 8, None, (8, 5)),
        ({"PBS_ARRAY_INDEX": "7"}, 8, None, (8, 7)),
        ({"JOB_COMPLETION_INDEX": "0"}, 8, None, (8, 0)),
    ],
)  # fmt: skip
def test_numbers_come_from_the_array_job(
    variables: dict[str, str], tasks: Any, task: int | None, expected: tuple[int, int] | None
) -> None:
    assert numbers_of_task(tasks, task, variables) == expected


@pytest.mark.parametrize(
    ("variables", "tasks", "task", "message"),
    [
        ({}, 3, None, r"which of the 3 tasks is this\? Give `task` \(--task 0 to --task 2\)"),
        ({}, 3, 3, "`task` is 3, but 3 tasks have the numbers 0 to 2"),
        ({}, 0, 0, "`tasks` must be at least 1, not 0"),
        ({}, None, 1, "`tasks` is not known here"),
        ({"PBS_ARRAY_INDEX": "7"}, "array", None, "`tasks` is not known here"),
        (
            slurm(5, 5, 5),
            "array", None, r"the numbers of the array job are not 0, 1, \.\.\.: give the number of tasks",
        ),
    ],
)  # fmt: skip
def test_bad_numbers(variables: dict[str, str], tasks: Any, task: int | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        numbers_of_task(tasks, task, variables)


def test_what_is_refused(run: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("out", tasks=3, task=0)
    with pytest.raises(UserError, match=r"begun with other settings \(tasks 3 there and 2 here\)"):
        run("out", tasks=2, task=0)
    with pytest.raises(UserError, match=r"begun with other settings \(seed 0 there and 1 here\)"):
        run("out", tasks=3, task=1, seed=1)
    with pytest.raises(UserError, match=r"begun with other settings \(skip_bad False there and True here\)"):
        run("out", tasks=3, task=1, skip_bad=True)  # other ranges
    with pytest.raises(UserError, match=r"`stage` 'shards' is a part of the work of tasks"):
        run("other", stage="shards")
    with pytest.raises(UserError, match=r"`memory` is 1: it must be at least 2 ?MB, 1 ?MB for each of the `workers`"):
        run("other", dedup="exact", memory=1, workers=2)
    with pytest.raises(UserError, match=r"was begun with tasks: give `tasks`"):
        run("out")
    with pytest.raises(UserError, match=r"(?s)not all tasks of .*task 1: not begun; start it\ntask 2: not begun"):
        run("out", tasks=3, task=0, stage="shards")
    with journal.locked(tmp_path / "out.partial" / task_name(1)):
        assert prepare_status(tmp_path / "out")["states"][1]["state"] == "at work"
        with pytest.raises(UserError, match=r"another run uses .*task-00001"):
            run("out", tasks=3, task=1)
    with pytest.raises(UserError, match="`tasks` need an `output` in a folder that all of them see"):
        prepare([tmp_path], "s3://bucket/data", tokenizer=tmp_path, tasks=2, task=0)
    with pytest.raises(UserError, match="`tasks` with `skip_bad` cannot train a tokenizer"):
        run("other", tasks=2, task=0, skip_bad=True, train_tokenizer=300)
    with pytest.raises(UserError, match=r"`stage` is 'last'"):
        run("other", stage="last")
    with pytest.raises(UserError, match=r"no tasks prepare .*nothing"):
        prepare_status(tmp_path / "nothing")
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "_join", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run("one")
    with pytest.raises(UserError, match=r"one\.partial was begun without tasks"):
        run("one", tasks=2, task=0)


def test_a_full_disk_in_one_task_loses_nothing(
    run: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("one")
    run("many", tasks=2, task=0)
    with monkeypatch.context() as patch:
        patch.setattr(stream_writer.StreamWriter, "write", full)
        with pytest.raises(UserError, match=r"disk full while writing .*run the same command again"):
            run("many", tasks=2, task=1)
    assert prepare_status(tmp_path / "many")["states"][1]["state"] == "failed"
    run("many", tasks=2, task=1)
    assert contents(tmp_path / "many") == contents(tmp_path / "one")


def full(*_: object) -> None:
    with open("/dev/full", "wb") as disk:
        disk.write(b"x")


def test_a_table_with_quoted_line_ends_is_not_divided(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["text"], *[[f"text {number}\nwith a line"] for number in range(200)]])
    expected = run("one", tmp_path / "a.csv", context=4)
    for number in range(5):
        found = run("many", tmp_path / "a.csv", context=4, tasks=5, task=number)
    assert found == expected


@pytest.mark.parametrize("kind", ["folder", "nothing"])
def test_the_output_may_be_a_link(kind: str, run: Callable[..., dict[str, Any]], folder: Path, tmp_path: Path) -> None:
    """The folder is where the link says, as if it had been named; the link stays."""
    run("plain", folder)
    target, link = tmp_path / "disk" / "data", tmp_path / "link"
    (target if kind == "folder" else target.parent).mkdir(parents=True)
    link.symlink_to(target)
    run("link", folder, tasks=2, task=1)
    assert prepare_status(link) == prepare_status(target)
    assert prepare_status(link)["missing"] == [0]
    run("link", folder, tasks=2, task=0)
    assert link.is_symlink()
    assert contents(target) == contents(tmp_path / "plain")
    assert [path.name for path in target.parent.iterdir()] == ["data"]


def test_many_tasks_that_are_not_begun_have_one_line(
    run: Callable[..., dict[str, Any]], folder: Path, tmp_path: Path
) -> None:
    run("out", folder, tasks=9, task=4, stage="streams")
    assert status_text(prepare_status(tmp_path / "out")).splitlines() == [
        "tasks 0 to 3: not begun; start them",
        "tasks 5 to 8: not begun; start them",
    ]
