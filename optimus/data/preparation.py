"""`prepare` turns raw text into a folder of shuffled token shards.

1. Tokenise: write the documents as one stream of tokens, `<output>.partial/tokens.bin`.
2. Remove duplicates from the stream, and with `pack` "best-fit" pack the documents into rows; see `joining.py`.
3. Shuffle and shard: instance j of the output is instance `permutation(j)` of the stream, or with "best-fit" row
   `permutation(j)`.

With `to`, step 3 writes the documents in their order instead, as token files of another trainer.

Several tasks divide the inputs into contiguous ranges. Task k writes the stream of its range into the folder
`<output>.partial/task-k`. All streams together, in order, are the stream of a call without tasks, so the output is the
same. The tasks share steps 2 and 3.

The Optimus paper (section 4) cuts instances from the tokens of each file separately, and drops the tail of each file.
Here one stream runs through all files.
"""

import errno
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar, get_args

import numpy as np

from optimus.config.sizes import size_text
from optimus.copies import copied, is_url
from optimus.cores import usable_cores, usable_memory
from optimus.data import files, journal, shards
from optimus.data import tokenizer as tokenizers
from optimus.data.contamination import WORDS, Contamination, NgramIndex, read_sets
from optimus.data.documents import DocumentBatch, Encode, Position, lines_before, read_batches, read_texts
from optimus.data.duplicates import RECORDS, STREAM, record, record_type
from optimus.data.fields import CHAT, ChatField, TextField, chat_field, field_of
from optimus.data.files import BadFile, BadFileError
from optimus.data.gather import DIGEST, SUMS
from optimus.data.helpers import Helpers
from optimus.data.inspection import FULL_CHECK_BYTES, listing, look, looked_at, with_encoding
from optimus.data.joining import (
    Joint,
    ShardPlan,
    TooFewTokensError,
    make_plan,
    shards_of,
    token_blocks,
    write_shards,
    write_token_files,
)
from optimus.data.journal import EXCLUSIONS, Counts, Journal, Mark
from optimus.data.ranges import Range, numbers_of_task, ranges
from optimus.data.selection import Dedup, Document, Selection
from optimus.data.tasks import (
    SETTINGS,
    SKIP_BAD,
    TASKS,
    begin_tasks,
    noting_failure,
    output_folder,
    prepare_status,
    status_text,
    task_name,
)
from optimus.data.tokenizer import TokenizerInfo
from optimus.data.units import EndedElsewhereError
from optimus.data.work import Encoded, encoder, tokenizer_trainer
from optimus.disk import printable, sync, temporary_name, user_path, write_json
from optimus.errors import UserError
from optimus.plugins import load_plugins

Progress = Callable[[str, int, int | None], None]
Item = TypeVar("Item")

Stage = Literal["all", "streams", "shards"]
Pack = Literal["concatenate", "best-fit"]
To = Literal["optimus", "megatron", "npy"]
CONTEXT = 2048
SHARD_SIZE = 512 * 10**6
COMMIT_SECONDS = 5.0
TRAINING_SAMPLE = 64 << 20  # approximate bytes of text to train a tokenizer on
TEXTS_AT_ONCE = 64  # maximum number of texts in a message to the process that trains a tokenizer
LOOKED_AT_HERE = 16 << 20  # if the check reads at most this many bytes, the main process checks without helpers
SIZE_SAMPLE = 1 << 17  # characters of text from which `_estimate` extrapolates
EXCLUDED = "excluded.npz"  # the n-grams of the evaluation sets
LEAST_MEMORY = 10**6  # bytes for a worker; with less, the sorted runs are very many files
SMALLEST_VOCABULARY = 257  # all bytes, and the end-of-text token


