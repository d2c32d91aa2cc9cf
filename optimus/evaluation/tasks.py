"""Runs the paper's tasks (Optimus, table 2) with lm-eval on local data, or any tasks of lm-eval on lm-eval's data sets.

On local data, prompts and choices are those of lm-eval's task definitions. A task runs on the first of the task's
splits in `names.py` that the folder has. Tasks report `acc`, and `acc_norm`, the accuracy by log-likelihood per
character of the choice.

Tasks on local data also report two numbers that usually improve from the first steps on. `bits_per_byte` is the bits
per byte of the right answer, given the question. `margin` is the bits per byte of the best wrong answer minus those of
the right answer. `bits_per_byte` and `margin` are means over the documents.

mmlu_continuation is mmlu with the text of the answers instead of letters.

Few-shot examples come from the training split if the folder has a training split. Otherwise, and for HellaSwag's
ready-made requests, the examples come from the evaluated split, without the document in question. Examples for mmlu and
mmlu_continuation must come from the split `dev`.
"""

import contextlib
import importlib.util
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple
from unittest import mock

from optimus.errors import UserError, how_to_install, nearest
from optimus.evaluation import task_data
from optimus.evaluation.names import TASKS
from optimus.evaluation.task_data import Document

_METRICS = ("acc", "acc_norm")
_FEWSHOT_SEED = 1234  # lm-eval's default


class LocalTask(NamedTuple):
    """A task and its documents. `shots` are the few-shot examples of a separate split; None if the examples, if any,
    come from `documents`."""

    name: str
    split: str
    documents: list[Document]
    shots: list[Document] | None
    overrides: dict[str, Any]  # fields that replace those of lm-eval's definition


def check_lm_eval() -> None:
    """Raises `UserError` if lm-eval is not installed."""
    if any(importlib.util.find_spec(module) is None for module in ("lm_eval", "datasets")):
        raise UserError(f"evaluation on tasks needs lm-eval, which is not installed: {how_to_install('evaluate')}")


def load_tasks(names: Sequence[str], folder: Path, fewshot: int = 0) -> list[LocalTask]:
    """Loads the tasks with their documents.

    Raises `UserError` for an unknown name, for data that is missing or damaged, and for too few examples for `fewshot`.
    """
    for name in names:
        TASKS.named(name)
    if not folder.is_dir():
        raise UserError(f"task data folder {folder} does not exist")
    tasks = [_load(name, folder, fewshot) for name in dict.fromkeys(names)]
    for task in tasks:
        _check_shots(task, fewshot, folder)
    return tasks


def run_tasks(
    tasks: Sequence[LocalTask], model: Any, *, fewshot: int = 0, limit: int | None = None
) -> dict[str, dict[str, Any]]:
    """Runs the tasks and returns `{name: {"acc", "acc_norm", "bits_per_byte", "margin", "n"}}`; `n` is the number of
    documents.

    The results of mmlu and mmlu_continuation are means over all subjects, weighted by numbers of documents.

    `model` is an `lm_eval` model. `limit` is the maximum number of documents of each task, or of each subject of a task
    with subjects.
    """
    from lm_eval.evaluator import evaluate

    with _quiet_harness():
        built = {task.name: _build(task, fewshot) for task in tasks}
        every = {name: part for parts in built.values() for name, part in parts.items()}
        found: Any = evaluate(model, {"tasks": every}, limit=limit, bootstrap_iters=0, log_samples=True)
    results = {}
    for name, parts in built.items():
        counts = {part: found["n-samples"][part]["effective"] for part in parts}
        n = sum(counts.values())
        means = {m: sum(found["results"][part][f"{m},none"] * counts[part] for part in parts) / n for m in _METRICS}
        answers = [_answer(task, sample) for part, task in parts.items() for sample in found["samples"][part]]
        bits, margins = zip(*answers)
        results[name] = {**means, "bits_per_byte": fmean(bits), "margin": fmean(margins), "n": n}
    return results


