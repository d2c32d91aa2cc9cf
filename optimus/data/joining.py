"""The second stage of `prepare`: makes shards of the token streams of all tasks.

1. With `dedup`, remove the duplicates from each stream; see `duplicates.py`.
2. With `pack` "best-fit", and with `to`, find the ends of the documents of each stream.
3. Plan: count the instances, and with "best-fit" pack the documents into rows.
4. Write the shards. With `to`, write the documents in their order instead; see `token_writers.py`.

Each step consists of units, which several processes can share.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from optimus.data.duplicates import (
    COUNTED,
    RUNS,
    STREAM,
    Found,
    check_records,
    find_duplicates,
    remove_duplicates,
    sort_keys,
)
from optimus.data.gather import DIGEST, PLAN, Stream, shard_writer, write_packed
from optimus.data.journal import Counts
from optimus.data.packing import document_ends, pack, write_ends
from optimus.data.selection import Dedup
from optimus.data.token_writers import FileBlock, TokenFilePlan, block_writer, file_borders, written_type
from optimus.data.tokenizer import TokenizerInfo
from optimus.data.units import WorkUnit, do_units, naming_damage, read_array
from optimus.disk import parse_json, sync, temporary_name, write_json
from optimus.errors import UserError

ENDS = "ends.npy"
PACKED = "packed.npy"

Done = Callable[[WorkUnit], None]


class TooFewTokensError(UserError):
    """Raised for streams with fewer tokens than an instance."""


@dataclass
class ShardPlan:
    """The numbers of instances, of tokens and of documents (by input), and the streams of the instances."""

    instances: int
    tokens: int
    counts: list[Counts]
    streams: list[Stream]
    packed: dict[str, int] = field(default_factory=dict)  # numbers of padding tokens and cut documents
    borders: list[int] = field(default_factory=list)  # first tokens of token files, and the end of the last one

    def write(self, folder: Path) -> None:
        """Writes the plan into `folder`, which contains the streams."""
        streams = [[str(stream.path.relative_to(folder)), stream.tokens] for stream in self.streams]
        write_json(folder / PLAN, {**asdict(self), "streams": streams})

    @classmethod
    def read(cls, folder: Path) -> "ShardPlan":
        with naming_damage(folder / PLAN, folder / PLAN):
            stored = parse_json((folder / PLAN).read_bytes())
            stored["counts"] = [Counts(**each) for each in stored["counts"]]
            stored["streams"] = [Stream(folder / name, tokens) for name, tokens in stored["streams"]]
            return cls(**stored)


@dataclass
class Joint:
    """The facts that the steps need.

    `folders` contain the streams, and `counts` has the counts of the documents of each stream by input.
    `to` is a format of token files, which have no instances, or "optimus". `memory` is in bytes, for each of the
    `workers`. Units begin with number `first`.
    """

    folder: Path
    folders: Sequence[Path]
    counts: Sequence[list[Counts]]
    info: TokenizerInfo
    context: int
    seed: int
    shard_size: int
    best_fit: bool
    dedup: Dedup
    workers: int
    memory: int
    first: int
    is_finished: Callable[[], bool]
    to: str = "optimus"

    @property
    def item(self) -> int:
        return np.dtype(self.info.dtype).itemsize

    @property
    def file_type(self) -> str:
        """The type of the tokens in token files."""
        return written_type(self.to, self.info.vocab_size)

    def do(
        self, units: Sequence[WorkUnit], make: Callable[..., Any], *setup: Any, done: Done = lambda unit: None
    ) -> None:
        do_units(
            self.folder,
            units,
            self.workers,
            make,
            *setup,
            first=self.first % max(1, len(units)),
            is_finished=self.is_finished,
            done=done,
        )


def make_plan(joint: Joint, progress: Callable[[str, int, int | None], None]) -> ShardPlan:
    """Does steps 1 to 3. Raises `TooFewTokensError` if the streams have fewer tokens than one instance."""
    if not _is_planned(joint):
        if joint.dedup != "none":
            _find_duplicates(joint, progress)
        chosen = [_stream(*each, joint.dedup) for each in zip(joint.folders, joint.counts)]
        plan = _counted(joint, chosen)
        if joint.best_fit or joint.to != "optimus":
            progress("pack" if joint.best_fit else "find documents", 0, None)
            ends = [WorkUnit(each / ENDS, (stream, each / ENDS)) for each, stream in zip(joint.folders, plan.streams)]
            joint.do(ends, partial, _write_ends, joint.info)
        if joint.best_fit:
            unit = WorkUnit(joint.folder / PLAN, (plan, [*joint.folders], joint.context))
            joint.do([unit], partial, _write_packed_plan, joint.folder)
        else:
            plan.borders = _borders(joint, plan)
            plan.write(joint.folder)
    return ShardPlan.read(joint.folder)


def _is_planned(joint: Joint) -> bool:
    """Returns True if there is a plan. Deletes a plan of streams that the user has deleted since."""
    if not (joint.folder / PLAN).exists():
        return False
    there = all(stream.path.exists() for stream in ShardPlan.read(joint.folder).streams)
    if not there:
        (joint.folder / PLAN).unlink()
    return there


def _find_duplicates(joint: Joint, progress: Callable[[str, int, int | None], None]) -> None:
    setup, found = (joint.dedup, joint.memory), Found(joint.folder, len(joint.folders))
    finished, total = 0, 3 * len(joint.folders)

    def done(unit: WorkUnit) -> None:
        nonlocal finished
        finished += 1
        progress("find duplicates", min(finished, total), total)

    progress("find duplicates", 0, total)
    for folder, counts in zip(joint.folders, joint.counts):
        if not (folder / RUNS).exists():
            check_records(folder, sum(each.documents for each in counts), joint.dedup)
    joint.do([WorkUnit(each / RUNS, (each,)) for each in joint.folders], _sorter, *setup, done=done)
    parts = [WorkUnit(found.marker(part), (part,)) for part in range(found.parts)]
    joint.do(parts, _finder, [*joint.folders], found, *setup, done=done)
    numbered = enumerate(zip(joint.folders, joint.counts))
    streams = [WorkUnit(each / COUNTED, (each, number, counts)) for number, (each, counts) in numbered]
    joint.do(streams, _remover, found, joint.item, *setup, done=done)


def _sorter(dedup: Dedup, memory: int) -> Callable[[Path], None]:
    return partial(sort_keys, dedup=dedup, memory=memory)


def _finder(folders: Sequence[Path], found: Found, dedup: Dedup, memory: int) -> Callable[[int], None]:
    return lambda part: find_duplicates(folders, found, part, dedup, memory)


def _remover(found: Found, item: int, dedup: Dedup, memory: int) -> Callable[[Path, int, list[Counts]], None]:
    return lambda folder, number, counts: remove_duplicates(folder, number, found, counts, item, dedup, memory)


def _stream(folder: Path, counts: list[Counts], dedup: Dedup) -> tuple[Stream, list[Counts]]:
    """Returns the stream of one task without duplicates, and its counts."""
    name = STREAM
    if dedup != "none":
        with naming_damage(folder / COUNTED, folder):
            stored = parse_json((folder / COUNTED).read_bytes())
            name, counts = stored["file"], [Counts(**each) for each in stored["counts"]]
    return Stream(folder / name, sum(each.tokens for each in counts)), counts


def _counted(joint: Joint, chosen: Sequence[tuple[Stream, list[Counts]]]) -> ShardPlan:
    """Returns the plan for documents that are not packed."""
    for stream, _ in chosen:
        if not stream.path.exists() or stream.path.stat().st_size < stream.tokens * joint.item:
            raise UserError(
                f"{stream.path} is shorter than its journal says. Delete {stream.path.parent} and run again."
            )
    streams = [stream for stream, _ in chosen]
    tokens = sum(stream.tokens for stream in streams)
    if tokens < (joint.context if joint.to == "optimus" else 1):
        what = f"only {tokens} tokens, too few for one instance of {joint.context}" if tokens else "no text"
        cure = "Give more text, or a smaller `context`." if tokens else "Every document is empty or left out."
        raise TooFewTokensError(f"the input contains {what}. {cure}")
    instances = tokens // joint.context if joint.to == "optimus" else 0
    return ShardPlan(instances, tokens, add_counts([counts for _, counts in chosen]), streams)


def add_counts(tables: Sequence[Sequence[Counts]]) -> list[Counts]:
    """Adds tables of counts by input."""
    return [
        Counts(*(sum(getattr(each, name) for each in column) for name in asdict(Counts())))
        for column in zip(*tables, strict=True)
    ]


def _write_ends(info: TokenizerInfo, stream: Stream, path: Path) -> None:
    temporary = temporary_name(path)
    with temporary.open("wb") as file:
        write_ends(file, document_ends(stream.path, info.eos_id, info.dtype, stream.tokens))
    sync(temporary)
    temporary.replace(path)


def _write_packed_plan(folder: Path, plan: ShardPlan, folders: Sequence[Path], context: int) -> None:
    packed = pack([read_array(each / ENDS, each / ENDS) for each in folders], context)
    write_packed(folder / PACKED, packed)
    plan.instances = packed.instances
    padding = packed.instances * context - plan.tokens
    plan.packed = {"padding_tokens": padding, "cut_documents": packed.cut_documents}
    plan.write(folder)


def _borders(joint: Joint, plan: ShardPlan) -> list[int]:
    """Returns the first tokens of the token files, and the end of the last one."""
    if joint.to == "optimus":
        return []
    if joint.to == "megatron":
        return [0, plan.tokens]
    most = max(1, joint.shard_size // np.dtype(joint.file_type).itemsize)
    return file_borders(plan.streams, [each / ENDS for each in joint.folders], most)


def shards_of(joint: Joint, instances: int) -> list[tuple[str, int, int]]:
    """Lists the shards as (name, first row, row after the last row)."""
    rows = max(1, joint.shard_size // (joint.context * joint.item))
    starts = range(0, instances, rows)
    return [(f"shard-{k:05d}.npy", start, min(start + rows, instances)) for k, start in enumerate(starts)]


def write_shards(joint: Joint, plan: ShardPlan, progress: Callable[[str, int, int | None], None]) -> None:
    """Writes the missing shards (step 4)."""
    shards = shards_of(joint, plan.instances)
    units = [WorkUnit(joint.folder / f"{shard[0]}{DIGEST}", shard) for shard in shards]
    rows = {unit.result: shard[2] - shard[1] for unit, shard in zip(units, shards)}
    finished = sum(rows[unit.result] for unit in units if unit.result.exists())

    def done(unit: WorkUnit) -> None:
        nonlocal finished
        finished += rows[unit.result]
        progress("shard", finished, plan.instances)

    progress("shard", finished, plan.instances)
    packed = joint.folder / PACKED if joint.best_fit else None
    setup = plan.instances, joint.context, joint.info.dtype, joint.info.eos_id, joint.seed, joint.memory
    joint.do(units, shard_writer, joint.folder, plan.streams, packed, *setup, done=done)


def token_blocks(joint: Joint, plan: ShardPlan) -> list[FileBlock]:
    """Lists the blocks of the token files, in order."""
    return _token_files(joint, plan).blocks()


def write_token_files(joint: Joint, plan: ShardPlan, progress: Callable[[str, int, int | None], None]) -> None:
    """Writes the missing blocks of the token files (step 4)."""
    blocks = token_blocks(joint, plan)
    units = [WorkUnit(block.digest(joint.folder), (block,)) for block in blocks]
    sizes = {unit.result: block.stop - block.start for unit, block in zip(units, blocks)}
    finished, total = sum(sizes[unit.result] for unit in units if unit.result.exists()), sum(sizes.values())

    def done(unit: WorkUnit) -> None:
        nonlocal finished
        finished += sizes[unit.result]
        progress("write", finished, total)

    progress("write", finished, total)
    joint.do(units, block_writer, joint.folder, _token_files(joint, plan), done=done)


def _token_files(joint: Joint, plan: ShardPlan) -> TokenFilePlan:
    ends = [each / ENDS for each in joint.folders]
    return TokenFilePlan(joint.to, plan.streams, ends, plan.borders, joint.info.dtype, joint.file_type)
