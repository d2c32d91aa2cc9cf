"""`prepare` turns raw text into a folder of shuffled token shards.

1. Tokenise: write the documents as one stream of tokens, `<output>.partial/tokens.bin`.
   With `pack` "best-fit", also pack the documents into the instances of `packed.bin`.
2. Shuffle: instance j of the output is instance `permutation(j)` of the stream, or with "best-fit" of `packed.bin`.
3. Shard: write the instances in this order into shard files.

The Optimus paper (section 4) cuts instances from the tokens of each file separately, and drops the tail of each file.
Here one stream runs through all files.
"""

import errno
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar, get_args

import numpy as np

from optimus.config.sizes import size_text
from optimus.copies import copied, is_url
from optimus.cores import usable_cores
from optimus.data import files, journal, shards
from optimus.data import tokenizer as tokenizers
from optimus.data.documents import DocumentBatch, Encode, Position, read_batches, read_texts
from optimus.data.fields import CHAT, ChatField, TextField, chat_field, field_of
from optimus.data.files import BadFile, BadFileError
from optimus.data.helpers import Helpers
from optimus.data.inspection import FULL_CHECK_BYTES, listing, look, looked_at, with_encoding
from optimus.data.journal import EXCLUSIONS, Counts, Journal, Mark
from optimus.data.packing import pack as pack_documents
from optimus.data.selection import Dedup, Document, Selection, Signatures
from optimus.data.tokenizer import TokenizerInfo
from optimus.data.work import SUMS, Encoded, encoder, tokenizer_trainer, write_shard
from optimus.disk import printable, sync, user_path, write_json
from optimus.errors import UserError
from optimus.plugins import load_plugins

Progress = Callable[[str, int, int | None], None]
Item = TypeVar("Item")

STREAM = "tokens.bin"
PACKED = "packed.bin"

