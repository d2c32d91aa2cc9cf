"""Failures with a backend that behaves as NCCL does: waiting raises nothing, and a watchdog aborts ranks that lost
another.

Three nodes have one rank each. The second is killed, hangs or is slow. Exit codes, culprits and exclusions are those of
Gloo.
"""

import json
import multiprocessing
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.silent_backend import SilentGroup, silent_group
from optimus.comm import CollectiveError, Group
from optimus.comm.device_waits import Deadline, DeviceWaits
from optimus.comm.group import Shared, Transport
from optimus.resilience.exits import CrashKind, Exit
from optimus.resilience.hangs import find_culprits
from optimus.resilience.policy import Do, decide
from optimus.testing import run_ranks

ABORT, KILL = -signal.SIGABRT, -signal.SIGKILL


def joined(aborts: float) -> tuple[Group, SilentGroup]:
    handle = silent_group(range(3), aborts)
    shared = Shared()
    shared.recorder.device = DeviceWaits(handle.stream.mark)
    group = Group(range(3), dist.get_rank(), Transport(handle), shared)
    group.all_reduce(torch.ones(4))
    handle.stream.synchronize()
    return group, handle


def rank(number: int, folder: Path, fault: str, deadline: bool) -> None:
    """Runs one rank: rank 1 fails after a collective, and the others wait until they are ended."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 3), rank=number, world_size=3)
    group, handle = joined(aborts=1.5 if fault == "kill" else 2.5)
    recorder = group.observer.recorder
    assert recorder.device is not None
    if number == 1:
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1.0)
        (folder / "state1").write_text(json.dumps(recorder.state()))
        time.sleep(60)
    if deadline:
        Deadline(recorder.device, 0.5, lambda _: os._exit(Exit.LOST))
    group.all_reduce(torch.ones(4))  # raises nothing
    time.sleep(0.3)
    (folder / f"state{number}").write_text(json.dumps(recorder.state()))
    handle.stream.synchronize()


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Imports torch in the server from which processes are forked."""
    run_ranks(dist.get_rank, 1)


def earlier(crashes: int) -> dict[CrashKind, int]:
    """Returns the counts of a node with this number of earlier crashes of its software."""
    return {"hardware": 0, "software": crashes}


def ends(folder: Path, fault: str, deadline: bool) -> list[int | None]:
    """Returns the exit codes. A rank that hangs is killed after the others have ended, as launchers do."""
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=rank, args=(number, folder, fault, deadline)) for number in range(3)]
    for process in ranks:
        process.start()
    for number in (0, 2, 1):
        if number == 1 and fault == "hang":
            while not (folder / "state1").exists():
                time.sleep(0.05)
            ranks[1].kill()
        ranks[number].join(60)
    return [process.exitcode for process in ranks]


@pytest.mark.parametrize("deadline", [True, False], ids=["own deadline", "watchdog"])
@pytest.mark.parametrize("fault", ["kill", "hang"])
def test_codes_and_exclusions(tmp_path: Path, fault: str, deadline: bool) -> None:
    """Survivors are not at fault, whichever way they end, and the lost rank's node leaves at its second crash."""
    survivor = Exit.LOST if deadline else ABORT
    codes = ends(tmp_path, fault, deadline)
    assert codes == [survivor, KILL, survivor]
    for crashes in range(2):
        for code in (codes[0], codes[2]):
            assert decide({0: code}, earlier(crashes), 1, aborts=True)[:3] == (Do.RESTART, None, None)
    assert decide({1: KILL}, earlier(1), 1, aborts=True)[:3] == (Do.LEAVE, "software", 1)
    if fault == "hang":
        states = {number: json.loads((tmp_path / f"state{number}").read_text()) for number in range(3)}
        verdict = find_culprits(states)
        assert (verdict.culprits, verdict.collective) == ([1], "all_reduce (number 2 of ranks 0, 1, 2)")


def test_where_nobody_aborts_it_is_a_crash_of_its_own() -> None:
    assert decide({0: ABORT}, earlier(1), 1)[:3] == (Do.LEAVE, "software", 0)
    assert decide({0: ABORT, 1: KILL}, earlier(0), 1, aborts=True)[:3] == (Do.RESTART, "software", 1)


def waited() -> tuple[float, dict[str, float]]:
    """Returns the seconds that this rank's device waited for a slow rank, in all and by kind of collective."""
    group, handle = joined(aborts=60.0)
    if group.rank == 1:
        time.sleep(0.5)
    group.all_reduce(torch.ones(4))
    handle.stream.synchronize()
    time.sleep(0.1)  # time for the watchdog to see the collective's end
    recorder = group.observer.recorder
    return recorder.seconds, recorder.by_kind


def test_devices_say_who_is_slow() -> None:
    """Devices name the slow rank although no host waits."""
    (first, kinds), (slow, _), (last, _) = run_ranks(waited, 3)
    assert min(first, last) > slow + 0.3
    assert kinds == {"all_reduce": pytest.approx(first)}


class Computing:
    """An event that its stream has not reached."""

    def query(self) -> bool:
        return False


def test_a_device_that_computes_does_not_wait() -> None:
    """A rank whose kernel hangs before the collective in which the others wait is the culprit."""
    waits = DeviceWaits(Computing)  # type: ignore[arg-type]
    waits.wait(("0, 1", "all_reduce", 7), [])
    assert waits.waiting() is None
    begun = {"0, 1": 7}
    others = {"begun": begun, "waiting": ("0, 1", "all_reduce", 7)}
    assert find_culprits({0: others, 1: {"begun": begun, "waiting": waits.waiting()}}).culprits == [1]


def raising(error: Exception, *_: Any) -> Any:
    raise error


@pytest.mark.parametrize("name", ["OutOfMemoryError", "AcceleratorError"])
def test_what_a_device_fails_of_is_no_lost_rank(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = getattr(torch, name)("the device is sick")
    group = Group([0, 1], 0, Transport(object()))
    monkeypatch.setattr(dist, "get_backend", lambda _: "another")
    with pytest.raises(type(error), match="is sick"):
        group.observer.begin("all_reduce", torch.ones(1), partial(raising, error))
    for other, expected in ((dist.DistBackendError("closed"), CollectiveError), (RuntimeError("a bug"), RuntimeError)):
        with pytest.raises(expected) as caught:
            group.observer.begin("all_reduce", torch.ones(1), partial(raising, other))
        assert isinstance(caught.value, CollectiveError) == (expected is CollectiveError)
