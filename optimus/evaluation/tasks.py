"""Runs the tasks of `TASKS` with lm-eval on local data, or any tasks of lm-eval on lm-eval's data sets.

`TASKS` has the tasks of the Optimus paper (table 2) and mmlu_continuation: mmlu with the text of the answers instead of
letters.
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
    """A task and its documents. `shots` are the few-shot examples of a separate split, or None."""

    name: str
    split: str
    documents: list[Document]
    shots: list[Document] | None
    overrides: dict[str, Any]  # fields that replace those of lm-eval's definition


def check_lm_eval() -> None:
    """Raises `UserError` if lm-eval or `datasets` is not installed."""
    if any(importlib.util.find_spec(module) is None for module in ("lm_eval", "datasets")):
        raise UserError(f"evaluation on tasks needs lm-eval, which is not installed: {how_to_install('evaluate')}")


def load_tasks(names: Sequence[str], folder: Path, fewshot: int = 0) -> list[LocalTask]:
    """Loads each named task once, with documents from `folder`.

    Raises `UserError` for an unknown name, and for missing data or examples.
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
    """Runs the tasks and returns `{name: {"acc", "acc_norm", "bits_per_byte", "margin", "n"}}`.

    `n` is the number of documents. `limit` is the maximum number of documents of each task or subject.

    `model` is an `lm_eval` model. Raises `UserError` for a document without a wrong answer, and for a task or subject
    that lm-eval does not have.
    """
    from lm_eval.evaluator import evaluate

    with _quiet_harness():
        built = {task.name: _build(task, fewshot) for task in tasks}
        every = {name: part for parts in built.values() for name, part in parts.items()}
        for name, part in every.items():
            _check_choices(name, part)
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
    """Runs tasks, groups or tags of lm-eval with lm-eval's definitions and data sets.

    Returns `{name: {metric: number, "n": documents}}`, with the metrics of the definitions. The result has the members
    of a tag, and the tasks of a group without metrics, under their own names. Raises `UserError` for an unknown name
    and for unavailable data.
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
            except (OSError, ValueError) as error:  # `datasets` raises these errors for unavailable data
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
    """Returns the tasks of a group and of its subgroups, or the task itself."""
    if name not in members:
        return [name]
    return list(dict.fromkeys(leaf for member in members[name] for leaf in _leaves(member, members)))


def _check_choices(name: str, task: Any) -> None:
    """Raises `UserError` if a document has no wrong answer."""
    for number, document in enumerate(task.eval_docs, 1):
        if len(task.doc_to_choice(document)) < 2:
            raise UserError(
                f"task {name}: document {number} of its data has no wrong answer: add one, or remove the document"
            )


def _answer(task: Any, sample: dict[str, Any]) -> tuple[float, float]:
    """Returns (bits, margin), both in bits per byte.

    `bits` is for the right answer to a document. `margin` is the best wrong answer's value minus `bits`.
    """
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
    """Yields (lm-eval's name, documents, shots) for the task, or for each subject."""
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
    """Builds lm-eval's task objects from local documents, by name."""
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
    built: dict[str, Any] = manager.load({"group": f"local_{task.name}", "task": members})["tasks"]
    for part in built.values():
        part.set_fewshot_seed(_FEWSHOT_SEED)
    return built


def _source(documents: list[Document], shots: list[Document] | None) -> Callable[..., dict[str, Any]]:
    """Returns the function that lm-eval calls instead of downloading."""

    def load(**_: Any) -> dict[str, Any]:
        from datasets import Dataset

        splits = {"documents": documents} if shots is None else {"documents": documents, "shots": shots}
        return {split: Dataset.from_list(rows) for split, rows in splits.items()}

    return load


@contextlib.contextmanager
def _quiet_harness() -> Iterator[None]:
    """Silences lm-eval's log messages below errors, and the progress bars of lm-eval's prompts and of `datasets`."""
    import datasets
    from lm_eval.api import task as task_module

    logger = logging.getLogger("lm_eval")
    level, bars = logger.level, datasets.utils.logging.is_progress_bar_enabled()
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        # lm-eval has no option to disable the progress bar of prompts.
        with mock.patch.object(task_module, "tqdm", lambda rows, **_: rows, create=True):
            yield
    finally:
        logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()
