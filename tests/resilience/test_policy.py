"""Decisions of a node whose ranks end, its event log, and the exclusion of nodes."""

import errno
import json
import math
import signal
import threading
from pathlib import Path

import pytest

from optimus.config.tree import ResilienceConfig
from optimus.errors import UserError
from optimus.resilience.events import EventLog
from optimus.resilience.exclusion import exclude, excluded
from optimus.resilience.exits import CrashKind, Exit, crash_kinds, names_hardware
from optimus.resilience.policy import Do, Response, decide

LEAVE, RESTART, STOP = Do.LEAVE, Do.RESTART, Do.STOP
TERM, KILL, SEGV = -signal.SIGTERM, -signal.SIGKILL, -signal.SIGSEGV


NOTHING: dict[CrashKind, int] = {"hardware": 0, "software": 0}
ONE_OF_SOFTWARE: dict[CrashKind, int] = {"hardware": 0, "software": 1}
ONE_OF_HARDWARE: dict[CrashKind, int] = {"hardware": 1, "software": 0}


@pytest.mark.parametrize(
    ("codes", "crashes", "spares", "expected"),
    [
        # bad input stops all nodes, whatever else ended
        ({0: Exit.USER}, NOTHING, 2, (STOP, None, 0)),
        ({0: KILL, 1: Exit.BAD_NODE, 2: Exit.USER}, ONE_OF_SOFTWARE, 2, (STOP, None, 2)),
        ({0: SEGV, 1: Exit.USER}, NOTHING, 2, (STOP, None, 1)),
        # a run that was told to end has saved; its launcher may have ended some ranks too
        ({0: 143, 1: 143}, ONE_OF_SOFTWARE, 2, (Exit.TERMINATED, None, 0)),
        ({0: TERM, 1: 130}, ONE_OF_SOFTWARE, 2, (Exit.INTERRUPT, None, 1)),
        ({0: 129, 1: KILL}, NOTHING, 2, (Exit.HANGUP, None, 0)),
        # non-finite numbers: the node leaves if there is a spare
        ({1: Exit.BAD_NODE, 0: Exit.LOST}, NOTHING, 1, (LEAVE, "hardware", 1)),
        ({1: Exit.BAD_NODE, 0: Exit.LOST}, NOTHING, 0, (RESTART, "hardware", 1)),
        ({1: Exit.BAD_NODE, 0: SEGV}, NOTHING, 1, (LEAVE, "hardware", 1)),
        # the first of two ranks counts
        ({2: Exit.BAD_NODE, 1: Exit.BAD_NODE}, NOTHING, 1, (LEAVE, "hardware", 1)),
        # divergence is no rank's fault
        ({0: Exit.DIVERGED, 1: Exit.DIVERGED}, NOTHING, 2, (RESTART, None, 0)),
        # a rank that lost another rank is not at fault
        ({0: Exit.LOST, 1: Exit.LOST}, ONE_OF_SOFTWARE, 2, (RESTART, None, None)),
        ({0: Exit.LOST, 1: Exit.LOST}, ONE_OF_HARDWARE, 2, (RESTART, None, None)),
        # the launcher has ended other ranks of the node
        ({0: TERM, 1: Exit.LOST}, ONE_OF_SOFTWARE, 2, (RESTART, None, None)),
        ({0: TERM, 1: KILL}, NOTHING, 2, (RESTART, "software", 1)),
        # a crash of software: at first the node stays, later the node leaves if there is a spare
        ({1: KILL, 0: Exit.LOST}, NOTHING, 2, (RESTART, "software", 1)),
        ({1: KILL, 0: Exit.LOST}, ONE_OF_SOFTWARE, 2, (LEAVE, "software", 1)),
        ({1: KILL, 0: Exit.LOST}, ONE_OF_SOFTWARE, 0, (RESTART, "software", 1)),
        ({0: 1}, NOTHING, 2, (RESTART, "software", 0)),
        ({0: TERM, 1: TERM}, NOTHING, 2, (RESTART, "software", 0)),
        # a crash of hardware: the node leaves at once if there is a spare
        *(({1: code, 0: Exit.LOST}, NOTHING, 2, (LEAVE, "hardware", 1)) for code in (SEGV, 139, -7, -4, 71, 74, 78)),
        ({1: SEGV, 0: Exit.LOST}, NOTHING, 0, (RESTART, "hardware", 1)),
        # hardware that no spare could replace still leaves later, whatever crashes then
        ({0: 1}, ONE_OF_HARDWARE, 1, (LEAVE, "software", 0)),
        # of several crashed ranks, one of hardware counts
        ({0: 1, 1: SEGV}, NOTHING, 1, (LEAVE, "hardware", 1)),
        ({0: KILL, 1: 1}, NOTHING, 1, (RESTART, "software", 0)),
    ],
)
def test_decisions(
    codes: dict[int, int],
    crashes: dict[CrashKind, int],
    spares: int,
    expected: tuple[Do | Exit, CrashKind | None, int | None],
) -> None:
    assert decide(codes, crashes, spares)[:3] == expected


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        (1, "rank 3 crashed (exit code 1)"),
        (KILL, "rank 3 crashed (killed by SIGKILL)"),
        (SEGV, "rank 3 crashed (killed by SIGSEGV, which names hardware)"),
        (-40, "rank 3 crashed (killed by signal 40)"),  # it has no name
        (Exit.USER, "the run cannot continue with this configuration"),
        (Exit.BAD_NODE, "the node's numbers are not finite, or the node does not answer"),
        (Exit.DIVERGED, "the training has diverged"),
        (Exit.LOST, "another rank was lost"),
        (Exit.HANGUP, "told to end by SIGHUP"),
    ],
)
def test_people_are_told_what_happened(code: int, detail: str) -> None:
    decision = decide({3: code}, NOTHING, 0)
    assert isinstance(decision, Response)
    assert decision.detail == detail