@dataclass
class _Run:
    """The arguments and the paths of one call of `prepare`."""

    sources: files.Sources
    output: Path
    partial: Path  # the unfinished folder
    workers: int
    train_tokenizer: int | None
    progress: Progress
    context: int
    seed: int
    shard_size: int
    text_field: str
    parse_special: bool
    pack: Pack
    encoding: str
    to: To
    selection: Selection
    excluded: NgramIndex | None  # the n-grams of the evaluation sets
    skip_bad: bool
    fields: TextField  # the parsed `text_field`
    memory: int
    range: Range
    task: tuple[int, int] | None  # number of tasks, and the number of this task
    bad: list[BadFile] = field(default_factory=list)
    inputs: files.Sources = field(init=False)  # the files of all tasks

    def __post_init__(self) -> None:
        self.inputs = self.sources
        self.sources = files.Sources(
            self.sources.inputs, self.sources.files[self.range.first : self.range.last], self.sources.skipped
        )

    @property
    def masked(self) -> bool:
        """True if `text_field` names conversations."""
        return self.text_field.startswith(CHAT)

    @property
    def tasks(self) -> int:
        return self.task[0] if self.task else 1

    @property
    def folder(self) -> Path:
        """The folder of the stream of this task."""
        return self.partial if self.task is None else self.partial / task_name(self.task[1])

    @property
    def folders(self) -> list[Path]:
        """The folders of the streams of all tasks."""
        return [self.partial] if self.task is None else [self.partial / task_name(k) for k in range(self.tasks)]

    @property
    def start(self) -> Position:
        """The position where this task begins to read. A beginning inside a file counts as its second line."""
        return Position(0, self.range.start, int(self.range.start > 0))

    @property
    def is_finished(self) -> bool:
        return (self.output / shards.INDEX).exists()

    def leave_out(self, bad: Sequence[tuple[files.Source, str]], partly: bool = False) -> None:
        """Removes the `bad` files from the sources. Raises `UserError` for bad files without `skip_bad`, or if no other
        file remains. `partly` is True if the check has read some files only in part."""
        total = len(self.sources.files) + len(self.bad)
        if bad and (not self.skip_bad or (len(bad) == len(self.sources.files) and self.task is None)):
            raise UserError(listing(bad, total, partly))
        excluded = [BadFile.from_source(*each) for each in bad]
        self.bad += excluded
        self.sources = self.sources.without((each.input, each.name) for each in excluded)


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
    _check_to(to, text_field, context=context, seed=seed, pack=pack, shard_size=shard_size)
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
    run = _Run(
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
        # With `skip_bad`, the task that reads a file must find all its faults.
        range=ranges(sources, numbers[0], divide=not skip_bad)[numbers[1]] if numbers else _everything(sources),
        task=numbers,
    )
    with _disk_errors(run):
        if output.exists() and not (output.is_dir() and not any(output.iterdir())):
            return _finished_before(run, settings)
        if numbers:
            return _take_part(run, settings, info, stage)
        if (partial / SETTINGS).exists():
            raise UserError(f"{partial} was begun with tasks: give `tasks`, or delete it to start over.")
        with journal.locked(run.partial):
            return _prepare(run, settings, info)


def _everything(sources: files.Sources) -> Range:
    return Range(0, 0, len(sources.files), None, 0, sum(source.size for source in sources.files))


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


def _check_to(to: str, text_field: str, **options: Any) -> None:
    """Raises `UserError` for an unknown `to`, and for options without effect on the token files that it names."""
    if to not in get_args(To):
        raise UserError(f"`to` is {to!r}: it must be one of {', '.join(get_args(To))}")
    if to == "optimus":
        return
    if text_field.startswith(CHAT):
        raise UserError(
            f"`to` {to} has no room for what the model predicts in the conversations of {text_field}: leave out `to`, or "
            "name the fields with text, such as '{prompt}\\n{completion}' (`text_field`)"
        )
    defaults = {"context": CONTEXT, "seed": 0, "pack": "concatenate"}
    if to == "megatron":
        defaults["shard_size"] = SHARD_SIZE
    if changed := [f"`{name}`" for name, default in defaults.items() if options[name] != default]:
        what = "in one file, neither cut nor shuffled" if to == "megatron" else "neither cut nor shuffled"
        raise UserError(f"`to` {to} writes the documents in their order, {what}: leave out {', '.join(changed)}")


def _finished_before(run: _Run, settings: dict[str, Any]) -> dict[str, Any]:
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


