"""`prepare` turns raw text into a folder of shuffled token shards.

1. Tokenise: write the documents as one stream of tokens, `<output>.partial/tokens.bin`; see `streams.py`.
2. Remove duplicates from the stream, and with `pack` "best-fit" pack the documents into rows; see `joining.py`.
3. Shuffle and shard: instance j of the output is instance `permutation(j)` of the stream, or with "best-fit" row
   `permutation(j)`.

With `to`, step 3 writes the documents in their order instead, as token files of another trainer; see `outputs.py`.

Several tasks divide the inputs into contiguous ranges. Task k writes the stream of its range into the folder
`<output>.partial/task-k`. All streams together, in order, are the stream of a call without tasks, so the output is the
same. The tasks share steps 2 and 3.

The Optimus paper (section 4) cuts instances from the tokens of each file separately, and drops the tail of each file.
Here one stream runs through all files.
"""

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, get_args

from optimus.config.sizes import size_text
from optimus.copies import copied, is_url
from optimus.cores import usable_cores, usable_memory
from optimus.data import files, journal, shards
from optimus.data import tokenizer as tokenizers
from optimus.data.contamination import WORDS, NgramIndex, read_sets
from optimus.data.fields import ChatField, chat_field, field_of
from optimus.data.helpers import Helpers
from optimus.data.joining import TooFewTokensError, make_plan, write_output
from optimus.data.joint import Joint, ShardPlan
from optimus.data.journal import Journal
from optimus.data.output_index import make_index
from optimus.data.outputs import OUTPUTS
from optimus.data.prepare_run import PrepareRun, Progress, check_free, disk_errors, empty, refuse
from optimus.data.ranges import numbers_of_task, task_range
from optimus.data.selection import Dedup, Selection
from optimus.data.streams import write_stream
from optimus.data.tasks import (
    OF_TASKS,
    SETTINGS,
    begin_tasks,
    noting_failure,
    output_folder,
    prepare_status,
    status_text,
)
from optimus.data.tokenizer import TokenizerInfo
from optimus.data.units import EndedElsewhereError
from optimus.disk import sync, user_path, write_json
from optimus.errors import UserError
from optimus.plugins import load_plugins

Stage = Literal["all", "streams", "shards"]
Pack = Literal["concatenate", "best-fit"]
To = Literal["optimus", "megatron", "npy"]
CONTEXT = 2048
SHARD_SIZE = 512 * 10**6
LEAST_MEMORY = 10**6  # bytes for a worker; with less, the sorted runs are very many files
SMALLEST_VOCABULARY = 257  # all bytes, and the end-of-text token