def test_a_user_names_further_exit_codes_and_signals() -> None:
    section = ResilienceConfig.model_validate(
        {"exit_codes": {42: "hardware", "SIGKILL": "hardware", "SIGSEGV": "software"}}
    )
    kinds = crash_kinds(section.exit_codes)
    for code, kind in ((42, "hardware"), (KILL, "hardware"), (137, "hardware"), (SEGV, "software"), (139, "software")):
        do = LEAVE if kind == "hardware" else RESTART
        assert decide({0: code}, NOTHING, 1, kinds=kinds)[:3] == (do, kind, 0)
    # what the table names is no lost rank, even where the backend aborts ranks
    abort = -signal.SIGABRT
    assert decide({0: abort}, NOTHING, 1, aborts=True)[:2] == (RESTART, None)
    assert decide({0: abort}, NOTHING, 1, True, crash_kinds({"SIGABRT": "hardware"}))[:2] == (LEAVE, "hardware")


@pytest.mark.parametrize("key", ["0", "256", "SIGSEVG", "-11", "twelve"])
def test_a_key_that_is_no_exit_code(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} is no exit code and no name of a signal") as error:
        ResilienceConfig.model_validate({"exit_codes": {key: "hardware"}})
    assert ("did you mean 'SIGSEGV'" in str(error.value)) == (key == "SIGSEVG")


@pytest.mark.parametrize("key", ["2", "75", "77", "143", "SIGTERM", "SIGINT"])
def test_a_code_with_another_meaning_cannot_be_a_crash(key: str) -> None:
    with pytest.raises(UserError, match=rf"^resilience\.exit_codes\.{key}: .* is no crash"):
        crash_kinds({key: "hardware"})


class DeviceError(RuntimeError):
    """Stands for `torch.AcceleratorError`, which has the error code of the device's runtime."""

    def __init__(self, code: int) -> None:
        super().__init__("the device has failed")
        self.error_code = code


