"""Tokenises the inputs of a task into one stream, and is step 1 of `prepare`."""

import os
import re
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from optimus.data import files, journal
from optimus.data import tokenizer as tokenizers
from optimus.data.documents import Encode, lines_before, read_batches, read_texts
from optimus.data.duplicates import STREAM
from optimus.data.files import BadFile, BadFileError
from optimus.data.helpers import Helpers, Served
from optimus.data.inspection import FULL_CHECK_BYTES, look, looked_at, with_encoding
from optimus.data.journal import Counts, Journal, Mark
from optimus.data.prepare_run import PrepareRun, check_disk, empty, refuse
from optimus.data.stream_writer import StreamWriter
from optimus.data.tokenizer import TokenizerInfo
from optimus.data.work import encoder, tokenizer_trainer
from optimus.disk import printable, temporary_name
from optimus.errors import UserError

Item = TypeVar("Item")
TRAINING_SAMPLE = 64 << 20  # approximate bytes of text to train a tokenizer on
TEXTS_AT_ONCE = 64  # maximum number of texts in a message to the process that trains a tokenizer
LOOKED_AT_HERE = 16 << 20  # if the check reads at most this many bytes, the main process checks without helpers
SIZE_SAMPLE = 1 << 17  # characters of text from which `_estimate` extrapolates
EXCLUDED = "excluded.npz"  # the n-grams of the evaluation sets


def write_stream(
    run: PrepareRun, settings: dict[str, Any], info: TokenizerInfo | None
) -> tuple[Journal, TokenizerInfo]:
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


def _without_bad_file(run: PrepareRun, state: Journal, error: BadFileError) -> Journal:
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
def _naming_lines(run: PrepareRun) -> Iterator[None]:
    """Counts the line in a `BadFileError` of the block from the beginning of the file, not of the range."""
    try:
        yield
    except BadFileError as error:
        source, found = run.sources.files[0], re.match(r":(\d+):", error.what)
        if not run.range.start or found is None or error.path != str(source.path):
            raise
        line = int(found[1]) - run.start.line + lines_before(source, run.range.start)
        raise BadFileError(error.path, f":{line}:{error.what[found.end() :]}") from error


def _look_at_all(run: PrepareRun) -> None:
    """Checks all files and excludes the bad files; see `PrepareRun.leave_out`."""
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
    run: PrepareRun, sources: Sequence[files.Source], full: bool
) -> tuple[list[tuple[files.Source, str]], list[files.Source]]:
    """Checks `sources`. Returns the bad files, each with its fault, and the good files that the check has read only in
    part."""
    bytes_of = {source.path: looked_at(source, full) for source in sources}
    total, done = sum(bytes_of.values()), 0
    bad, partly = list[tuple[files.Source, str]](), list[files.Source]()
    function, here = run.helpers.serving(partial, look, run.fields, full), total <= LOOKED_AT_HERE
    looks = ((each, look(run.fields, full, each)) for each in sources) if here else _in_order(function, iter(sources))
    for source, found in looks:
        done += bytes_of[source.path]
        run.progress("check files", done, total)
        if found.wrong is not None:
            bad.append((source, found.wrong))
        elif not found.complete:
            partly.append(source)
    return bad, partly


def _open_journal(run: PrepareRun, settings: dict[str, Any]) -> Journal:
    """Opens the journal of an interrupted run, at the last mark that is still valid, or starts a new journal. Excludes
    bad files from the sources."""
    state = journal.read(run.folder)
    if state is None:
        others = [path.name for path in run.folder.iterdir() if path.name != journal.LOCK]
        if not all(name.endswith(".tmp") for name in others):
            raise UserError(f"{run.folder} exists and is not an unfinished run. Choose another `output`.")
    elif different := journal.differences({**state.settings, "inputs": ""}, settings):
        if not state.is_empty:
            refuse(run, different)
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
    refuse(run, journal.differences(before, settings))
    if not state.mark.holds(run.sources):
        if not (reading and state.file_mark.holds(run.sources)):
            refuse(run, "changed input files")
        state.mark = state.file_mark
    state.settings, state.bad, state.looked_at = settings, run.bad, run.sources.identity_digests[-1]
    return state