Pack = Literal["concatenate", "best-fit"]
SHARD_SIZE = 512 * 10**6
COMMIT_SECONDS = 5.0
TRAINING_SAMPLE = 64 << 20  # approximate bytes of text to train a tokenizer on
TEXTS_AT_ONCE = 64  # maximum number of texts in a message to the process that trains a tokenizer
LOOKED_AT_HERE = 16 << 20  # if the check reads at most this many bytes, the main process checks without helpers
SIZE_SAMPLE = 1 << 17  # characters of text from which `_estimate` extrapolates
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
    selection: Selection
    skip_bad: bool
    fields: TextField  # the parsed `text_field`
    bad: list[BadFile] = field(default_factory=list)

    @property
    def masked(self) -> bool:
        """True if `text_field` names conversations."""
        return self.text_field.startswith(CHAT)

    @property
    def rows(self) -> Path:
        """The file whose rows step 2 shuffles."""
        return self.partial / (STREAM if self.pack == "concatenate" else PACKED)

    def leave_out(self, bad: Sequence[tuple[files.Source, str]], partly: bool = False) -> None:
        """Removes the `bad` files from the sources. Raises `UserError` for bad files without `skip_bad`, or if no other
        file remains. `partly` is True if the check has read some files only in part."""
        total = len(self.sources.files) + len(self.bad)
        if bad and (not self.skip_bad or len(bad) == len(self.sources.files)):
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
    context: int = 2048,
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
    encoding: str = "utf-8",
    split: str | None = None,
    skip_bad: bool = False,
    plugins: Sequence[str] = (),
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

    `encoding` applies to files that are not valid UTF-8. `split` chooses a dataset of a folder that
    `DatasetDict.save_to_disk` wrote, or a split of a data set of the Hub. With `skip_bad`, `prepare` excludes unreadable
    files, and the index lists these files as `bad_files`. `plugins` names plugins with readers for other types of
    files. `prepare` calls `progress(stage, done, total)` now and then; `total` may be None.

    A new call resumes an interrupted call. If `output` is already complete with the same settings, the call returns the
    existing index. Raises `UserError` for bad input, too little disk space, or an `output` with other content.

    Example:
        index = optimus.prepare(["texts/"], "data", train_tokenizer=4096, context=256)
        index["tokens"]
    """
    arguments = {**locals()}
    if is_url(output):
        return copied(output, shards.INDEX, lambda folder: prepare(**(arguments | {"output": folder})), again=True)
    loaded = load_plugins(plugins)
    output = Path(os.path.abspath(user_path(output)))
    workers = usable_cores() if workers is None else workers
    _check(tokenizer, train_tokenizer, pack, context=context, workers=workers, shard_size=shard_size)
    selection = Selection(min_characters, max_characters, min_tokens, max_tokens, dedup)
    selection.check()
    field = field_of(text_field)
    info = tokenizers.inspect(user_path(tokenizer)) if tokenizer is not None else None
    if info is not None and not parse_special:
        tokenizers.check_text_stays_text(info)
    partial = output.with_name(f"{output.name}.partial")
    encoding = files.check_encoding(encoding)
    inputs = [inputs] if isinstance(inputs, str | Path) else inputs
    sources = files.resolve(inputs, leave_out=(output, partial), encoding=encoding, split=split)
    progress = progress or (lambda stage, done, total: None)
    given: dict[str, Any] = {
        "context": context,
        "seed": seed,
        "shard_size": shard_size,
        "text_field": text_field,
        "parse_special": parse_special,
        "pack": pack,
        "encoding": encoding,
    }
    trained_or_given = info.sha256 if info else f"trained to {train_tokenizer}"
    read_with = {"plugins": {plugin.name: plugin.sha256 for plugin in loaded}}
    settings = {"inputs": "", "tokenizer": trained_or_given, **given, **read_with, **asdict(selection)}
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
        skip_bad=skip_bad,
        fields=field,
    )
    with _disk_errors(run):
        if output.exists() and not (output.is_dir() and not any(output.iterdir())):
            return _finished_before(run, settings)
        with journal.locked(run.partial):
            return _prepare(run, settings, info)


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


def _finished_before(run: _Run, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the index of an `output` that exists. Raises `UserError` unless a run with the same settings made the
    output."""
    if not (run.output / shards.INDEX).exists():
        raise UserError(f"{run.output} exists and is not prepared data. Choose another `output`.")
    index = shards.read_index(run.output)
    if different := _differences(run, index, settings):
        raise UserError(f"{run.output} is the output of another run ({different}). Choose another `output`.")
    run.progress("already complete", 1, 1)
    return index


def _differences(run: _Run, index: dict[str, Any], settings: dict[str, Any]) -> str:
    """Describes how this run differs from the settings of an index. If `skip_bad` is set, the comparison ignores the
    bad files of the index."""
    excluded = [(bad["input"], bad["name"]) for bad in index.get("bad_files", ()) if run.skip_bad]
    inputs = run.sources.without(excluded).content_digest()
    return journal.differences(index["settings"], settings | {"inputs": inputs})


@contextmanager
def _disk_errors(run: _Run) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # a progress report raises this error, not a disk
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            path = error.filename or run.partial
            raise UserError(
                f"cannot write {path}: {error.strerror or error}. Choose another `output`, or make it writable."
            ) from error
        raise UserError(
            f"disk full while writing {run.partial}. The progress is saved: free some space and run the same command "
            "again to continue."
        ) from error


def _prepare(run: _Run, settings: dict[str, Any], info: TokenizerInfo | None) -> dict[str, Any]:
    if (run.partial / shards.INDEX).exists():  # only `_finish` is missing
        index = shards.read_index(run.partial)
        _refuse(run, _differences(run, index, settings))
        return _finish(run, index)
    state = _open_journal(run, settings)
    for stale in run.partial.glob("*.tmp"):
        stale.unlink()
    while True:
        try:
            made = _install_tokenizer(run, info)
            if state.instances is None:
                _tokenise(run, state, made)
            break
        except BadFileError as error:
            state = _without_bad_file(run, state, error)
    instances = state.instances or _pack(run, state, made)
    _shard(run, state, instances, made)
    _join_sums(run, instances, made)
    index = _index(run, state, instances, made)
    write_json(run.partial / shards.INDEX, index)
    return _finish(run, index)


