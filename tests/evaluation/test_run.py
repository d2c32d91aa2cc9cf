"""Evaluation of a checkpoint as the command runs it."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import optimus.evaluation
from optimus.checkpoint.store import save_model
from optimus.data.tokenizer import train
from optimus.errors import UserError
from optimus.evaluation import TASKS, bits_per_byte, evaluate, generate, generate_text
from optimus.evaluation.generation import Request
from optimus.model import Transformer


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Question: who?\nAnswer: nobody.\n" * 9)
    return path


def test_bits_per_byte_of_a_checkpoint(
    checkpoint: Path, model: Transformer, tokenizer: Any, eos_id: int, text: Path, tmp_path: Path
) -> None:
    output = tmp_path / "new" / "results.json"
    output.parent.mkdir()
    (output.parent / "results.json.probe").write_text("mine")
    results = optimus.evaluate(checkpoint, text=text, output=output, device="cpu")
    assert results == json.loads(output.read_text())
    assert results["tasks"] == {}
    expected = bits_per_byte(model, tokenizer, text, eos_id=eos_id, context=48)
    assert results["bits_per_byte"] == pytest.approx(expected["bits_per_byte"])
    assert results["text"]["bytes"] == text.stat().st_size
    assert results["checkpoint"]["path"] == str(checkpoint)
    assert results["model"]["vocab"] == 328
    assert results["versions"]["torch"] == torch.__version__
    assert {path.name for path in output.parent.iterdir()} == {"results.json", "results.json.probe"}


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "words".encode("utf-16-le"), "not UTF-8 but UTF-16-LE, from byte 0 on. Convert it to UTF-8."),
        ("a.txt", b"%PDF-1.7 words", "a PDF document, by its first bytes. Extract its text into a .txt file."),
        ("a.jsonl", b'[{"text": "x"}]', "a JSON array"),
        ("a.jsonl", b'{"body": "x"}', "The longest text is in 'body': rename it to 'text'."),
        ("a.txt", None, "is a pipe, a socket or a device, not a file"),
    ],
)
def test_text_that_prepare_refuses(
    checkpoint: Path, tmp_path: Path, name: str, content: bytes | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text that `prepare` would refuse is refused before the model is loaded, also among other files."""
    monkeypatch.setattr("optimus.evaluation.run._load_together", lambda *_: pytest.fail("loaded"))
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "0.txt").write_text("some words")
    (folder / name).write_bytes(content) if content is not None else os.mkfifo(folder / name)
    for text in (folder, folder / name):
        with pytest.raises(UserError) as raised:
            evaluate(checkpoint, text=text, device="cpu")
        assert expected in str(raised.value)
        assert "skip_bad" not in str(raised.value)