def _differences(run: _Run, index: dict[str, Any], settings: dict[str, Any]) -> str:
    """Describes how this run differs from the settings of an index. If `skip_bad` is set, the comparison ignores the
    bad files of the index."""
    excluded = [(bad["input"], bad["name"]) for bad in index.get("bad_files", ()) if run.skip_bad]
    inputs = run.inputs.without(excluded).content_digest()
    return journal.differences(index["settings"], settings | {"inputs": inputs})


@contextmanager
def _disk_errors(run: _Run) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # a progress report raises this error, not a disk
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            path = Path(error.filename or run.partial)
            if isinstance(error, FileNotFoundError) and path.is_relative_to(run.partial):
                raise UserError(f"{path} is missing. Delete {path.parent} and run again.") from error
            raise UserError(
                f"cannot write {path}: {error.strerror or error}. Choose another `output`, or make it writable."
            ) from error
        raise UserError(
            f"disk full while writing {run.partial}. The progress is saved: free some space and run the same command "
            "again to continue."
        ) from error


def _prepare(run: _Run, settings: dict[str, Any], info: TokenizerInfo | None) -> dict[str, Any]:
    if (run.partial / shards.INDEX).exists():  # only `_finish` is missing
        index = shards.read_index(run.partial, token_files=True)
        _refuse(run, _differences(run, index, settings))
        return _finish(run, index)
    state, made = _write_stream(run, settings, info)
    return _complete(run, *_join(run, [state], made))


def _write_stream(run: _Run, settings: dict[str, Any], info: TokenizerInfo | None) -> tuple[Journal, TokenizerInfo]:
    """Writes the rest of the stream of this task (step 1)."""
    state = _open_journal(run, settings)
    if not state.complete:  # later, processes of the second stage write into the folder
        for stale in run.folder.glob("*.tmp"):
            stale.unlink()
    while True:
        try:
            made = _install_tokenizer(run, info)
            if not state.complete:
                with _naming_lines(run):
                    _tokenise(run, state, made)
            return state, made
        except BadFileError as error:
            state = _without_bad_file(run, state, error)


def _join(run: _Run, states: Sequence[Journal], info: TokenizerInfo) -> tuple[Sequence[Journal], Joint, ShardPlan]:
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
        run.workers,
        run.memory,
        first=run.task[1] if run.task else 0,
        is_finished=lambda: run.is_finished,
        to=run.to,
    )
    try:
        plan = make_plan(joint, run.progress)
    except TooFewTokensError:
        shutil.rmtree(run.partial)
        raise
    if run.to != "optimus":
        missing_blocks = [each for each in token_blocks(joint, plan) if not each.digest(run.partial).exists()]
        if missing_blocks:
            _check_free(run, sum(each.stop - each.start for each in missing_blocks))
            write_token_files(joint, plan, run.progress)
        return states, joint, plan
    missing = [name for name, *_ in shards_of(joint, plan.instances) if not (run.partial / f"{name}{DIGEST}").exists()]
    if missing:
        _check_disk(run, 2 * plan.instances * run.context * joint.item, run.folders)
        write_shards(joint, plan, run.progress)
    return states, joint, plan


def _complete(run: _Run, states: Sequence[Journal], joint: Joint, plan: ShardPlan) -> dict[str, Any]:
    index = _index(run, states, joint, plan)
    if run.to == "optimus":
        _join_sums(joint, plan)
    else:
        index = _token_file_index(run, index, joint, plan)
        # The tokenizer.json alone does not always tell its end-of-text token.
        write_json(run.partial / tokenizers.CONFIG, {"eos_token": joint.info.eos_token})
    write_json(run.partial / shards.INDEX, index)
    return _finish(run, index)


def _take_part(run: _Run, settings: dict[str, Any], info: TokenizerInfo | None, stage: Stage) -> dict[str, Any]:
    """Does the part of one task, and of the second stage what is possible."""
    begin_tasks(run.partial, _settings_of_tasks(run, settings))
    if stage != "shards":
        with journal.locked(run.folder), noting_failure(run.folder):
            _write_stream(run, _settings_of_tasks(run, settings), info)
    status = prepare_status(run.output)
    if stage == "streams" or (stage == "all" and status["missing"]):
        return status
    if status["missing"]:
        raise UserError(f"not all tasks of {run.output} have written their streams:\n{status_text(status)}")
    try:
        joined = None if (run.partial / shards.INDEX).exists() else _join(run, *_streams(run, info))
        while not run.is_finished:
            with journal.held(run.partial) as lock:
                if lock and joined is not None:
                    return _complete(run, *joined)
                if lock:
                    return _finish(run, shards.read_index(run.partial, token_files=True))
            time.sleep(0.1)
    except (OSError, UserError, EndedElsewhereError):
        if not run.is_finished:  # another task has renamed the folder
            raise
    return shards.read_index(run.output, token_files=True)