def _without_bad_file(run: _Run, state: Journal, error: BadFileError) -> Journal:
    """Excludes the bad file of `error` from the sources, and returns the journal to resume from. Raises `UserError`
    without `skip_bad`."""
    number = next(k for k, source in enumerate(run.sources.files) if str(source.path) == error.path)
    bad = [(run.sources.files[number], with_encoding(run.sources.files[number], error.what))]
    if not run.skip_bad:
        bad += _look(run, run.sources.files[number + 1 :], full=True)[0]
    run.leave_out(bad)
    settings = state.settings | {"inputs": run.sources.content_digest()}
    if run.train_tokenizer is not None:  # the new tokenizer depends on this file too
        return _new_journal(run, settings)
    state.settings, state.mark, state.bad = settings, state.file_mark, run.bad
    state.looked_at = run.sources.identity_digests[-1]
    state.write(run.partial)
    return state


def _look_at_all(run: _Run) -> None:
    """Checks all files and excludes the bad files; see `_Run.leave_out`."""
    # A new tokenizer must depend on good files alone.
    bad, partly = _look(run, run.sources.files, full=run.train_tokenizer is not None)
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
            f"{run.partial} holds an unfinished run with other settings ({different}). "
            "Delete it to start over, or choose another `output`."
        )


def _open_journal(run: _Run, settings: dict[str, Any]) -> Journal:
    """Opens the journal of an interrupted run, at the last mark that is still valid, or starts a new journal. Excludes
    bad files from the sources."""
    state = journal.read(run.partial)
    if state is None:
        others = [path.name for path in run.partial.iterdir() if path.name != journal.LOCK]
        if not all(name.endswith(".tmp") for name in others):
            raise UserError(f"{run.partial} exists and is not an unfinished run. Choose another `output`.")
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
    reading = state.instances is None and run.train_tokenizer is None
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
    for path in run.partial.iterdir():
        if path.name != journal.LOCK:
            path.unlink()
    nothing = Mark(Position(0), [Counts() for _ in run.sources.inputs])
    state = Journal(settings, nothing, nothing, looked_at=run.sources.identity_digests[-1], bad=run.bad)
    state.write(run.partial)
    return state


def _install_tokenizer(run: _Run, info: TokenizerInfo | None) -> TokenizerInfo:
    """Copies or trains the tokenizer unless the folder has one. Returns the description of the tokenizer in the
    folder."""
    path = run.partial / tokenizers.FILE
    if not path.exists():
        if info:
            temporary = path.with_suffix(".tmp")
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
    """Yields texts to train a tokenizer on, from the beginning of each file."""
    total_bytes = sum(source.text_bytes_estimate for source in run.sources.files)
    share = min(1.0, TRAINING_SAMPLE / max(1.0, total_bytes))
    total, done = int(total_bytes * share), 0
    for source in run.sources.files:
        remaining = int(source.text_bytes_estimate * share)
        one = files.Sources(run.sources.inputs, (source,))
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
    total = sum(source.size for source in run.sources.files)
    run.progress("tokenise", 0, total)
    _check_disk(run, _estimate(run, encode, item))
    (run.partial / STREAM).touch()
    with (run.partial / STREAM).open("r+b") as stream:
        if stream.seek(0, os.SEEK_END) < state.mark.tokens * item:
            raise UserError(f"{run.partial / STREAM} is shorter than its journal says. Delete {run.partial}.")
        stream.seek(state.mark.tokens * item)
        writer = _StreamWriter(run, state, stream, item)
        batches = read_batches(run.sources, state.mark.position, run.fields, encode)
        try:
            with Helpers(run.workers, encoder, info, run.fields, run.parse_special, run.selection.dedup) as helpers:
                for batch, encoded in _in_order(helpers, batches):
                    writer.write(batch, encoded)
                    run.progress("tokenise", batch.read, total)
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
        self._document = replace(state.mark.document)
        self._signatures = Signatures(run.partial, run.selection.dedup, state.mark.documents)
        self._reached = (state.mark, state.file_mark)
        self._committed = time.monotonic()

    def write(self, batch: DocumentBatch, encoded: Encoded) -> None:
        tokens, start = memoryview(encoded.tokens), 0
        for piece in encoded.pieces:
            stop = start + piece.tokens * self._item
            self._stream.write(tokens[start:stop])
            self._document.add(piece, self._run.selection.dedup)
            start = stop
            if piece.ends_document:
                self._end_document(self._counts[batch.input])
        if batch.after is None:
            return
        files_read = self._run.sources.identity_digests[batch.after.files_read]
        mark = Mark(batch.after, [replace(counts) for counts in self._counts], files_read, replace(self._document))
        self._reached = (mark, mark if batch.after.offset == 0 else self._reached[1])
        if time.monotonic() - self._committed >= COMMIT_SECONDS:
            self.commit()

    def _end_document(self, counts: Counts) -> None:
        """Counts the current document as included, empty or excluded.

        Does not truncate the stream, because the last journal may count tokens of an excluded document.
        """
        document, self._document = self._document, Document()
        if not document.text_bytes:
            counts.empty_documents += 1
            return
        misfit = self._run.selection.misfit(document)
        if misfit is None and self._signatures.is_new(bytes.fromhex(document.signature)):
            counts.documents += 1
            counts.text_bytes += document.text_bytes
            counts.tokens += document.tokens
            return
        why = misfit or "duplicates"
        setattr(counts, why, getattr(counts, why) + 1)
        self._stream.seek(-document.tokens * self._item, os.SEEK_CUR)

    def close(self) -> None:
        self._signatures.close()

    def commit(self) -> None:
        self._signatures.sync()
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._state.mark, self._state.file_mark = self._reached
        self._state.write(self._run.partial)
        self._committed = time.monotonic()


