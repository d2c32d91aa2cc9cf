"""Reads task documents from a local folder, with the fields that lm-eval's task definitions expect. Also reads prompts.

    datasets/TASK.SPLIT.jsonl[.gz]                 raw examples with the fields of the published data set
    requests/hellaswag/VARIANT/requests.jsonl[.gz] ready-made requests, for HellaSwag if its data set is missing

BoolQ's field `answer` becomes the `label` of lm-eval's SuperGLUE task. HellaSwag's requests become documents with the
`query` and `choices` that lm-eval builds from a raw example.
"""

import gzip
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from optimus.disk import parse_json
from optimus.errors import UserError
from optimus.evaluation.names import TASKS

Document = dict[str, Any]
_SUFFIXES = (".jsonl.gz", ".jsonl")
_HELLASWAG_VARIANTS = ("rc_0shot", "rc_5shot")  # rc scores the text of the answers, as lm-eval does


def find_dataset(folder: Path, task: str, split: str) -> Path | None:
    """Finds the file of a task's split, or returns None."""
    candidates = (folder / "datasets" / f"{task}.{split}{suffix}" for suffix in _SUFFIXES)
    return next((path for path in candidates if path.is_file()), None)


def find_hellaswag_requests(folder: Path) -> Path | None:
    """Finds the file of HellaSwag's ready-made requests, or returns None."""
    names = (folder / "requests" / "hellaswag" / v / f"requests{s}" for v in _HELLASWAG_VARIANTS for s in _SUFFIXES)
    return next((path for path in names if path.is_file()), None)


def missing(folder: Path, task: str, splits: tuple[str, ...]) -> UserError:
    """Returns the error that names the missing files of a task."""
    names = [f"datasets/{task}.{split}.jsonl.gz" for split in splits]
    if task == "hellaswag":
        names += [f"requests/hellaswag/{variant}/requests.jsonl.gz" for variant in _HELLASWAG_VARIANTS]
    return UserError(f"task {task}: no data in {folder}: looked for {' and '.join(names)} (.jsonl without .gz will do)")


def read_dataset(path: Path, task: str) -> list[Document]:
    """Reads the documents of a dataset file, with the fields that lm-eval's definition of `task` expects."""
    change: Callable[[Document], Document] = _boolq if task == "boolq" else lambda document: document
    return _read(path, _with_subject if TASKS[task].subjects else change)


def read_hellaswag_requests(path: Path) -> list[Document]:
    """Reads documents with `query`, `choices` and `label` from a request file, which has a line for every choice.

    Skips unconditional requests, whose `doc_id` is 1,000,000 or more.
    """
    documents: dict[int, Document] = {}
    for request in _read(path, lambda request: {"id": request["doc_id"], **request["doc"]}):
        if request["id"] < 1_000_000 and request["id"] not in documents:
            documents[request["id"]] = {
                "query": request["query"],
                "choices": request["choices"],
                "label": str(request["gold"]),
            }
    return list(documents.values())


def read_prompts(path: Path) -> list[str]:
    """Reads the text `prompt` of each line of a JSON Lines file."""
    return [document["prompt"] for document in _read(path, _prompt, 'a prompt, like {"prompt": "Once upon a time"}')]


def _prompt(document: Document) -> Document:
    if not isinstance(document["prompt"], str):
        raise TypeError("it is not a text")
    return document


def _with_subject(document: Document) -> Document:
    if not isinstance(document["subject"], str):
        raise TypeError("its subject is not a text")
    return document


def _boolq(document: Document) -> Document:
    if "label" in document:
        return document
    return {"question": document["question"], "passage": document["passage"], "label": int(document["answer"])}


def _read(path: Path, change: Callable[[Document], Document], kind: str = "an example of this task") -> list[Document]:
    documents = []
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            document = parse_json(line)
            if not isinstance(document, dict):
                raise TypeError("it is not an object")
            documents.append(change(document))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}:{number}: not {kind} ({error!r})") from error
    if not documents:
        raise UserError(f"{path} is empty: it must hold {kind} on each line")
    return documents


def _lines(path: Path) -> Iterator[str]:
    try:
        open_file = gzip.open if path.suffix == ".gz" else open
        with open_file(path, "rt", encoding="utf-8-sig") as lines:
            yield from lines
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): get the file again") from error