def _settings_of_tasks(run: _Run, settings: dict[str, Any]) -> dict[str, Any]:
    # `skip_bad` determines the borders of the ranges.
    return {**settings, TASKS: run.tasks, SKIP_BAD: run.skip_bad, journal.FILES: run.inputs.identity_digests[-1]}


def _streams(run: _Run, info: TokenizerInfo | None) -> tuple[list[Journal], TokenizerInfo]:
    """Returns the journals and the tokenizer of the complete streams of all tasks."""
    states = [state for folder in run.folders if (state := journal.read(folder)) is not None]
    run.bad = [bad for state in states for bad in state.bad]
    path = run.partial / tokenizers.FILE
    return states, replace(info or tokenizers.inspect(path), path=path, masked=run.masked)


def _without_bad_file(run: _Run, state: Journal, error: BadFileError) -> Journal:
    """Excludes the bad file of `error` from the sources, and returns the journal to resume from. Raises `UserError`
    without `skip_bad`."""
    number = next((k for k, source in enumerate(run.sources.files) if str(source.path) == error.path), None)
    if number is None:  # a file of another task, in the sample that trains a tokenizer
        raise UserError(str(error)) from error
    source = run.sources.files[number]
    bad = [(source, with_encoding(source, error.what))]
    if not run.skip_bad:
        bad += _look(run, run.sources.files[number + 1 :], full=True)[0]
    run.leave_out(bad)
    settings = state.settings | {"inputs": run.sources.content_digest()}
    if run.train_tokenizer is not None:  # the new tokenizer depends on this file too
        return _new_journal(run, settings)
    state.settings, state.mark, state.bad = settings, state.file_mark, run.bad
    state.looked_at = run.sources.identity_digests[-1]
    state.write(run.folder)
    return state


@contextmanager
def _naming_lines(run: _Run) -> Iterator[None]:
    """Counts the line in a `BadFileError` of the block from the beginning of the file, not of the range."""
    try:
        yield
    except BadFileError as error:
        source, found = run.sources.files[0], re.match(r":(\d+):", error.what)
        if not run.range.start or found is None or error.path != str(source.path):
            raise
        line = int(found[1]) - run.start.line + lines_before(source, run.range.start)
        raise BadFileError(error.path, f":{line}:{error.what[found.end() :]}") from error


def _look_at_all(run: _Run) -> None:
    """Checks all files and excludes the bad files; see `_Run.leave_out`."""
    # A new tokenizer must depend on good files alone.
    first = 1 if run.range.start else 0  # another task checks the beginning of this file
    bad, partly = _look(run, run.sources.files[first:], full=run.train_tokenizer is not None and run.task is None)
    if bad and not run.skip_bad and sum(source.size for source in partly) <= FULL_CHECK_BYTES:
        bad += _look(run, partly, full=True)[0]
        order = {source.path: number for number, source in enumerate(run.sources.files)}
        bad.sort(key=lambda each: order[each[0].path])
        partly = []
    run.leave_out(bad, partly=bool(partly))


def _look(
    run: _Run, sources: Sequence[files.Source], full: bool
) -> tuple[list[tuple[files.Source, str]], list[files.Source]]:
    """Checks `sources`. Returns the bad files, each with its fault, and the good files that the check has read only in
    part."""
    bytes_of = {source.path: looked_at(source, full) for source in sources}
    total, done = sum(bytes_of.values()), 0
    bad, partly = list[tuple[files.Source, str]](), list[files.Source]()
    with Helpers(run.workers, partial, look, run.fields, full) as helpers:
        here = ((each, look(run.fields, full, each)) for each in sources)
        for source, found in here if total <= LOOKED_AT_HERE else _in_order(helpers, iter(sources)):
            done += bytes_of[source.path]
            run.progress("check files", done, total)
            if found.wrong is not None:
                bad.append((source, found.wrong))
            elif not found.complete:
                partly.append(source)
    return bad, partly


