"""Every place in the package that reads a clock, or free memory or running programs, with its purpose.

No choice depends on the moment: the configuration, the machine and the kept measurements (`optimus/measurements.py`)
determine what a run computes, and how. A new place must be added here with its reason.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "optimus"
_READS = re.compile(
    r"time\.(time|monotonic|perf_counter|process_time|thread_time)(_ns)?|.*\bvirtual_memory|.*\bmem_get_info|.*\bfree_memory"
    r"|.*\bcpu_percent|.*\bgetloadavg|.*\bdisk_usage|.*\bmemory_info|datetime\.now|.*\bnum_ctx_switches|.*\bcpu_times"
)

KEPT = "a choice: timed in turn, taken where it is clear, and kept per chip"
FACTS = "of choices: timed in turn, and kept per chip; memory in coarse steps, as it was counted before"
FILE = "a measurement that the user asks for, into a file by which runs then choose"
SAID = "is said or recorded, and nothing else"
WAITS = "how long something may take, or when to look again: what is found does not depend on it"
REFUSES = "refuses what does not fit now"
FAULTS = "a fault is one by how long something takes"
SAVES = "when to write what has been done so far: the result is the same"
TESTS = "for tests and `optimus lab` alone"

PLACES = {
    "checkpoint/lease.py": WAITS,
    "checkpoint/saving.py": SAID,
    "comm/device_waits.py": FAULTS,
    "comm/recorder.py": SAID,  # also names slow ranks, by training/hooks/slow_ranks.py
    "data/chat.py": "the day, for a template that asks for it, when a user asks a model; data has one day",
    "data/prepare_run.py": REFUSES,
    "data/stream_writer.py": SAVES,
    "data/units.py": "which process does a unit; its result is the same",
    "hub/exporting.py": REFUSES,
    "kernels/matmul.py": KEPT,
    "observe/doctor.py": SAID,
    "observe/machine.py": SAID,  # free_memory; its callers are listed here, too
    "observe/progress.py": SAID,
    "pipeline/executor.py": SAID,
    "pipeline/message_driven.py": "which stage goes on first; each does its microbatches in one order (tests/pipeline)",
    "plan/measure/collectives.py": FILE,
    "plan/measure/timing.py": FILE,
    "report/folder.py": SAID,
    "resolve/facts.py": FACTS,
    "resilience/events.py": SAID,
    "resilience/hangs.py": FAULTS,
    "testing/faults.py": TESTS,
    "testing/lab.py": TESTS,
    "testing/ranks.py": TESTS,
    "training/accounting.py": SAID,
    "training/hooks/copies.py": WAITS,
    "training/checks.py": REFUSES,
    "training/finalize.py": SAID,
    "training/environment.py": SAID,
    "launch/here.py": SAID,
    "launch/node.py": FAULTS,
    "launch/rank.py": SAID,
    "launch/store.py": WAITS,
    "launch/torch_elastic.py": WAITS,
    "launch/waiting.py": WAITS,
    "training/hooks/hangs.py": FAULTS,
    "training/hooks/lease.py": FAULTS,
    "training/hooks/metrics.py": SAID,
    "training/hooks/oversubscription.py": SAID,
    "training/hooks/pipeline_timeline.py": SAID,
    "training/hooks/recovered.py": SAID,
    "training/hooks/time_left.py": SAID,
    "training/record.py": SAID,
}


def reads(file: Path) -> Iterator[str]:
    """Yields the functions in a file that read the moment."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute | ast.Name):
            name = ast.unparse(node)
            if _READS.fullmatch(name):
                yield name


def test_every_place_that_depends_on_the_moment_is_known() -> None:
    found = {
        file.relative_to(PACKAGE).as_posix(): names
        for file in sorted(PACKAGE.rglob("*.py"))
        if (names := sorted({*reads(file)}))
    }
    assert found.keys() == PLACES.keys(), found


def test_what_is_chosen_by_a_clock_goes_through_one_file() -> None:
    """Timed choices go through `in_turn`, which decides what is a clear gain; facts go through `known.free_memory`."""
    for name, what in PLACES.items():
        text = (PACKAGE / name).read_text(encoding="utf-8")
        if what in (KEPT, FACTS):
            assert "in_turn(" in text, name
        if what == FACTS:
            assert re.search(r"known\.free_memory\(", text), name