def prepare(
    inputs: str | Path | Sequence[str | Path],
    output: str | Path,
    *,
    tokenizer: str | Path | None = None,
    train_tokenizer: int | None = None,
    context: int = CONTEXT,
    seed: int = 0,
    workers: int | None = None,
    shard_size: int = SHARD_SIZE,
    text_field: str = "text",
    parse_special: bool = False,
    pack: Pack = "concatenate",
    min_characters: int = 0,
    max_characters: int | None = None,
    min_tokens: int = 0,
    max_tokens: int | None = None,
    dedup: Dedup = "none",
    exclude: str | Path | Sequence[str | Path] = (),
    exclude_words: int = WORDS,
    encoding: str = "utf-8",
    split: str | None = None,
    skip_bad: bool = False,
    to: To = "optimus",
    plugins: Sequence[str] = (),
    tasks: int | Literal["array"] | None = None,
    task: int | None = None,
    stage: Stage = "all",
    memory: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Tokenises, shuffles and shards `inputs` into the folder `output`, and returns the content of the folder's
    `index.json`.

    `inputs` are files, folders, globs, URLs that fsspec reads, and data sets of the Hugging Face Hub
    (`hf:org/name:config`). `output` may be a URL that fsspec writes. The caller sets either `tokenizer` or
    `train_tokenizer` (the vocabulary size of a new tokenizer). `tokenizer` is a tokenizer.json, a sentencepiece model, a
    tiktoken vocabulary, a folder with one of them, or the name of a repository on the Hub. `context` is the length of a
    training instance in tokens. `shard_size` is in bytes. `workers` defaults to the number of cores of this process.
    Without `parse_special`, the spelling of a special token stays ordinary text.

    `text_field` is a field of JSON lines or a column of tables, a nested field `meta.body`, or a template of several
    fields, `{question}\\n{answer}`. `chat:messages` names a field with conversations. The model predicts
    only the assistant's answers. With `pack` "concatenate", `prepare` joins all documents and cuts the result every
    `context` tokens. With "best-fit", `prepare` cuts only documents that are longer than the context, and pads
    instances.

    `prepare` excludes documents with fewer than `min_characters` or `min_tokens`, or more than `max_characters` or
    `max_tokens`. The number of tokens includes the end-of-text token. With `dedup` "exact", `prepare` includes only the
    first of several documents with the same text, regardless of case, the amount of white space and Unicode
    normalisation. With "minhash", `prepare` also excludes near-duplicates.

    `exclude` names evaluation sets, as `inputs` does: files, and folders with a file or a folder for each set. `prepare`
    excludes documents that share an n-gram of `exclude_words` words with a text of these sets, or contain a text that has
    fewer words, but at least 8. Case, punctuation and white space do not count. The entry `excluded_sets` of the index
    has for each set the number of its documents, and examples.

    `encoding` applies to files that are not valid UTF-8. `split` chooses a dataset of a folder that
    `DatasetDict.save_to_disk` wrote, or a split of a data set of the Hub. With `skip_bad`, `prepare` excludes unreadable
    files, and the index lists these files as `bad_files`. `plugins` names plugins with readers for other types of
    files. `prepare` calls `progress(stage, done, total)` now and then; `total` may be None. `memory` is the maximum
    number of bytes for removing duplicates and for shuffling, by default a quarter of the machine's.

    With `to`, `prepare` writes the documents in their order for another trainer. "megatron" writes `text_document.bin`
    and `text_document.idx` of Megatron-LM. "npy" writes flat files `part-00000.npy` of OLMo-core, which end where
    documents end, with at most `shard_size` bytes unless one document is larger. Conversations, `pack` and other
    values of `context` and `seed` are then refused.

    `tasks` processes on any number of machines can prepare one output, in a folder that all of them see: each call has
    another `task`, from 0 to `tasks - 1`. "array", or a missing `task`, takes the numbers of an array job of Slurm, PBS or
    Kubernetes. A task tokenises its range of the inputs (`stage` "streams"). When all ranges are done, one or more tasks
    write the shards ("shards"). With "all", a task does what can be done. The output has the same bytes as without
    tasks. Until it is complete, the result is the dictionary of `prepare_status`.

    A new call resumes an interrupted call. If `output` is already complete with the same settings, the call returns the
    existing index. Raises `UserError` for bad input, too little disk space, or an `output` with other content.

    Example:
        index = optimus.prepare(["texts/"], "data", train_tokenizer=4096, context=256)
        index["tokens"]
    """
    arguments = {**locals()}
    numbers = numbers_of_task(tasks, task)
    if stage not in get_args(Stage):
        raise UserError(f"`stage` is {stage!r}: it must be one of {', '.join(get_args(Stage))}")
    if stage != "all" and numbers is None:
        raise UserError(f"`stage` {stage!r} is a part of the work of tasks: give the number of `tasks`")
    if is_url(output) and numbers:
        raise UserError(
            f"`tasks` need an `output` in a folder that all of them see, not {output}: copy it there afterwards"
        )
    if is_url(output):
        return copied(output, shards.INDEX, lambda folder: prepare(**(arguments | {"output": folder})), again=True)
    loaded = load_plugins(plugins)
    output = output_folder(output)
    workers = usable_cores() if workers is None else workers
    memory = max(usable_memory() // 4, workers * LEAST_MEMORY) if memory is None else memory
    sizes = {"context": context, "workers": workers, "shard_size": shard_size, "memory": memory}
    _check(tokenizer, train_tokenizer, pack, **sizes)
    if to not in OUTPUTS:
        raise UserError(f"`to` is {to!r}: it must be one of {', '.join(OUTPUTS)}")
    defaults = {"context": CONTEXT, "seed": 0, "pack": "concatenate", "shard_size": SHARD_SIZE}
    OUTPUTS[to].check(text_field, [name for name, default in defaults.items() if arguments[name] != default])
    if memory < workers * LEAST_MEMORY:
        raise UserError(
            f"`memory` is {memory}: it must be at least {size_text(workers * LEAST_MEMORY)}, "
            f"{size_text(LEAST_MEMORY)} for each of the `workers`"
        )
    if numbers and skip_bad and train_tokenizer is not None:
        raise UserError(
            "`tasks` with `skip_bad` cannot train a tokenizer, which depends on all good files: train it first, in a call "
            "with a part of the text, and give its `tokenizer`"
        )
    selection = Selection(min_characters, max_characters, min_tokens, max_tokens, dedup)
    selection.check()
    progress = progress or (lambda stage, done, total: None)
    excluded = _excluded_sets([exclude] if isinstance(exclude, str | Path) else exclude, exclude_words, progress)
    field = field_of(text_field)
    info = tokenizers.inspect(user_path(tokenizer)) if tokenizer is not None else None
    if info is not None and not parse_special:
        tokenizers.check_text_stays_text(info)
    partial = output.with_name(f"{output.name}.partial")
    encoding = files.check_encoding(encoding)
    inputs = [inputs] if isinstance(inputs, str | Path) else inputs
    sources = files.resolve(inputs, leave_out=(output, partial), encoding=encoding, split=split)
    given: dict[str, Any] = {
        "context": context,
        "seed": seed,
        "shard_size": shard_size,
        "text_field": text_field,
        "parse_special": parse_special,
        "pack": pack,
        "encoding": encoding,
        "to": to,
    }
    trained_or_given = info.sha256 if info else f"trained to {train_tokenizer}"
    read_with = {"plugins": {plugin.name: plugin.sha256 for plugin in loaded}}
    settings = {"inputs": "", "tokenizer": trained_or_given, **given, **read_with, **asdict(selection)}
    settings |= {"exclude": excluded.digest if excluded else None, "exclude_words": exclude_words}
    if isinstance(field, ChatField):
        field = chat_field(text_field, info, parse_special)
        settings["chat_template"] = field.template.digest
    with Helpers(workers) as helpers:
        run = PrepareRun(
            sources,
            output,
            partial,
            workers,
            train_tokenizer,
            progress,
            **given,
            selection=selection,
            excluded=excluded,
            skip_bad=skip_bad,
            fields=field,
            memory=memory // workers,
            helpers=helpers,
            # With `skip_bad`, the task that reads a file must find all its faults.
            range=task_range(sources, *(numbers or (1, 0)), divide=not skip_bad),
            task=numbers,
        )
        return _begin_or_resume(run, settings, info, stage)


def _begin_or_resume(
    run: PrepareRun, settings: dict[str, Any], info: TokenizerInfo | None, stage: Stage
) -> dict[str, Any]:
    output, partial = run.output, run.partial
    with disk_errors(run):
        if output.exists() and not (output.is_dir() and not any(output.iterdir())):
            return _finished_before(run, settings)
        if run.task:
            return _take_part(run, settings, info, stage)
        if (partial / SETTINGS).exists():
            raise UserError(f"{partial} was begun with tasks: give `tasks`, or delete it to start over.")
        with journal.locked(run.partial):
            return _prepare(run, settings, info)


def _excluded_sets(paths: Sequence[str | Path], words: int, progress: Progress) -> NgramIndex | None:
    """Reads the evaluation sets, if there are any."""
    if paths:
        progress("read evaluation sets", 0, None)
        return read_sets(paths, words)
    if words != WORDS:
        raise UserError(f"`exclude_words` is {words}, but there are no evaluation sets: give `exclude`")
    return None


def _check(tokenizer: str | Path | None, train_tokenizer: int | None, pack: str, **sizes: int) -> None:
    if (tokenizer is None) == (train_tokenizer is None):
        raise UserError(
            "give either a tokenizer or the vocabulary size of one to train (`tokenizer`, `train_tokenizer`)"
        )
    if train_tokenizer is not None and train_tokenizer < SMALLEST_VOCABULARY:
        raise UserError(
            f"`train_tokenizer` {train_tokenizer} is too small: byte-level BPE needs at least {SMALLEST_VOCABULARY}"
        )
    for name, number in sizes.items():
        if number < 1:
            raise UserError(f"`{name}` must be at least 1, not {number}")
    if pack not in get_args(Pack):
        raise UserError(f"`pack` is {pack!r}: it must be one of {', '.join(get_args(Pack))}")


def _finished_before(run: PrepareRun, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the index of an `output` that exists. Raises `UserError` unless a run with the same settings made the
    output."""
    if not (run.output / shards.INDEX).exists():
        raise UserError(f"{run.output} exists and is not prepared data. Choose another `output`.")
    index = shards.read_index(run.output, token_files=True)
    if different := _differences(run, index, settings):
        raise UserError(f"{run.output} is the output of another run ({different}). Choose another `output`.")
    if (run.output / journal.LOCK).exists():
        _delete_rest(run.output, index)
    run.progress("already complete", 1, 1)
    return index


def _differences(run: PrepareRun, index: dict[str, Any], settings: dict[str, Any]) -> str:
    """Describes how this run differs from the settings of an index. If `skip_bad` is set, the comparison ignores the
    bad files of the index."""
    excluded = [(bad["input"], bad["name"]) for bad in index.get("bad_files", ()) if run.skip_bad]
    inputs = run.inputs.without(excluded).content_digest()
    return journal.differences(index["settings"], settings | {"inputs": inputs})


def _prepare(run: PrepareRun, settings: dict[str, Any], info: TokenizerInfo | None) -> dict[str, Any]:
    if (run.partial / shards.INDEX).exists():  # only `_finish` is missing
        index = shards.read_index(run.partial, token_files=True)
        refuse(run, _differences(run, index, settings))
        return _finish(run, index)
    state, made = write_stream(run, settings, info)
    return _complete(run, *_join(run, [state], made))


def _join(
    run: PrepareRun, states: Sequence[Journal], info: TokenizerInfo
) -> tuple[Sequence[Journal], Joint, ShardPlan]:
    """Writes the shards of the streams of all tasks (steps 2 and 3)."""
    joint = Joint(
        run.partial,
        run.folders,
        [state.mark.counts for state in states],
        info,
        run.context,
        run.seed,
        run.shard_size,
        run.pack == "best-fit",
        run.selection.dedup,
        run.memory,
        first=run.task[1] if run.task else 0,
        is_finished=lambda: run.is_finished,
        output=OUTPUTS[run.to],
        helpers=run.helpers,
    )
    try:
        plan = make_plan(joint, run.progress)
    except TooFewTokensError:
        shutil.rmtree(run.partial)
        raise
    work = joint.output.work(joint, plan)
    if missing := sum(amount for unit, amount in zip(work.units, work.amounts) if not unit.result.exists()):
        check_free(run, missing * work.bytes_each)
        write_output(joint, plan, work, run.progress)
    return states, joint, plan


def _complete(run: PrepareRun, states: Sequence[Journal], joint: Joint, plan: ShardPlan) -> dict[str, Any]:
    joint.output.finish(joint, plan)
    index = make_index(run, states, joint, plan)
    write_json(run.partial / shards.INDEX, index)
    return _finish(run, index)


def _take_part(run: PrepareRun, settings: dict[str, Any], info: TokenizerInfo | None, stage: Stage) -> dict[str, Any]:
    """Does the part of one task, and of the second stage what is possible."""
    try:
        return _take_part_unfinished(run, settings, info, stage)
    except (OSError, UserError, EndedElsewhereError):
        if not run.is_finished:  # another task has renamed the folder
            raise
    return shards.read_index(run.output, token_files=True)


def _take_part_unfinished(
    run: PrepareRun, settings: dict[str, Any], info: TokenizerInfo | None, stage: Stage
) -> dict[str, Any]:
    begin_tasks(run.partial, _settings_of_tasks(run, settings))
    if run.is_finished:  # between the look at `output` and this folder, which has settings alone
        shutil.rmtree(run.partial, ignore_errors=True)
        raise EndedElsewhereError
    if stage != "shards":
        with journal.locked(run.folder), noting_failure(run.folder):
            write_stream(run, _settings_of_tasks(run, settings), info)
    status = prepare_status(run.output)
    if stage == "streams" or (stage == "all" and status["missing"]):
        return status
    if status["missing"]:
        raise UserError(f"not all tasks of {run.output} have written their streams:\n{status_text(status)}")
    joined = None if (run.partial / shards.INDEX).exists() else _join(run, *_streams(run, info))
    while not run.is_finished:
        with journal.held(run.partial) as lock:
            if lock and joined is not None:
                return _complete(run, *joined)
            if lock:
                return _finish(run, shards.read_index(run.partial, token_files=True))
        time.sleep(0.1)
    raise EndedElsewhereError


def _settings_of_tasks(run: PrepareRun, settings: dict[str, Any]) -> dict[str, Any]:
    return settings | dict(zip(OF_TASKS, (run.tasks, run.skip_bad, run.inputs.identity_digests[-1]), strict=True))


def _streams(run: PrepareRun, info: TokenizerInfo | None) -> tuple[list[Journal], TokenizerInfo]:
    """Returns the journals and the tokenizer of the complete streams of all tasks."""
    states = [state for folder in run.folders if (state := journal.read(folder)) is not None]
    run.bad = [bad for state in states for bad in state.bad]
    path = run.partial / tokenizers.FILE
    return states, replace(info or tokenizers.inspect(path), path=path, masked=run.masked)


def _finish(run: PrepareRun, index: dict[str, Any]) -> dict[str, Any]:
    """Renames the unfinished folder to `output`, and deletes the files that only an unfinished run needs."""
    sync(run.partial)
    run.partial.rename(run.output)  # other tasks find no folder from now on, and write nothing more
    sync(run.output.parent)
    _delete_rest(run.output, index)
    return index


def _delete_rest(output: Path, index: dict[str, Any]) -> None:
    """Deletes all that is not part of a complete output, and the lock last: a lock shows that this is not yet done."""
    named = (shards.INDEX, shards.SUMS, tokenizers.FILE, tokenizers.CONFIG)
    keep = {*named, *(each["file"] for each in shards.parts_of(index))}
    empty(output, keep | {journal.LOCK})
    sync(output)
    (output / journal.LOCK).unlink(missing_ok=True)
    sync(output)