def _refuse(run: _Run, different: str) -> None:
    if different:
        raise UserError(
            f"{run.folder} holds an unfinished run with other settings ({different}). "
            "Delete it to start over, or choose another `output`."
        )


def _open_journal(run: _Run, settings: dict[str, Any]) -> Journal:
    """Opens the journal of an interrupted run, at the last mark that is still valid, or starts a new journal. Excludes
    bad files from the sources."""
    state = journal.read(run.folder)
    if state is None:
        others = [path.name for path in run.folder.iterdir() if path.name != journal.LOCK]
        if not all(name.endswith(".tmp") for name in others):
            raise UserError(f"{run.folder} exists and is not an unfinished run. Choose another `output`.")
    elif different := journal.differences({**state.settings, "inputs": ""}, settings):
        if not state.is_empty:
            _refuse(run, different)
        state = None
    known = {(bad.input, bad.name): bad for bad in (state.bad if state else ())}
    named = [(each, (each.input, printable(each.name))) for each in run.sources.files]
    same = [(each, known[name]) for each, name in named if name in known]
    run.leave_out([(each, bad.what) for each, bad in same if BadFile.from_source(each, bad.what) == bad])
    if state is None or state.looked_at != run.sources.identity_digests[-1]:
        _look_at_all(run)
    settings = settings | {"inputs": run.sources.content_digest()}
    if state is None or (state.is_empty and journal.differences(state.settings, settings)):
        return _new_journal(run, settings)
    # Unread files may change before their tokenisation, unless a trained tokenizer depends on all files.
    reading = not state.complete and run.train_tokenizer is None
    before = {**state.settings, "inputs": settings["inputs"]} if reading else state.settings
    _refuse(run, journal.differences(before, settings))
    if not state.mark.holds(run.sources):
        if not (reading and state.file_mark.holds(run.sources)):
            _refuse(run, "changed input files")
        state.mark = state.file_mark
    state.settings, state.bad, state.looked_at = settings, run.bad, run.sources.identity_digests[-1]
    return state


def _new_journal(run: _Run, settings: dict[str, Any]) -> Journal:
    """Deletes the files of an earlier run, and writes a new journal."""
    _empty(run.folder, {journal.LOCK})
    files_read = run.sources.identity_digests[run.start.files_read]
    nothing = Mark(run.start, [Counts() for _ in run.sources.inputs], files_read)
    state = Journal(settings, nothing, nothing, looked_at=run.sources.identity_digests[-1], bad=run.bad)
    state.write(run.folder)
    return state


def _install_tokenizer(run: _Run, info: TokenizerInfo | None) -> TokenizerInfo:
    """Copies or trains the tokenizer unless the folder has one. Returns the description of the tokenizer in the
    folder."""
    path = run.partial / tokenizers.FILE
    if not path.exists():
        if info:
            temporary = temporary_name(path)
            shutil.copyfile(info.path, temporary)
            temporary.replace(path)
        else:
            _train_tokenizer(run, path)
    if info is None:
        info = tokenizers.inspect(path)
    return replace(info, path=path, masked=run.masked)


def _train_tokenizer(run: _Run, path: Path) -> None:
    """Trains a tokenizer in a helper process, so that an exception can end the training."""
    with Helpers(1, tokenizer_trainer, run.train_tokenizer, path, threads=run.workers) as helpers:
        sample = filter(None, _training_sample(run))
        while texts := list(islice(sample, TEXTS_AT_ONCE)):
            helpers.submit(*texts).result()
        helpers.submit().result()


def _training_sample(run: _Run) -> Iterator[str]:
    """Yields texts to train a tokenizer on, from the beginning of each file of all tasks."""
    sources = run.sources if run.task is None else run.inputs
    total_bytes = sum(source.text_bytes_estimate for source in sources.files)
    share = min(1.0, TRAINING_SAMPLE / max(1.0, total_bytes))
    total, done = int(total_bytes * share), 0
    for source in sources.files:
        remaining = int(source.text_bytes_estimate * share)
        one = files.Sources(sources.inputs, (source,))
        for text, _ in read_texts(one, run.text_field):
            yield text[: max(0, remaining)]
            remaining -= len(text)
            done += len(text)
            run.progress("train tokenizer", min(done, total), total)
            if remaining <= 0 and share < 1:
                break
    run.progress("train tokenizer", total, total)  # the total is an estimate, and a character may have several bytes


