"""The second stage of `prepare`: makes shards of the token streams of all tasks.

1. With `dedup`, remove the duplicates from each stream; see `duplicates.py`.
2. With `pack` "best-fit", and with `to`, find the ends of the documents of each stream.
3. Plan: count the instances, and with "best-fit" pack the documents into rows.
4. Write the shards. With `to`, write the documents in their order instead; see `outputs.py`.

Each step consists of units, which several processes can share.
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

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
from optimus.data.gather import PLAN, Stream, read_packed, write_packed
from optimus.data.joint import ENDS, PACKED, Joint, OutputWork, ShardPlan
from optimus.data.journal import Counts
from optimus.data.packing import document_ends, documents_of, pack, windows_of, write_ends
from optimus.data.prepare_run import Progress
from optimus.data.selection import Dedup
from optimus.data.tokenizer import TokenizerInfo
from optimus.data.units import WorkUnit, naming_damage, read_array
from optimus.disk import parse_json, replacing
from optimus.errors import UserError


class TooFewTokensError(UserError):
    """Raised for streams with fewer tokens than an instance."""


def make_plan(joint: Joint, progress: Progress) -> ShardPlan:
    """Does steps 1 to 3. Raises `TooFewTokensError` if the streams have fewer tokens than one instance."""
    if not _is_planned(joint):
        if joint.dedup != "none":
            _find_duplicates(joint, progress)
        chosen = [_stream(*each, joint.dedup) for each in zip(joint.folders, joint.counts)]
        plan = _counted(joint, chosen)
        if joint.output.needs_ends(joint):
            progress("pack" if joint.best_fit else "find documents", 0, None)
            ends = [WorkUnit(each / ENDS, (stream, each / ENDS)) for each, stream in zip(joint.folders, plan.streams)]
            joint.do(ends, partial, _write_ends, joint.info)
        if joint.best_fit:
            count = windows_of([read_array(each / ENDS, each / ENDS) for each in joint.folders])
            windows = [joint.folder / f"{number:05d}-{PACKED}" for number in range(count)]
            units = [WorkUnit(path, (path, number)) for number, path in enumerate(windows)]
            joint.do(units, partial, _pack_window, [*joint.folders], joint.context)
            unit = WorkUnit(joint.folder / PLAN, (plan, windows, joint.context))
            joint.do([unit], partial, _write_packed_plan, joint.folder)
        else:
            joint.output.plan(joint, plan)
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


def _find_duplicates(joint: Joint, progress: Progress) -> None:
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
    joint.do([WorkUnit(each / RUNS, (each,)) for each in joint.folders], partial, sort_keys, *setup, done=done)
    parts = [WorkUnit(found.marker(part), (part,)) for part in range(found.parts)]
    joint.do(parts, partial, find_duplicates, *setup, [*joint.folders], found, done=done)
    numbered = enumerate(zip(joint.folders, joint.counts))
    streams = [WorkUnit(each / COUNTED, (each, number, counts)) for number, (each, counts) in numbered]
    joint.do(streams, partial, remove_duplicates, *setup, found, joint.item, done=done)


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
    if tokens < joint.output.least_tokens(joint):
        what = f"only {tokens} tokens, too few for one instance of {joint.context}" if tokens else "no text"
        cure = "Give more text, or a smaller `context`." if tokens else "Every document is empty or left out."
        raise TooFewTokensError(f"the input contains {what}. {cure}")
    return ShardPlan(0, tokens, add_counts([counts for _, counts in chosen]), streams)


def add_counts(tables: Sequence[Sequence[Counts]]) -> list[Counts]:
    """Adds tables of counts by input."""
    return [
        Counts(*(sum(getattr(each, name) for each in column) for name in asdict(Counts())))
        for column in zip(*tables, strict=True)
    ]


def _write_ends(info: TokenizerInfo, stream: Stream, path: Path) -> None:
    with replacing(path) as file:
        write_ends(file, document_ends(stream.path, info.eos_id, info.dtype, stream.tokens))


def _pack_window(folders: Sequence[Path], context: int, path: Path, number: int) -> None:
    ends = [read_array(each / ENDS, each / ENDS) for each in folders]
    write_packed(path, [pack(*documents_of(ends, number), context)])


def _write_packed_plan(folder: Path, plan: ShardPlan, windows: Sequence[Path], context: int) -> None:
    packed = [read_packed(each, each) for each in windows]
    write_packed(folder / PACKED, packed)
    plan.instances = sum(each.instances for each in packed)
    plan.packed = {
        "padding_tokens": plan.instances * context - plan.tokens,
        "cut_documents": sum(each.cut_documents for each in packed),
    }
    plan.write(folder)


def write_output(joint: Joint, plan: ShardPlan, work: OutputWork, progress: Progress) -> None:
    """Does the missing units of the output (step 4)."""
    amounts = {unit.result: amount for unit, amount in zip(work.units, work.amounts)}
    finished, total = sum(amounts[unit.result] for unit in work.units if unit.result.exists()), sum(work.amounts)

    def done(unit: WorkUnit) -> None:
        nonlocal finished
        finished += amounts[unit.result]
        progress(work.stage, finished, total)

    progress(work.stage, finished, total)
    joint.do(work.units, work.make, *work.setup, done=done)