def _new_journal(run: PrepareRun, settings: dict[str, Any]) -> Journal:
    """Deletes the files of an earlier run, and writes a new journal."""
    empty(run.folder, {journal.LOCK})
    files_read = run.sources.identity_digests[run.start.files_read]
    nothing = Mark(run.start, [Counts() for _ in run.sources.inputs], files_read)
    state = Journal(settings, nothing, nothing, looked_at=run.sources.identity_digests[-1], bad=run.bad)
    state.write(run.folder)
    return state


def _install_tokenizer(run: PrepareRun, info: TokenizerInfo | None) -> TokenizerInfo:
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


def _train_tokenizer(run: PrepareRun, path: Path) -> None:
    """Trains a tokenizer in a helper process, so that an exception can end the training."""
    with Helpers(1, threads=run.workers) as helpers:
        trainer, sample = helpers.serving(tokenizer_trainer, run.train_tokenizer, path), _training_sample(run)
        while texts := list(islice(filter(None, sample), TEXTS_AT_ONCE)):
            trainer.submit(*texts).result()
        trainer.submit().result()


def _training_sample(run: PrepareRun) -> Iterator[str]:
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


def _tokenise(run: PrepareRun, state: Journal, info: TokenizerInfo) -> None:
    """Writes the token stream, from the journal's mark to the end of the inputs."""
    item = np.dtype(info.dtype).itemsize
    encode = tokenizers.encoder(tokenizers.load(info.path, parse_special=run.parse_special))
    total = run.range.size
    run.progress("tokenise", 0, total)
    check_disk(run, _estimate(run, encode, item) / run.tasks, [run.folder])
    (run.folder / STREAM).touch()
    with (run.folder / STREAM).open("r+b") as stream:
        if stream.seek(0, os.SEEK_END) < state.mark.tokens * item:
            raise UserError(f"{run.folder / STREAM} is shorter than its journal says. Delete {run.folder}.")
        stream.seek(state.mark.tokens * item)
        writer = StreamWriter(run, state, stream, item)
        batches = read_batches(run.sources, state.mark.position, run.fields, encode, run.range.stop)
        exclude = None if run.excluded is None else run.folder / EXCLUDED
        if run.excluded is not None and exclude is not None:
            run.excluded.save(exclude)
        function = run.helpers.serving(encoder, info, run.fields, run.parse_special, run.selection.dedup, exclude)
        try:
            for batch, encoded in _in_order(function, batches):
                writer.write(batch, encoded)
                run.progress("tokenise", min(max(0, batch.read - run.range.before), total), total)
            state.complete = True
            writer.commit()
        except (UserError, KeyboardInterrupt):
            writer.commit()
            raise
        finally:
            writer.close()


def _in_order(function: Served, batches: Iterator[Item]) -> Iterator[tuple[Item, Any]]:
    """Yields each item with the result of the served function, in order. If `batches` raises `UserError`, yields all
    earlier items before raising the error."""
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
        waiting.append((batch, function.submit(batch)))
        if len(waiting) > 2 * function.count:
            batch, future = waiting.popleft()
            yield batch, future.result()
    while waiting:
        batch, future = waiting.popleft()
        yield batch, future.result()
    if failure:
        raise failure


def _estimate(run: PrepareRun, encode: Encode, item: int) -> float:
    """Estimates the bytes of the token stream and the shards together."""
    sample = ""
    for text, _ in read_texts(run.sources, run.fields, start=run.start, stop=run.range.stop):
        sample += text[: SIZE_SAMPLE - len(sample)]
        if len(sample) == SIZE_SAMPLE:
            break
    text_bytes = sum(source.text_bytes_estimate for source in run.inputs.files)
    return 2 * item * text_bytes * len(encode(sample)) / max(1, len(sample.encode()))
