"""What the helper processes do: tokenise batches of text, and gather shards of shuffled instances."""

import hashlib
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from optimus.data import tokenizer as tokenizers
from optimus.data.documents import DocumentBatch, parse_lines
from optimus.data.fields import Segment
from optimus.data.permutation import Permutation
from optimus.data.selection import Dedup, DocumentPiece, signer
from optimus.data.shards import NOT_PREDICTED
from optimus.data.tokenizer import TokenizerInfo

GATHER = 32 << 20  # bytes gathered at once
SUMS = ".crc32"


@dataclass(frozen=True)
class Encoded:
    """A tokenised batch: the bytes of its tokens, and the pieces of documents that they are of."""

    tokens: bytes
    pieces: list[DocumentPiece]


def encoder(
    info: TokenizerInfo, text_field: str, parse_special: bool, dedup: Dedup
) -> Callable[[DocumentBatch], Encoded]:
    """What tokenises batches, each document followed by the end-of-text token."""
    tokenizer = tokenizers.load(info.path, parse_special=parse_special)
    sign = signer(dedup)

    def encode(batch: DocumentBatch) -> Encoded:
        pieces, ends = [[Segment(text)] for text in batch.texts], batch.ends
        if batch.lines:
            pieces = list(parse_lines(batch, text_field))
            ends = [True] * len(pieces)
        stretches = [segment.text for segments in pieces for segment in segments]
        encodings = iter(tokenizer.encode_batch_fast(stretches, add_special_tokens=False))
        tokens: list[int] = []
        found: list[DocumentPiece] = []
        whole = [bool(batch.lines), *ends]  # whether a document ends before each piece, as far as the batch tells
        for segments, begins, end in zip(pieces, whole, ends):
            before, text = len(tokens), "".join(segment.text for segment in segments)
            for segment in segments:
                ids = next(encodings).ids
                tokens += ids if segment.predicted else [id | NOT_PREDICTED for id in ids]
            if end and text:
                tokens.append(info.eos_id)
            alone = begins and end
            counts = len(tokens) - before, len(text), len(text.encode())
            found.append(DocumentPiece(*counts, end, sign(text, alone), alone))
        return Encoded(np.array(tokens, dtype=info.dtype).tobytes(), found)

    return encode


def tokenizer_trainer(vocab_size: int, path: Path) -> Callable[..., None]:
    """What trains a tokenizer on the texts of all calls when it is called without any."""
    held: list[str] = []

    def take(*texts: str) -> None:
        held.extend(texts)
        if not texts:
            tokenizers.train(held, vocab_size, path)

    return take


def write_shard(
    stream: Path, folder: Path, instances: int, context: int, dtype: str, seed: int, name: str, start: int, stop: int
) -> str:
    """Writes output rows `start` to `stop` as the array file `name` in `folder`, which appears complete or not at all.

    Output row j is row `permutation(j)` of the token stream, whose `instances` rows are of `context` tokens of `dtype`.
    Returns the checksum of the file; the CRC-32 of each row is in the file `name` + `SUMS` before.
    The stream is read with pread, not mapped: mapped pages count as memory used.
    """
    temporary = folder / f"{name}.{os.getpid()}.tmp"  # a helper of a killed run may still be at work here
    row_bytes = context * np.dtype(dtype).itemsize
    permutation = Permutation(instances, "shuffle", seed)
    digest = hashlib.sha256()
    sums_N = np.empty(stop - start, dtype="<u4")
    with stream.open("rb", buffering=0) as tokens, temporary.open("wb+") as shard:
        header = {"descr": dtype, "fortran_order": False, "shape": (stop - start, context)}
        np.lib.format.write_array_header_1_0(shard, header)
        shard.seek(0)
        digest.update(shard.read())
        rows = max(1, GATHER // row_bytes)
        for first in range(start, stop, rows):
            source = permutation(np.arange(first, min(first + rows, stop)))
            block = memoryview(bytearray(len(source) * row_bytes))
            for row in np.argsort(source).tolist():  # in the order of the disk
                data = os.pread(tokens.fileno(), row_bytes, int(source[row]) * row_bytes)
                block[row * row_bytes : (row + 1) * row_bytes] = data
                sums_N[first - start + row] = zlib.crc32(data)
            digest.update(block)
            shard.write(block)
        shard.flush()
        os.fsync(shard.fileno())
    sums = temporary.with_suffix(f"{SUMS}.tmp")
    with sums.open("wb") as file:
        file.write(sums_N.tobytes())
        file.flush()
        os.fsync(file.fileno())
    sums.replace(folder / f"{name}{SUMS}")
    temporary.replace(folder / name)
    return digest.hexdigest()