def _pack(run: _Run, state: Journal, info: TokenizerInfo) -> int:
    """Packs the stream if `pack` is "best-fit". Returns the number of instances. If the stream has fewer tokens than
    one instance, deletes the folder and raises `UserError`."""
    tokens = state.mark.tokens
    if tokens < run.context:
        for path in run.partial.iterdir():
            path.unlink()
        run.partial.rmdir()
        what = f"only {tokens} tokens, too few for one instance of {run.context}" if tokens else "no text"
        cure = "Give more text, or a smaller `context`." if tokens else "Every document is empty or left out."
        raise UserError(f"the input contains {what}. {cure}")
    if run.pack == "concatenate":
        state.instances = tokens // run.context
    else:
        run.progress("pack", 0, None)
        packed = pack_documents(
            run.partial / STREAM, run.rows, context=run.context, eos_id=info.eos_id, dtype=info.dtype, tokens=tokens
        )
        sync(run.partial)
        state.instances, *_ = packed
        state.packed = {"padding_tokens": packed.padding_tokens, "cut_documents": packed.cut_documents}
    state.write(run.partial)
    return state.instances


def _estimate(run: _Run, encode: Encode, item: int) -> float:
    """Estimates the bytes of the token stream and the shards together."""
    sample = ""
    for text, _ in read_texts(run.sources, run.fields):
        sample += text[: SIZE_SAMPLE - len(sample)]
        if len(sample) == SIZE_SAMPLE:
            break
    text_bytes = sum(source.text_bytes_estimate for source in run.sources.files)
    return 2 * item * text_bytes * len(encode(sample)) / max(1, len(sample.encode()))


def _check_disk(run: _Run, needed: float) -> None:
    """Raises `UserError` unless the disk has room for `needed` bytes, less the bytes that this run has already
    written."""
    missing = needed - sum(path.stat().st_size for path in run.partial.iterdir())
    free = shutil.disk_usage(run.partial).free
    if missing > free:
        raise UserError(
            f"too little disk space for {run.output}: about {size_text(missing)} needed (tokens, and as much again "
            f"for the shards), {size_text(free)} free. Free some space, or choose an `output` on another disk."
        )