def test_progress_of_text_has_not_the_name_of_the_result(
    checkpoint: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optimus.observe.progress._LINE_SECONDS", -1.0)
    evaluate(checkpoint, text=text, device="cpu")
    said = capsys.readouterr().err
    assert "text measured: " in said
    assert "bits per byte" not in said


@pytest.mark.in_turn(0, 3)
def test_all_tasks_on_shared_data(
    make_model: Callable[..., Transformer], tokenizer_file: Path, eos_id: int, tmp_path: Path, shared_data: Path
) -> None:
    pytest.importorskip("lm_eval", reason="needs the extra `evaluate`")
    save_model(make_model("olmo"), tmp_path / "c", context=128, tokenizer=tokenizer_file, eos_id=eos_id)
    output = tmp_path / "results.json"
    evaluate(tmp_path / "c", tasks=TASKS, task_data=shared_data / "eval", limit=1, output=output, device="cpu")
    results = json.loads(output.read_text())
    assert {name: scores["n"] for name, scores in results["tasks"].items()} == {
        n: 57 if n.startswith("mmlu") else 1 for n in TASKS
    }
    assert all(0 <= scores[m] <= 1 for scores in results["tasks"].values() for m in ("acc", "acc_norm"))
    assert results["bits_per_byte"] is None
    assert set(results["splits"].values()) == {"validation"}
    assert "lm-eval" in results["versions"]


def test_generate_text(checkpoint: Path, model: Transformer, tokenizer: Any, eos_id: int) -> None:
    found = generate_text(checkpoint, "Question:", max_tokens=9, device="cpu")
    assert [found] == generate(model, tokenizer, ["Question:"], max_tokens=9, eos_id=eos_id, context=48)
    # The model's context is 48.
    assert generate_text(checkpoint, "Question:", device="cpu") == generate_text(
        checkpoint, "Question:", max_tokens=24, device="cpu"
    )
    drawn = generate_text(checkpoint, "Question:", max_tokens=9, temperature=2.0, top_p=0.9, seed=3, device="cpu")
    assert drawn != found


def test_prompts_that_spell_a_special_token(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, eos_id: int) -> None:
    prompts: list[list[int]] = []

    def record(model: Any, requests: list[Request], **_: Any) -> list[tuple[int, int]]:
        prompts.append(list(requests[0].prompt))
        return []

    monkeypatch.setattr("optimus.evaluation.generation.Generation", record)
    for parse_special in (False, True):
        generate_text(checkpoint, "Question<|endoftext|>", parse_special=parse_special, device="cpu")
    assert [eos_id in prompt for prompt in prompts] == [False, True]


ARC = [
    {
        "id": str(number),
        "question": f"Who is number {number}?",
        "choices": {"text": ["nobody", "somebody", "all of us"], "label": ["A", "B", "C"]},
        "answerKey": "ABC"[number % 3],
    }
    for number in range(12)
]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that has one data set, as `datasets` gives it to lm-eval."""
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("lm_eval", reason="needs the extra `evaluate`")

    def load_dataset(path: str, name: str | None = None, **_: Any) -> Any:
        if name == "ARC-Easy":
            rows = datasets.Dataset.from_list(ARC)
            return datasets.DatasetDict(train=rows, validation=rows, test=rows)
        raise ConnectionError(f"Couldn't reach '{path}' on the Hub")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)


@pytest.fixture
def few_definitions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two of lm-eval's definitions and groups of them, because lm-eval takes seconds to index all its definitions."""
    lm_eval_tasks = pytest.importorskip("lm_eval.tasks", reason="needs the extra `evaluate`")
    folder = tmp_path / "definitions"
    folder.mkdir()
    for name in ("arc_easy", "arc_challenge"):
        text = (Path(lm_eval_tasks.__file__).parent / "arc" / f"{name}.yaml").read_text()
        (folder / f"{name}.yaml").write_text(text.replace("ARC-Challenge", "ARC-Easy"))
    metrics = {"aggregate_metric_list": [{"metric": "acc"}]}
    groups = {
        "loose": {"task": ["arc_easy", "arc_challenge"]},
        "inner": {"task": ["arc_easy", "arc_challenge"], **metrics},
        "outer": {"task": ["inner"], **metrics},
    }
    for name, group in groups.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"group": name, **group}))
    manager = partial(lm_eval_tasks.TaskManager, include_defaults=False, include_path=str(folder))
    monkeypatch.setattr(lm_eval_tasks, "TaskManager", manager)


@pytest.mark.usefixtures("hub", "few_definitions")
@pytest.mark.parametrize(
    ("asked", "documents"),
    [
        (["ai2_arc", "arc_easy"], {"arc_challenge": 12, "arc_easy": 12}),
        (["loose"], {"arc_easy": 12, "arc_challenge": 12}),
        (["outer"], {"outer": 24}),
    ],
)
def test_tags_and_groups_of_lm_eval(checkpoint: Path, asked: list[str], documents: dict[str, int]) -> None:
    """A tag or a group without metrics has the results of its tasks; a group's documents are those of its subgroups."""
    found = evaluate(checkpoint, tasks=asked, hub=True, device="cpu")["tasks"]
    assert {name: scores["n"] for name, scores in found.items()} == documents
    assert all(0 <= scores["acc"] <= 1 for scores in found.values())


@pytest.mark.usefixtures("hub", "few_definitions")
@pytest.mark.parametrize(("fewshot", "examples"), [(None, 2), (0, 0), (1, 1)])
def test_a_definition_has_its_own_number_of_examples(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fewshot: int | None, examples: int
) -> None:
    with (tmp_path / "definitions" / "arc_easy.yaml").open("a") as file:
        file.write("num_fewshot: 2\n")
    from optimus.evaluation.harness import HarnessModel

    prompts: list[str] = []
    right = HarnessModel.loglikelihood

    def record(model: HarnessModel, requests: list[Any]) -> Any:
        prompts.extend(request.args[0] for request in requests)
        return right(model, requests)

    monkeypatch.setattr(HarnessModel, "loglikelihood", record)
    found = evaluate(checkpoint, tasks=["arc_easy"], hub=True, limit=2, fewshot=fewshot, device="cpu")
    assert {prompt.count("Question:") for prompt in prompts} == {examples + 1}
    assert found["settings"]["fewshot"] == fewshot