def _tokenise(run: _Run, state: Journal, info: TokenizerInfo) -> None:
    """Writes the token stream, from the journal's mark to the end of the inputs."""
    item = np.dtype(info.dtype).itemsize
    encode = tokenizers.encoder(tokenizers.load(info.path, parse_special=run.parse_special))
    total = run.range.size
    run.progress("tokenise", 0, total)
    _check_disk(run, _estimate(run, encode, item) / run.tasks, [run.folder])
    (run.folder / STREAM).touch()
    with (run.folder / STREAM).open("r+b") as stream:
        if stream.seek(0, os.SEEK_END) < state.mark.tokens * item:
            raise UserError(f"{run.folder / STREAM} is shorter than its journal says. Delete {run.folder}.")
        stream.seek(state.mark.tokens * item)
        writer = _StreamWriter(run, state, stream, item)
        batches = read_batches(run.sources, state.mark.position, run.fields, encode, run.range.stop)
        exclude = None if run.excluded is None else run.folder / EXCLUDED
        if run.excluded is not None and exclude is not None:
            run.excluded.save(exclude)
        setup = info, run.fields, run.parse_special, run.selection.dedup, exclude
        try:
            with Helpers(run.workers, encoder, *setup) as helpers:
                for batch, encoded in _in_order(helpers, batches):
                    writer.write(batch, encoded)
                    run.progress("tokenise", min(max(0, batch.read - run.range.before), total), total)
            state.complete = True
            writer.commit()
        except (UserError, KeyboardInterrupt):
            writer.commit()
            raise
        finally:
            writer.close()


def _in_order(helpers: Helpers, batches: Iterator[Item]) -> Iterator[tuple[Item, Any]]:
    """Yields each item with its result, in order. If `batches` raises `UserError`, yields all earlier items before
    raising the error."""
    waiting: deque[tuple[Item, Future[Any]]] = deque()
    failure: UserError | None = None
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            break
        except UserError as error:
            failure = error
            break
        waiting.append((batch, helpers.submit(batch)))
        if len(waiting) > 2 * helpers.count:
            batch, future = waiting.popleft()
            yield batch, future.result()
    while waiting:
        batch, future = waiting.popleft()
        yield batch, future.result()
    if failure:
        raise failure


class _StreamWriter:
    """Appends tokens to the stream, and advances the journal every few seconds."""

    def __init__(self, run: _Run, state: Journal, stream: BinaryIO, item: int) -> None:
        self._run = run
        self._state = state
        self._stream = stream
        self._item = item
        self._counts = [replace(counts) for counts in state.mark.counts]
        self._document = deepcopy(state.mark.document)
        self._contamination = deepcopy(state.mark.contamination)
        self._records = _open_records(run, state.mark.documents)
        self._read = state.read
        self._reached = (state.mark, state.file_mark)
        self._committed = time.monotonic()

    def write(self, batch: DocumentBatch, encoded: Encoded) -> None:
        tokens, start = memoryview(encoded.tokens), 0
        for piece in encoded.pieces:
            stop = start + piece.tokens * self._item
            self._stream.write(tokens[start:stop])
            self._document.add(piece, self._run.selection.dedup, self._run.excluded)
            start = stop
            if piece.ends_document:
                self._end_document(batch.input)
        if batch.after is None:
            return
        files_read = self._run.sources.identity_digests[batch.after.files_read]
        mark = Mark(
            batch.after,
            [replace(counts) for counts in self._counts],
            files_read,
            deepcopy(self._document),
            deepcopy(self._contamination),
        )
        self._reached = (mark, mark if batch.after.offset == 0 else self._reached[1])
        self._read = min(1.0, max(0, batch.read - self._run.range.before) / max(1, self._run.range.size))
        if time.monotonic() - self._committed >= COMMIT_SECONDS:
            self.commit()

    def _end_document(self, input_: int) -> None:
        """Counts the current document as included, empty or excluded.

        Does not truncate the stream, because the last journal may count tokens of an excluded document.
        """
        document, self._document = self._document, Document()
        counts = self._counts[input_]
        if not document.text_bytes:
            counts.empty_documents += 1
            return
        misfit = self._run.selection.misfit(document) or self._contaminated(document, input_)
        if misfit is not None:
            setattr(counts, misfit, getattr(counts, misfit) + 1)
            self._stream.seek(-document.tokens * self._item, os.SEEK_CUR)
            return
        counts.documents += 1
        counts.text_bytes += document.text_bytes
        counts.tokens += document.tokens
        if self._records is not None:
            self._records.write(record(document, input_))

    def _contaminated(self, document: Document, input_: int) -> Literal["contaminated", None]:
        """Returns the reason to leave out a document that shares an n-gram with an evaluation set, or None."""
        match = None if self._run.excluded is None else document.scan.end(self._run.excluded)
        if match is None:
            return None
        self._contamination.add(match, input=input_, document=self._counts[input_].documents_read + 1)
        return "contaminated"

    def close(self) -> None:
        if self._records is not None:
            self._records.close()

    def commit(self) -> None:
        for file in filter(None, (self._records, self._stream)):
            file.flush()
            os.fsync(file.fileno())
        self._state.mark, self._state.file_mark = self._reached
        self._state.read = self._read
        self._state.write(self._run.folder)
        self._committed = time.monotonic()


