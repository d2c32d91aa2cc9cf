"""The nine tasks on local data: documents, prompts and labels, answered by models that know the right answers."""

import gzip
import json
import math
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs the extra `evaluate`")

from lm_eval.api.model import LM

from optimus.errors import UserError
from optimus.evaluation import TASKS, tasks
from optimus.evaluation.tasks import check_lm_eval, load_tasks, run_tasks

ARC = [
    {"id": "1", "question": "Sky?", "choices": {"text": ["red", "right"], "label": ["A", "B"]}, "answerKey": "B"},
    {
        "id": "2",
        "question": "Sea?",
        "choices": {"text": ["right", "red", "x"], "label": ["1", "2", "3"]},
        "answerKey": "1",
    },
]
DATA: dict[str, list[dict[str, Any]]] = {
    "arc_easy.validation": ARC,
    "arc_challenge.test": ARC,
    "arc_challenge.validation": ARC[:1],  # the test split has precedence, as in lm-eval
    "openbookqa.validation": [
        {"id": "1", "question_stem": "Sky is", **{k: ARC[0][k] for k in ("choices", "answerKey")}}
    ],
    "piqa.validation": [
        {"goal": "Boil", "sol1": "right", "sol2": "wrong", "label": 0},
        {"goal": "Fry", "sol1": "wrong", "sol2": "right", "label": 1},
    ],
    "boolq.validation": [
        {"question": "is it", "passage": "It is.", "answer": True},
        {"question": "is it not", "passage": "It is.", "answer": False},
        {"question": "is that", "passage": "It is.", "answer": True},
    ],
    "sciq.validation": [
        {"question": "Why?", "support": "S", "correct_answer": "right", **{f"distractor{i}": "no" for i in (1, 2, 3)}}
    ],
    "winogrande.validation": [
        {"sentence": "Ann met Bo and _ left early.", "option1": "Ann", "option2": "Bo", "answer": "2"},
        {"sentence": "Ann met Bo and _ left late.", "option1": "Ann", "option2": "Bo", "answer": "1"},
    ],
    "mmlu.validation": [
        {"subject": "anatomy", "question": "Bone?", "choices": ["w", "x", "y", "z"], "answer": 3},
        {"subject": "virology", "question": "Virus?", "choices": ["w", "x", "y", "z"], "answer": 0},
        {"subject": "virology", "question": "Cell?", "choices": ["w", "x", "y", "z"], "answer": 1},
    ],
    "mmlu.dev": [
        {"subject": subject, "question": f"{subject} {i}", "choices": ["w", "x", "y", "z"], "answer": 2}
        for subject in ("anatomy", "virology")
        for i in range(3)
    ],
}
# Endings of (context + continuation) of every right answer, in the words of lm-eval's task definitions.
RIGHT = (
    *("Question: Sky?\nAnswer: right", "Question: Sea?\nAnswer: right", "Sky is right"),
    *("Question: Boil\nAnswer: right", "Question: Fry\nAnswer: right", "S\nQuestion: Why?\nAnswer: right"),
    *("Question: is it?\nAnswer: yes", "Question: is it not?\nAnswer: no", "Question: is that?\nAnswer: yes"),
    *("Ann met Bo and Bo left early.", "Ann met Bo and Ann left late."),
    *("Bone?\nA. w\nB. x\nC. y\nD. z\nAnswer: D", "Virus?\nA. w\nB. x\nC. y\nD. z\nAnswer: A"),
    *("Cell?\nA. w\nB. x\nC. y\nD. z\nAnswer: B", "Cook: He boils it.", "Cook: She fries it."),
    *("Question: Bone?\nAnswer: z", "Question: Virus?\nAnswer: w", "Question: Cell?\nAnswer: x"),
)


class Oracle(LM):
    """Scores right answers, recognised by their text, `better` nats above others; records the requests."""

    def __init__(self, better: float = 40.0) -> None:
        super().__init__()
        self.better = better
        self.asked: list[tuple[str, str]] = []

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        self.asked += [request.args for request in requests]
        return [(-50 + self.better * ("".join(r.args).endswith(RIGHT)), False) for r in requests]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        raise NotImplementedError

    def generate_until(self, requests: list[Any]) -> list[str]:
        raise NotImplementedError


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small folder of task data: plain and compressed files, and HellaSwag as prepared requests."""
    for number, (name, rows) in enumerate(DATA.items()):
        write_lines(tmp_path / "datasets" / f"{name}.jsonl{'.gz' if number % 2 else ''}", rows)
    rows = []
    for number, (query, choices) in enumerate(
        [("Cook: He", ["eats it.", "boils it."]), ("Cook: She", ["fries it.", "is."])]
    ):
        doc = {"ind": number, "query": query, "choices": choices, "gold": 1 - number}
        for unconditional in (0, 1_000_000):
            for idx, choice in enumerate(choices):
                request = {"context": query, "continuation": f" {choice}"}
                rows.append({"doc": doc, "doc_id": number + unconditional, "idx": idx, "request": request})
    write_lines(tmp_path / "requests" / "hellaswag" / "rc_5shot" / "requests.jsonl.gz", rows)
    return tmp_path


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network is used")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return


def accuracies(scores: dict[str, Any]) -> dict[str, Any]:
    """Returns a task's scores without `bits_per_byte` and `margin`."""
    return {name: value for name, value in scores.items() if name not in ("bits_per_byte", "margin")}