def test_errors_that_name_hardware() -> None:
    assert names_hardware(OSError(errno.EIO, "Input/output error"))
    assert names_hardware(DeviceError(214))  # an ECC error that cannot be corrected
    assert not names_hardware(DeviceError(700))  # an illegal address: the kernel's fault
    assert not names_hardware(FileNotFoundError(errno.ENOENT, "No such file"))
    assert not names_hardware(OSError("of a library, without a number"))
    assert not names_hardware(ValueError("no width"))


def test_an_event_has_all_its_fields(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "run")
    assert log.read() == log.unrecovered() == []
    log.write("failure", node="n1", rank=2, step=3, seconds=4.5, detail="it is gone")
    log.write("finished")
    first, second = log.read()
    assert first.pop("time") <= second.pop("time")
    assert first == {"kind": "failure", "node": "n1", "rank": 2, "step": 3, "seconds": 4.5, "detail": "it is gone"}
    assert second == {"kind": "finished", "node": None, "rank": None, "step": None, "seconds": None, "detail": ""}


def test_many_write_at_once(tmp_path: Path) -> None:
    def write(number: int) -> None:
        log = EventLog(tmp_path)
        for step in range(20):
            log.write("failure", rank=number, step=step, detail="x" * 300)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = EventLog(tmp_path).read()
    assert {(event["rank"], event["step"]) for event in events} == {(n, step) for n in range(8) for step in range(20)}
    assert len(events) == len((tmp_path / "events.jsonl").read_text().splitlines()) == 160


def test_a_line_that_was_cut_off_takes_no_other_with_it(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.write("failure", node="n1", detail="before")
    whole = log.path.read_bytes()
    log.path.write_bytes(whole + whole[:25])
    assert [event["detail"] for event in log.read()] == ["before"]
    log.write("restart", detail="after")
    assert [event["detail"] for event in log.read()] == ["before", "after"]


def test_what_is_no_event_is_left_out(tmp_path: Path) -> None:
    """Malformed events are left out, because a resumed run computes with times and steps of events."""
    log = EventLog(tmp_path)
    log.write("failure", node="n1", detail="whole")
    (whole,) = log.read()
    broken = [{"time": "noon"}, {"time": None}, {"time": math.nan}, {"seconds": "long"}, {"kind": 3}, {"detail": None}]
    lacking = [{name: value for name, value in whole.items() if name != lost} for lost in ("time", "seconds", "step")]
    with log.path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in [*(whole | each for each in broken), *lacking, [1]])
    assert log.read() == [whole]


def test_what_has_not_been_recovered_from(tmp_path: Path) -> None:
    log = EventLog(tmp_path)

    def pending() -> list[str]:
        return [event["detail"] for event in log.unrecovered()]

    log.write("failure", detail="a")
    log.write("exclusion", detail="b")
    log.write("restart", detail="c")
    log.write("rollback", detail="d")
    assert pending() == ["a", "d"]
    log.write("recovered")
    assert pending() == []
    log.write("failure", detail="e")
    assert pending() == ["e"]
    log.write("finished")
    assert pending() == []


def test_exclusion(tmp_path: Path) -> None:
    assert excluded(tmp_path) == []
    for node in ("n1", "n2", "n1"):
        exclude(tmp_path, node)
    assert excluded(tmp_path) == ["n1", "n2"]
    (tmp_path / "excluded.txt").write_text("n2\n\n")  # edited by hand after a repair of n1
    assert excluded(tmp_path) == ["n2"]
    exclude(tmp_path, "n1")
    assert excluded(tmp_path) == ["n2", "n1"]
    (tmp_path / "excluded.txt").write_text("n1")  # an editor that writes no last newline
    exclude(tmp_path, "n2")
    assert excluded(tmp_path) == ["n1", "n2"]


def test_each_line_of_the_exclusion_is_one_name(tmp_path: Path) -> None:
    """A name may contain white space, as the batch script reads it; a name in it is not excluded."""
    exclude(tmp_path, "rack 7")
    exclude(tmp_path, "rack 7")
    assert excluded(tmp_path) == ["rack 7"]
    (tmp_path / "excluded.txt").write_bytes(b"  n1 \r\n\t\nrack 7\n")
    assert excluded(tmp_path) == ["n1", "rack 7"]