def _open_records(run: _Run, saved: int) -> BinaryIO | None:
    """Opens the records of the documents after the first `saved`; None without deduplication."""
    if run.selection.dedup == "none":
        return None
    path, size = run.folder / RECORDS, saved * record_type(run.selection.dedup).itemsize
    path.touch()
    if path.stat().st_size < size:
        raise UserError(f"{path} is shorter than its journal says. Delete {run.folder}.")
    os.truncate(path, size)
    return path.open("ab")


def _estimate(run: _Run, encode: Encode, item: int) -> float:
    """Estimates the bytes of the token stream and the shards together."""
    sample = ""
    for text, _ in read_texts(run.sources, run.fields, start=run.start, stop=run.range.stop):
        sample += text[: SIZE_SAMPLE - len(sample)]
        if len(sample) == SIZE_SAMPLE:
            break
    text_bytes = sum(source.text_bytes_estimate for source in run.inputs.files)
    return 2 * item * text_bytes * len(encode(sample)) / max(1, len(sample.encode()))


def _check_disk(run: _Run, needed: float, folders: Sequence[Path]) -> None:
    """Raises `UserError` unless the disk has room for `needed` bytes, less the bytes that this run has already
    written."""
    missing = needed
    for path in [path for each in {run.partial, *folders} for path in each.iterdir()]:
        with suppress(FileNotFoundError):  # another task has renamed it
            missing -= path.stat().st_size
    _check_free(run, missing, " (tokens, and as much again for the shards)")


def _check_free(run: _Run, missing: float, what: str = "") -> None:
    """Raises `UserError`, in which `what` describes the bytes, unless the disk has `missing` free bytes."""
    free = shutil.disk_usage(run.partial).free
    if missing > free:
        raise UserError(
            f"too little disk space for {run.output}: about {size_text(missing)} needed{what}, "
            f"{size_text(free)} free. Free some space, or choose an `output` on another disk."
        )


def _join_sums(joint: Joint, plan: ShardPlan) -> None:
    """Writes the checksums of all instances as one array."""
    temporary = joint.folder / f"{shards.SUMS}.tmp"
    with temporary.open("wb") as file:
        header = {"descr": "<u4", "fortran_order": False, "shape": (plan.instances,)}
        np.lib.format.write_array_header_1_0(file, header)
        for name, _, _ in shards_of(joint, plan.instances):
            file.write((joint.folder / f"{name}{SUMS}").read_bytes())
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(joint.folder / shards.SUMS)