def run_hub_tasks(
    names: Sequence[str], model: Any, *, fewshot: int | None = None, limit: int | None = None
) -> dict[str, dict[str, Any]]:
    """Runs tasks, groups or tags of lm-eval by lm-eval's definitions and data sets. The library `datasets` downloads
    the data sets or has the data sets in its cache. Returns `{name: {metric: number, "n": documents}}`, with the
    metrics of the definitions.

    For a tag, and for a group without group metrics, the result has an entry for each task. The definition's number of
    few-shot examples applies if `fewshot` is None, or if the definition's number is 0. Raises `UserError` for an
    unknown name, and for data that the library can neither find in its cache nor download.
    """
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    with _quiet_harness():
        manager = TaskManager()
        for name in names:
            if name not in manager.all_tasks:
                raise UserError(f"{name} is not a task of lm-eval: {nearest(name, manager.all_tasks)}")
        of_tags = {tag: sorted(manager.task_index[tag].tags) for tag in {*names}.intersection(manager.all_tags)}
        asked = list(dict.fromkeys(each for name in names for each in of_tags.get(name, [name])))
        load = manager.load

        def load_or_say(tasks: list[str]) -> Any:
            try:
                return load(tasks)
            except (OSError, ValueError) as error:  # errors of `datasets` for unavailable data
                said = str(error).partition("\n")[0] or type(error).__name__
                raise UserError(
                    f"the data of {', '.join(names)} cannot be had ({said}): `--hub` downloads them, or reads the cache "
                    "of `datasets` (HF_HOME, HF_DATASETS_CACHE)"
                ) from error

        with mock.patch.object(manager, "load", load_or_say):
            found: Any = simple_evaluate(
                model,
                tasks=asked,
                num_fewshot=fewshot,
                limit=limit,
                bootstrap_iters=0,
                log_samples=False,
                task_manager=manager,
            )
    leaves = {name: _leaves(name, found["group_subtasks"]) for name in asked}
    reported = [each for name in asked for each in ([name] if _numbers(found["results"][name]) else leaves[name])]
    results = {}
    for name in reported:
        counts = [found["n-samples"][leaf]["effective"] for leaf in leaves.get(name, [name])]
        results[name] = _numbers(found["results"][name]) | {"n": sum(counts)}
    return results


def _numbers(scores: dict[str, Any]) -> dict[str, float]:
    """Returns the metrics among the entries of a task or group in lm-eval's results."""
    return {
        key.removesuffix(",none").replace(",", "/"): value
        for key, value in scores.items()
        if isinstance(value, int | float) and "_stderr" not in key and key != "sample_len"
    }


def _leaves(name: str, members: dict[str, list[str]]) -> list[str]:
    """Returns the tasks of a group and of the group's subgroups; for a task, the task itself. `members` has the names
    in each group."""
    if name not in members:
        return [name]
    return list(dict.fromkeys(leaf for member in members[name] for leaf in _leaves(member, members)))


def _answer(task: Any, sample: dict[str, Any]) -> tuple[float, float]:
    """Returns the bits per byte of the right answer to a document, and the margin to the best wrong answer."""
    # lm-eval finds the right answer in the same way.
    right = (task.doc_to_text if task.multiple_input else task.doc_to_target)(sample["doc"])
    right = task.doc_to_choice(sample["doc"]).index(right) if isinstance(right, str) else right
    bits = [
        -log_likelihood / math.log(2) / len(continuation.encode())
        for (_, continuation), (log_likelihood, _) in zip(sample["arguments"], sample["filtered_resps"])
    ]
    return bits[right], min(each for number, each in enumerate(bits) if number != right) - bits[right]


