"""Writes the token stream of `prepare`, and the journal that tells how far the stream is."""

import os
import time
from copy import deepcopy
from dataclasses import replace
from typing import BinaryIO, Literal

from optimus.data.documents import DocumentBatch
from optimus.data.duplicates import RECORDS, record, record_type
from optimus.data.journal import Journal, Mark
from optimus.data.prepare_run import PrepareRun
from optimus.data.selection import Document
from optimus.data.work import Encoded
from optimus.errors import UserError

COMMIT_SECONDS = 5.0


class StreamWriter:
    """Appends tokens to the stream, and advances the journal every few seconds."""

    def __init__(self, run: PrepareRun, state: Journal, stream: BinaryIO, item: int) -> None:
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


def _open_records(run: PrepareRun, saved: int) -> BinaryIO | None:
    """Opens the records of the documents after the first `saved`; None without deduplication."""
    if run.selection.dedup == "none":
        return None
    path, size = run.folder / RECORDS, saved * record_type(run.selection.dedup).itemsize
    path.touch()
    if path.stat().st_size < size:
        raise UserError(f"{path} is shorter than its journal says. Delete {run.folder}.")
    os.truncate(path, size)
    return path.open("ab")
