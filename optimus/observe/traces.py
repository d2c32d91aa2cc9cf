"""Merges the traces of ranks into one file for Perfetto, with one time axis."""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from optimus.disk import parse_json
from optimus.errors import naming_disk_errors

MERGED = "trace.json.gz"
_OF_A_RANK = 1000  # maximum number of processes in a rank's trace: the program and its devices
_ROUNDING = 0.002  # tolerance for rounded times, in microseconds
_IDS = 1 << 40  # maximum number of flow ids of a rank; Perfetto accepts only integers as flow ids
_BOUND = frozenset("sftbne")  # phases of events that ids link: flows and asynchronous events


def rank_trace(folder: Path, rank: int) -> Path:
    """Returns the file to which `torch.profiler` writes the trace of a rank."""
    return folder / f"trace-rank-{rank}.json"


def merge_traces(folder: Path, ranks: int) -> list[int]:
    """Writes `trace.json.gz` from the traces of `ranks` ranks. Returns the ranks without a trace in the folder.

    Aligns the ranks by the clocks of their nodes.
    """
    there = [rank for rank in range(ranks) if rank_trace(folder, rank).is_file()]
    path = folder / MERGED
    zero: int | None = None
    with (
        naming_disk_errors(path, "Make room or leave observe.profile_step out"),
        gzip.open(path, "wt", compresslevel=5) as file,
    ):
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        first = True
        for rank in there:
            trace = parse_json(rank_trace(folder, rank).read_text(encoding="utf-8"))
            base = int(trace.get("baseTimeNanoseconds", 0))
            zero = base if zero is None else zero
            for event in _rank_events(trace["traceEvents"], rank, (base - zero) / 1000):
                file.write(("" if first else ",\n") + json.dumps(event))
                first = False
        file.write("\n]}\n")
    return [rank for rank in range(ranks) if rank not in there]


def _rank_events(events: list[dict[str, Any]], rank: int, later: float) -> Iterator[dict[str, Any]]:
    """Yields a rank's events, shifted by `later` microseconds, with process numbers and ids that are unique over ranks.

    Turns the slices of `_crossing` into asynchronous events.
    """
    processes: dict[Any, int] = {}
    names: dict[Any, Any] = {}
    for event in events:
        if event.get("name") == "process_labels":
            names[event["pid"]] = event["args"]["labels"]
        if "ts" in event and isinstance(event.get("pid"), int):
            processes.setdefault(event["pid"], rank * _OF_A_RANK + len(processes))
    for process, number in processes.items():
        what = names.get(process, "")
        label = f"rank {rank}" + (f": {what}" if what else "")
        yield {"name": "process_name", "ph": "M", "pid": number, "tid": 0, "args": {"name": label}}
        yield {"name": "process_sort_index", "ph": "M", "pid": number, "tid": 0, "args": {"sort_index": number}}
    crossing = _crossing(events)
    for number, event in enumerate(events):
        of_process = event.get("name") in ("process_name", "process_labels", "process_sort_index")
        if of_process or event.get("pid") not in processes:
            continue
        moved = {**event, "pid": processes[event["pid"]]}
        if "ts" in event:
            moved["ts"] = event["ts"] + later
        if event.get("ph") in _BOUND and "id" in event:
            moved["id"] = rank * _IDS + event["id"] if isinstance(event["id"], int) else f"{rank}.{event['id']}"
        if number in crossing:
            seconds = moved.pop("dur")
            moved |= {"ph": "b", "id": f"{rank}.crossing.{number}", "cat": event.get("cat", "beside")}
            yield moved
            moved = {**moved, "ph": "e", "ts": moved["ts"] + seconds}
        yield moved


def _crossing(events: Sequence[Mapping[str, Any]]) -> set[int]:
    """Returns the indices of slices that Perfetto would drop, because they cross the end of another slice of the
    same thread."""
    threads, found = defaultdict[Any, list[tuple[float, float, int]]](list), set[int]()
    for number, event in enumerate(events):
        if event.get("ph") == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], -event["dur"], number))
    for slices in threads.values():
        ends: list[float] = []  # ends of the enclosing slices
        for start, negative, number in sorted(slices):
            while ends and ends[-1] <= start + _ROUNDING:
                ends.pop()
            if ends and start - negative > ends[-1] + _ROUNDING:
                found.add(number)
            else:
                ends.append(start - negative)
    return found