def _shard(run: _Run, state: Journal, instances: int, info: TokenizerInfo) -> None:
    """Writes the shards that are missing from the journal or the folder."""
    plan = _shard_plan(run, instances, info)
    missing = [
        (name, start, stop)
        for name, start, stop in plan
        if name not in state.shards or not all((run.partial / f).exists() for f in (name, f"{name}{SUMS}"))
    ]
    if not missing:
        return
    size = instances * run.context * np.dtype(info.dtype).itemsize
    if not run.rows.exists() or run.rows.stat().st_size < size:
        raise UserError(f"{run.rows} is shorter than its journal says. Delete {run.partial}.")
    if run.pack != "concatenate":
        (run.partial / STREAM).unlink(missing_ok=True)
    _check_disk(run, 2 * size)
    gathered = run.rows, run.partial, instances, run.context, info.dtype, run.seed
    done = instances - sum(stop - start for _, start, stop in missing)
    run.progress("shard", done, instances)
    with Helpers(min(run.workers, len(missing)), partial, write_shard, *gathered) as helpers:
        futures = [helpers.submit(*shard) for shard in missing]
        for (name, start, stop), future in zip(missing, futures):
            state.shards[name] = future.result()
            sync(run.partial)
            state.write(run.partial)
            done += stop - start
            run.progress("shard", done, instances)


def _join_sums(run: _Run, instances: int, info: TokenizerInfo) -> None:
    """Writes the checksums of all instances as one array."""
    temporary = run.partial / f"{shards.SUMS}.tmp"
    with temporary.open("wb") as file:
        header = {"descr": "<u4", "fortran_order": False, "shape": (instances,)}
        np.lib.format.write_array_header_1_0(file, header)
        for name, _, _ in _shard_plan(run, instances, info):
            file.write((run.partial / f"{name}{SUMS}").read_bytes())
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(run.partial / shards.SUMS)


def _shard_plan(run: _Run, instances: int, info: TokenizerInfo) -> list[tuple[str, int, int]]:
    """Lists the shards as (name, first row, row after the last row)."""
    rows = max(1, run.shard_size // (run.context * np.dtype(info.dtype).itemsize))
    starts = range(0, instances, rows)
    return [(f"shard-{k:05d}.npy", start, min(start + rows, instances)) for k, start in enumerate(starts)]


def _index(run: _Run, state: Journal, instances: int, info: TokenizerInfo) -> dict[str, Any]:
    counts = state.mark.counts
    used = instances * run.context
    return {
        "format": shards.FORMAT,
        "version": shards.VERSION,
        "settings": state.settings,
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
        "instances": instances,
        "tokens": used,
        "dropped_tokens": max(0, state.mark.tokens - used),
        **state.packed,
        "documents": sum(c.documents for c in counts),
        "empty_documents": sum(c.empty_documents for c in counts),
        **{name: sum(getattr(c, name) for c in counts) for name in EXCLUSIONS},
        "text_bytes": sum(c.text_bytes for c in counts),
        "skipped_files": sum(run.sources.skipped.values()),
        "skipped_by_ending": run.sources.skipped,
        "bad_files": [bad.entry() for bad in sorted(run.bad, key=lambda bad: (bad.input, bad.name))],
        "sources": [
            {"name": name, "files": sum(source.input == k for source in run.sources.files), **asdict(counts[k])}
            for k, name in enumerate(run.sources.inputs)
        ],
        "shards": [
            {"file": name, "instances": stop - start, "sha256": state.shards[name]}
            for name, start, stop in _shard_plan(run, instances, info)
        ],
        "sums": shards.SUMS,
    }


def _finish(run: _Run, index: dict[str, Any]) -> dict[str, Any]:
    """Deletes the files that only an unfinished run needs, and renames the folder to `output`."""
    keep = {shards.INDEX, shards.SUMS, tokenizers.FILE, *(shard["file"] for shard in index["shards"])}
    for path in run.partial.iterdir():
        if path.name not in keep and path.name != journal.LOCK:
            path.unlink()
    sync(run.partial)
    run.partial.rename(run.output)
    # The lock stays until after the rename, because another run could otherwise write into the folder.
    (run.output / journal.LOCK).unlink()
    sync(run.output)
    sync(run.output.parent)
    return index