def test_a_document_without_a_wrong_answer_is_refused(tmp_path: Path) -> None:
    single = {**ARC[0], "choices": {"text": ["right"], "label": ["B"]}}
    write_lines(tmp_path / "datasets" / "arc_easy.validation.jsonl", [*ARC, single])
    with pytest.raises(UserError, match="task arc_easy: document 3 of its data has no wrong answer"):
        run_tasks(load_tasks(["arc_easy"], tmp_path), Oracle())


def test_bits_of_the_right_answer_and_its_margin(folder: Path) -> None:
    """Bits and margins equal those by hand: the right answer has 10 nats and the others 50, over the bytes of ` yes`, `
    no` or an ending."""
    found = run_tasks(load_tasks(["boolq", "winogrande", "mmlu"], folder), Oracle())
    yes, no = 4 * math.log(2), 3 * math.log(2)
    assert found["boolq"]["bits_per_byte"] == pytest.approx((2 * 10 / yes + 10 / no) / 3)
    assert found["boolq"]["margin"] == pytest.approx((2 * (50 / no - 10 / yes) + 50 / yes - 10 / no) / 3)
    early, late = (len(f" left {when}.") * math.log(2) for when in ("early", "late"))
    assert found["winogrande"]["bits_per_byte"] == pytest.approx((10 / early + 10 / late) / 2)
    assert found["winogrande"]["margin"] == pytest.approx((40 / early + 40 / late) / 2)
    assert found["mmlu"]["margin"] == pytest.approx(40 / (2 * math.log(2)))
    (wrong,) = run_tasks(load_tasks(["boolq"], folder), Oracle(-40.0)).values()
    assert wrong["margin"] < 0 < wrong["bits_per_byte"]