@pytest.mark.usefixtures("hub", "few_definitions")
def test_errors_of_the_hub_are_told_from_those_of_the_model(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from optimus.evaluation.harness import HarnessModel

    def fail(error: Exception) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            raise error

        return call

    monkeypatch.setattr(HarnessModel, "loglikelihood", fail(ValueError("a wrong shape")))
    with pytest.raises(ValueError, match="a wrong shape"):
        evaluate(checkpoint, tasks=["arc_easy"], hub=True, limit=2, device="cpu")
    monkeypatch.setattr("datasets.load_dataset", fail(OSError()))
    with pytest.raises(UserError, match=r"the data of arc_easy cannot be had \(OSError\): "):
        evaluate(checkpoint, tasks=["arc_easy"], hub=True, limit=2, device="cpu")


@pytest.mark.in_turn(0, 3)
@pytest.mark.usefixtures("hub")
def test_tasks_of_lm_eval_on_its_own_data(checkpoint: Path, tmp_path: Path) -> None:
    """A task of the hub has the scores of the same documents in a local folder."""
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "arc_easy.test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ARC))
    found = evaluate(checkpoint, tasks=["arc_easy"], hub=True)
    local = evaluate(checkpoint, tasks=["arc_easy"], task_data=tmp_path)["tasks"]["arc_easy"]
    assert found["tasks"]["arc_easy"] == {name: local[name] for name in ("acc", "acc_norm", "n")}
    with pytest.raises(UserError, match=r"the data of piqa cannot be had \(Couldn't reach .*HF_HOME"):
        evaluate(checkpoint, tasks=["piqa"], hub=True)
    with pytest.raises(UserError, match=r"arc_eazy is not a task of lm-eval: .*arc_easy"):
        evaluate(checkpoint, tasks=["arc_eazy"], hub=True)
    with pytest.raises(UserError, match="`hub` takes lm-eval's own data: leave `task_data` out"):
        evaluate(checkpoint, tasks=["arc_easy"], task_data=tmp_path, hub=True)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, "nothing to evaluate: name `tasks` .*hellaswag.* `text`"),
        ({"tasks": ["piqa"]}, "`task_data`"),
        ({"tasks": ["piqa"], "task_data": "absent"}, "task data folder absent does not exist"),
        ({"text": "text.txt", "limit": 0}, "`limit` is 0"),
        ({"text": "text.txt", "fewshot": -1}, "`fewshot` is -1"),
        ({"text": "text.txt", "max_bytes": 0}, "`max_bytes` is 0"),
        ({"text": "absent.txt"}, "absent.txt"),
        ({"text": "text.txt", "output": "folder"}, "`output` folder is a folder"),
        ({"text": "text.txt", "output": "text.txt/results.json"}, "cannot be written"),
        ({"text": "text.txt", "device": "gpu"}, "device 'gpu' is not available"),
        ({"text": "text.txt", "device": "mps" if torch.cuda.is_available() else "cuda"}, "is not available"),
    ],
)
def test_bad_requests(
    checkpoint: Path, text: Path, monkeypatch: pytest.MonkeyPatch, request_: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(text.parent)
    Path("folder").mkdir()
    with pytest.raises(UserError, match=message):
        evaluate(checkpoint, **request_)


def test_failure_keeps_earlier_results(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    output.write_text("earlier")
    with pytest.raises(UserError):
        evaluate(checkpoint, text=tmp_path / "absent.txt", output=output, device="cpu")
    assert output.read_text() == "earlier"


def test_bad_checkpoints(
    make_model: Callable[..., Transformer], tokenizer_file: Path, text: Path, tmp_path: Path
) -> None:
    save_model(make_model(), tmp_path / "bare", context=48, tokenizer=None, eos_id=None)
    with pytest.raises(UserError, match="has no tokenizer"):
        evaluate(tmp_path / "bare", text=text)
    train([Path(__file__).read_text()], 500, tmp_path / "large.json")
    save_model(make_model(), tmp_path / "other", context=48, tokenizer=tmp_path / "large.json", eos_id=0)
    with pytest.raises(UserError, match="tokenizer of another model"):
        evaluate(tmp_path / "other", text=text)
    diverged = make_model()
    diverged.final_norm.weight.fill_(math.nan)
    save_model(diverged, tmp_path / "nan", context=48, tokenizer=tokenizer_file, eos_id=None)
    with pytest.raises(UserError, match="diverged"):
        evaluate(tmp_path / "nan", text=text, device="cpu")


def test_light_import() -> None:
    """The command line lists the tasks in its help without importing torch."""
    heavy = "{'torch', 'lm_eval', 'tokenizers', 'numpy'}"
    code = f"import sys, optimus.evaluation as e; e.TASKS; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