def _load(name: str, folder: Path, fewshot: int) -> LocalTask:
    row, overrides = TASKS[name], dict[str, Any]()
    splits, data = row.splits, row.data or name
    for split in splits:
        if path := task_data.find_dataset(folder, data, split):
            documents = task_data.read_dataset(path, name)
            break
    else:
        requests = task_data.find_hellaswag_requests(folder) if name == "hellaswag" else None
        if requests is None:
            raise task_data.missing(folder, data, splits)
        split, documents = "validation", task_data.read_hellaswag_requests(requests)
        overrides["process_docs"] = None  # the file's documents are already processed
    shots_split = "dev" if row.subjects else "train"
    # Ready-made HellaSwag documents have other fields than raw training examples.
    shots_path = task_data.find_dataset(folder, data, shots_split) if fewshot and not overrides else None
    if shots_path is None and fewshot and row.subjects:
        raise task_data.missing(folder, data, (shots_split,))
    shots = task_data.read_dataset(shots_path, name) if shots_path else None
    return LocalTask(name, split, documents, shots, overrides)


def _check_shots(task: LocalTask, fewshot: int, folder: Path) -> None:
    for part, documents, shots in _parts(task):
        available = len(documents) - 1 if shots is None else len(shots)
        if fewshot > available:
            raise UserError(
                f"`fewshot` is {fewshot}, but {folder} has only {available} examples for the prompts of {part}"
            )


def _parts(task: LocalTask) -> Iterator[tuple[str, list[Document], list[Document] | None]]:
    """Yields (lm-eval's name, documents, shots) of each task of lm-eval; a task with subjects is one task per
    subject."""
    pattern = TASKS[task.name].subjects
    if pattern is None:
        yield task.name, task.documents, task.shots
        return
    for subject in dict.fromkeys(document["subject"] for document in task.documents):
        shots = None if task.shots is None else [shot for shot in task.shots if shot["subject"] == subject]
        yield (
            pattern.format(subject),
            [document for document in task.documents if document["subject"] == subject],
            shots,
        )


def _build(task: LocalTask, fewshot: int) -> dict[str, Any]:
    """Builds lm-eval's task objects from local documents. The result maps names to tasks."""
    import lm_eval.tasks

    # Indexing all folders of lm-eval would take seconds.
    home = Path(lm_eval.tasks.__file__).parent / TASKS[task.name].definition
    manager = lm_eval.tasks.TaskManager(include_defaults=False, include_path=str(home))
    members = []
    for name, documents, shots in _parts(task):
        if name not in manager.all_subtasks:
            raise UserError(f"{name} is not a task of lm-eval: {nearest(name, manager.all_subtasks)}")
        members.append(
            {
                "task": name,
                **task.overrides,
                "custom_dataset": _source(documents, shots),
                "training_split": None,
                "validation_split": None,
                "test_split": "documents",
                # If documents and examples share a split, lm-eval excludes a document from its examples.
                "fewshot_split": "documents" if shots is None else "shots",
                "num_fewshot": fewshot,
                "metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in _METRICS],
            }
        )
    # A custom group loads lm-eval's definitions with some fields replaced.
    built: dict[str, Any] = manager.load({"group": f"local_{task.name}", "task": members})["tasks"]
    for part in built.values():
        part.set_fewshot_seed(_FEWSHOT_SEED)
    return built


def _source(documents: list[Document], shots: list[Document] | None) -> Callable[..., dict[str, Any]]:
    """Returns the function that lm-eval calls instead of downloading. The function ignores its arguments."""

    def load(**_: Any) -> dict[str, Any]:
        from datasets import Dataset

        splits = {"documents": documents} if shots is None else {"documents": documents, "shots": shots}
        return {split: Dataset.from_list(rows) for split, rows in splits.items()}

    return load


@contextlib.contextmanager
def _quiet_harness() -> Iterator[None]:
    """Silences lm-eval's log messages below errors, and its progress bars for building prompts."""
    import datasets
    from lm_eval.api import task as task_module

    logger = logging.getLogger("lm_eval")
    level, bars = logger.level, datasets.utils.logging.is_progress_bar_enabled()
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        # lm-eval has no option to disable this bar, which mmlu alone shows 57 times.
        with mock.patch.object(task_module, "tqdm", lambda rows, **_: rows, create=True):
            yield
    finally:
        logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()