def _index(run: _Run, states: Sequence[Journal], joint: Joint, plan: ShardPlan) -> dict[str, Any]:
    counts, info, used = plan.counts, joint.info, plan.instances * run.context
    good = run.inputs.without((bad.input, bad.name) for bad in run.bad)
    settings = {
        name: value for name, value in states[0].settings.items() if name not in (TASKS, SKIP_BAD, journal.FILES)
    }
    return {
        "format": shards.FORMAT,
        "version": shards.VERSION,
        "settings": settings | {"inputs": good.content_digest()},
        "tokenizer": {
            "file": tokenizers.FILE,
            "sha256": info.sha256,
            "vocab_size": info.vocab_size,
            "eos_id": info.eos_id,
            "eos_token": info.eos_token,
        },
        "context": run.context,
        "seed": run.seed,
        "dtype": info.dtype,
        **({"masked": True} if run.masked else {}),
        **({"chat": run.fields.template.written()} if isinstance(run.fields, ChatField) else {}),
        "instances": plan.instances,
        "tokens": used,
        "dropped_tokens": max(0, plan.tokens - used),
        **plan.packed,
        "documents": sum(c.documents for c in counts),
        "empty_documents": sum(c.empty_documents for c in counts),
        **{name: sum(getattr(c, name) for c in counts) for name in EXCLUSIONS},
        **({} if run.excluded is None else {"excluded_sets": _excluded_entries(run, run.excluded, states)}),
        "text_bytes": sum(c.text_bytes for c in counts),
        "skipped_files": sum(run.sources.skipped.values()),
        "skipped_by_ending": run.sources.skipped,
        "bad_files": [bad.entry() for bad in sorted(run.bad, key=lambda bad: (bad.input, bad.name))],
        "sources": [
            {"name": name, "files": sum(source.input == k for source in good.files), **asdict(counts[k])}
            for k, name in enumerate(run.sources.inputs)
        ],
        "shards": [
            {
                "file": name,
                "instances": stop - start,
                "sha256": (run.partial / f"{name}{DIGEST}").read_text(encoding="ascii"),
            }
            for name, start, stop in shards_of(joint, plan.instances)
        ],
        "sums": shards.SUMS,
    }


def _token_file_index(run: _Run, index: dict[str, Any], joint: Joint, plan: ShardPlan) -> dict[str, Any]:
    """Returns the index of token files, where `index` is that of prepared data without shards."""
    absent = ("context", "seed", "instances", "dropped_tokens", "shards", "sums")
    blocks = [
        {
            "file": block.file,
            "start": block.start,
            "bytes": block.stop - block.start,
            "sha256": block.digest(run.partial).read_text(encoding="ascii"),
        }
        for block in token_blocks(joint, plan)
    ]
    return {
        **{name: value for name, value in index.items() if name not in absent},
        "format": shards.TOKEN_FILES,
        "to": run.to,
        "dtype": joint.file_type,
        "tokens": plan.tokens,
        "blocks": blocks,
    }


def _excluded_entries(run: _Run, excluded: NgramIndex, states: Sequence[Journal]) -> list[dict[str, Any]]:
    """Returns for each evaluation set its size, the number of documents that were left out for it, and examples.

    Documents are counted from the beginning of their input, also where another task reads the beginning.
    """
    found, before = Contamination(), [0] * len(run.inputs.inputs)
    for mark in (state.mark for state in states):
        numbered = [
            {**each, "document": before[each["input"]] + each["document"]} for each in mark.contamination.examples
        ]
        found.merge(replace(mark.contamination, examples=numbered))
        before = [count + counts.documents_read for count, counts in zip(before, mark.counts)]
    return [
        {
            **asdict(each),
            "contaminated": found.counts.get(each.name, 0),
            "examples": [
                {"ngram": one["ngram"], "source": run.inputs.inputs[one["input"]], "document": one["document"]}
                for one in found.examples
                if one["set"] == each.name
            ],
        }
        for each in excluded.sets
    ]


def _finish(run: _Run, index: dict[str, Any]) -> dict[str, Any]:
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
    _empty(output, keep | {journal.LOCK})
    sync(output)
    (output / journal.LOCK).unlink(missing_ok=True)
    sync(output)


def _empty(folder: Path, keep: Container[str]) -> None:
    """Deletes all that is in a folder, but for the names in `keep`."""
    for path in folder.iterdir():
        if path.name not in keep:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