def test_all_tasks(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All labels, prompts and choices are understood: a model that knows the right answers gets 1, one that avoids them
    gets 0."""
    local = load_tasks(TASKS, folder)
    found = run_tasks(local, Oracle())
    counts = {"openbookqa": 1, "sciq": 1, "boolq": 3, "mmlu": 3, "mmlu_continuation": 3}
    assert {name: accuracies(scores) for name, scores in found.items()} == {
        name: {"acc": 1.0, "acc_norm": 1.0, "n": counts.get(name, 2)} for name in TASKS
    }
    assert {task.name: task.split for task in local} == {
        n: "test" if n == "arc_challenge" else "validation" for n in TASKS
    }
    assert all(scores["acc"] == 0 for scores in run_tasks(local, Oracle(-40.0)).values())
    assert capfd.readouterr().err == ""


def test_acc_norm_is_per_character(folder: Path) -> None:
    """Choices of equal log-likelihood: the longer one is better per character."""
    found = run_tasks(load_tasks(["arc_easy"], folder), Oracle(0.0))
    assert accuracies(found["arc_easy"]) == {"acc": 0.5, "acc_norm": 1.0, "n": 2}


def test_mmlu_is_weighted_by_subject_size(folder: Path) -> None:
    rows = DATA["mmlu.validation"]
    write_lines(folder / "datasets" / "mmlu.validation.jsonl", [{**rows[0], "answer": 0}, *rows[1:]])
    (folder / "datasets" / "mmlu.validation.jsonl.gz").unlink(missing_ok=True)
    found = run_tasks(load_tasks(["mmlu"], folder), Oracle())["mmlu"]
    assert accuracies(found) == {"acc": pytest.approx(2 / 3), "acc_norm": pytest.approx(2 / 3), "n": 3}
    assert run_tasks(load_tasks(["mmlu"], folder), Oracle(), limit=1)["mmlu"]["n"] == 2  # one per subject


def test_limit(folder: Path) -> None:
    assert run_tasks(load_tasks(["boolq"], folder), Oracle(), limit=2)["boolq"]["n"] == 2


def test_raw_hellaswag(folder: Path) -> None:
    """The raw data set has precedence over prepared requests, and is cleaned as lm-eval does."""
    row = {
        "ctx_a": "He",
        "ctx_b": "",
        "activity_label": "Cook",
        "endings": ["eats [step] it.", "boils  it."],
        "label": "1",
    }
    write_lines(folder / "datasets" / "hellaswag.validation.jsonl", [{**row, "ind": 1}])
    oracle = Oracle()
    found = run_tasks(load_tasks(["hellaswag"], folder), oracle)["hellaswag"]
    assert accuracies(found) == {"acc": 1.0, "acc_norm": 1.0, "n": 1}
    assert oracle.asked == [("Cook: He", " eats it."), ("Cook: He", " boils it.")]


def test_fewshot_from_dev(folder: Path) -> None:
    oracle = Oracle()
    run_tasks(load_tasks(["mmlu", "mmlu_continuation"], folder, 2), oracle, fewshot=2)
    asked = [context for context, _ in oracle.asked if "Bone?" in context]
    context = next(each for each in asked if "A. w" in each)
    assert context.count("Answer: C\n\n") == 2
    assert next(each for each in asked if "A. w" not in each).count("Answer: y\n\n") == 2
    assert context.index("anatomy 0") < context.index("anatomy 1") < context.index("Bone?")
    assert "virology" not in context


def test_fewshot_from_the_others(folder: Path) -> None:
    """A task without a training split takes few-shot examples from its other documents, never the asked one."""
    oracle = Oracle()
    found = run_tasks(load_tasks(["boolq", "winogrande"], folder, 1), oracle, fewshot=1)
    assert [scores["acc"] for scores in found.values()] == [1.0, 1.0]
    for context, _ in oracle.asked:
        if "Question: is" in context:
            questions = [line for line in context.splitlines() if line.startswith("Question:")]
            assert len(questions) == len(set(questions)) == 2
        else:
            assert context.count("early") + context.count("late") == 1


def test_fewshot_from_train(folder: Path) -> None:
    write_lines(folder / "datasets" / "piqa.train.jsonl", [{"goal": "Wash", "sol1": "a", "sol2": "b", "label": 1}])
    oracle = Oracle()
    run_tasks(load_tasks(["piqa"], folder, 1), oracle, fewshot=1)
    assert all(context.startswith("Question: Wash\nAnswer: b\n\n") for context, _ in oracle.asked)


def test_shared_requests_agree(shared_data: Path) -> None:
    """Prompts equal the prepared requests of the same data for tasks with the same wording in both sources."""
    for name in ("arc_easy", "winogrande"):
        oracle = Oracle()
        run_tasks(load_tasks([name], shared_data / "eval"), oracle, limit=40)
        with gzip.open(shared_data / "eval" / "requests" / name / "rc_0shot" / "requests.jsonl.gz", "rt") as lines:
            ready = [json.loads(line)["request"] for _, line in zip(oracle.asked, lines)]
        assert oracle.asked == [(request["context"], request["continuation"]) for request in ready]


def test_errors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="task 'hellaswagg' does not exist; did you mean 'hellaswag'"):
        load_tasks(["hellaswagg"], folder)
    with pytest.raises(UserError, match="does not exist"):
        load_tasks(["piqa"], folder / "absent")
    (folder / "requests/hellaswag/rc_5shot/requests.jsonl.gz").unlink()
    with pytest.raises(
        UserError, match=r"looked for datasets/hellaswag\.validation\.jsonl\.gz and requests/hellaswag/"
    ):
        load_tasks(["hellaswag"], folder)
    with pytest.raises(UserError, match=r"`fewshot` is 3, but .* has only 2 examples for the prompts of boolq"):
        load_tasks(["boolq"], folder, 3)
    with pytest.raises(UserError, match=r"`fewshot` is 4, but .* has only 3 examples for the prompts of mmlu_anatomy"):
        load_tasks(["mmlu"], folder, 4)
    for file in folder.glob("datasets/mmlu.dev.*"):
        file.unlink()
    with pytest.raises(UserError, match=r"looked for datasets/mmlu\.dev\.jsonl\.gz"):
        load_tasks(["mmlu"], folder, 1)
    write_lines(folder / "datasets" / "sciq.test.jsonl", [])
    with pytest.raises(UserError, match=r"sciq\.test\.jsonl is empty"):
        load_tasks(["sciq"], folder)
    (folder / "datasets" / "piqa.validation.jsonl.gz").write_bytes(gzip.compress(random.randbytes(9999))[:900])
    with pytest.raises(UserError, match=r"piqa\.validation\.jsonl(\.gz)?"):
        load_tasks(["piqa"], folder)
    (folder / "datasets" / "arc_easy.test.jsonl").write_text('{"id": "1"}\n{"id":\n')
    with pytest.raises(UserError, match=r"arc_easy\.test\.jsonl:2: not an example"):
        load_tasks(["arc_easy"], folder)
    for name, line in (("arc_easy", "[1]"), ("mmlu", '{"question": "Bone?"}'), ("mmlu", '{"subject": 3}')):
        (folder / "datasets" / f"{name}.test.jsonl").write_text(f"{line}\n")
        with pytest.raises(UserError, match=rf"{name}\.test\.jsonl:1: not an example of this task"):
            load_tasks([name], folder)
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"lm-eval, which is not installed: .*evaluate"):
        check_lm_eval()
