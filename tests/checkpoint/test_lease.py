"""One run at a time writes into a folder: the lease admits one holder, messages name the holder, and leases end."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from optimus.checkpoint.lease import LEASE, Holder, Lease, LeaseError, check_free, check_lease, living_holder
from optimus.checkpoint.rollback import rollback

LONG = 600.0  # seconds that no test lasts
HERE = Holder.this_process("other", several=False)
ELSEWHERE = replace(HERE, host="n7", machine="another")


def held_by(run: Path, holder: Holder, age: float = 0.0) -> None:
    """Writes the lease of `holder`, last renewed `age` seconds ago."""
    run.mkdir(exist_ok=True)
    (run / LEASE).write_text(json.dumps(asdict(holder)))
    os.utime(run / LEASE, (time.time() - age,) * 2)


def holder_of(run: Path) -> Holder:
    return Holder(**json.loads((run / LEASE).read_text()))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ended() -> Holder:
    """Returns a holder whose process on this machine has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        holder = replace(HERE, pid=process.pid)
    return holder


@pytest.mark.parametrize(
    "change",
    [{"pid": "one"}, {"pid": -1}, {"pid": 1 << 40}, {"pid": True}, {"started": None}, {"token": 3}, {"more": 1}],
)
def test_a_lease_that_says_something_else_is_damaged(tmp_path: Path, change: dict[str, object]) -> None:
    """A lease with unexpected contents counts as held, as an incomplete lease of a run that starts."""
    held_by(tmp_path, HERE)
    (tmp_path / LEASE).write_text(json.dumps(asdict(HERE) | change))
    found = living_holder(tmp_path)
    assert found is not None
    assert found.host == "an unknown host"


def test_it_is_there_while_the_run_is(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Lease(run, "mine"):
        assert holder_of(run) == Holder.this_process("mine", several=False)
        assert living_holder(run) == holder_of(run)
        check_lease(run, "mine")
    assert not run.exists()  # nothing was written
    run.mkdir()
    (run / "metrics.jsonl").touch()
    with Lease(run, "mine"):
        pass
    assert [path.name for path in run.iterdir()] == ["metrics.jsonl"]
    assert living_holder(run) is None


@pytest.mark.parametrize("age", [0.0, 1e6])
def test_a_living_process_is_named(tmp_path: Path, age: float) -> None:
    """The message names a living process, however long the lease was not renewed: the process may be stopped and
    continue."""
    held_by(tmp_path, HERE, age)
    for refused in (Lease(tmp_path, "mine").wait, Lease(tmp_path, "mine").__enter__, lambda: check_free(tmp_path)):
        with pytest.raises(
            LeaseError, match=rf"{tmp_path} is held by process {os.getpid()} on {HERE.host}, .*: wait until"
        ):
            refused()
    with pytest.raises(LeaseError):
        rollback(tmp_path, 1)
    assert holder_of(tmp_path) == HERE


@pytest.mark.parametrize("holder", [ended, lambda: replace(HERE, started=HERE.started - 1e6), lambda: ELSEWHERE])
def test_a_dead_holder_is_replaced_with_a_message(
    tmp_path: Path, holder: Callable[[], Holder], capsys: pytest.CaptureFixture[str]
) -> None:
    """A lease is taken over, with a message, if its process has ended, its process id has been reused, or another
    host's lease is long silent."""
    dead = holder()
    held_by(tmp_path, dead, 1000.0)
    assert living_holder(tmp_path) is None
    with Lease(tmp_path, "mine", silence=LONG):
        assert holder_of(tmp_path).token == "mine"
    said = capsys.readouterr().err
    assert f"{tmp_path} was held by process {dead.pid} on {dead.host}, silent for 1" in said
    assert said.endswith("this run takes over the lease\n")


def test_a_process_that_has_just_ended_needs_no_waiting(tmp_path: Path) -> None:
    held_by(tmp_path, ended())
    with Lease(tmp_path, "mine", silence=LONG):
        assert holder_of(tmp_path).token == "mine"


@pytest.mark.parametrize("holder", [ELSEWHERE, replace(ended(), several=True)])
def test_whether_another_lives_is_seen_in_time(
    tmp_path: Path, holder: Holder, capsys: pytest.CaptureFixture[str]
) -> None:
    """A renewed lease shows that its holder is alive. Another launch is not judged by one ended process: others of the
    launch may live."""
    held_by(tmp_path, holder)
    assert living_holder(tmp_path) == holder
    # The renewal writes a time of long ago, as a host with another clock might: any change counts.
    renewing = threading.Timer(0.3, lambda: os.utime(tmp_path / LEASE, (1.0, 1.0)))
    renewing.start()
    with pytest.raises(LeaseError, match=f"held by process {holder.pid} on {holder.host}"):
        Lease(tmp_path, "mine", beat=0.1, silence=LONG).wait()
    renewing.join()
    assert "checking for up to" in capsys.readouterr().err
    held_by(tmp_path, holder)
    with Lease(tmp_path, "mine", beat=0.1, silence=0.5):
        assert holder_of(tmp_path).token == "mine"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"token": 1}', "\udcff"])
def test_a_damaged_lease(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / LEASE).write_bytes(text.encode("utf-8", "surrogateescape"))
    os.utime(tmp_path / LEASE, (1.0, 1.0))
    with Lease(tmp_path, "mine"):
        assert holder_of(tmp_path).token == "mine"
    assert "was held by an unknown process, silent" in capsys.readouterr().err


def test_a_run_lets_its_own_in(tmp_path: Path) -> None:
    """A process with the run's own token is admitted on any host, whoever held the lease before."""
    held_by(tmp_path, replace(ELSEWHERE, token="ours"))
    with Lease(tmp_path, "ours", several=True, silence=LONG):
        assert holder_of(tmp_path) == Holder.this_process("ours", several=True)


def test_it_is_renewed(tmp_path: Path) -> None:
    with Lease(tmp_path, "mine", beat=0.02):
        for _ in range(3):
            os.utime(tmp_path / LEASE, (1.0, 1.0))
            until(lambda: (tmp_path / LEASE).stat().st_mtime > 1.0)


def test_another_of_the_run_renews_it_where_one_has_ended(tmp_path: Path) -> None:
    with Lease(tmp_path, "ours", several=True, beat=0.02):
        held_by(tmp_path, replace(ELSEWHERE, token="ours", several=True))
        until(lambda: holder_of(tmp_path).pid == os.getpid())
        until(lambda: holder_of(tmp_path).host == HERE.host)


def test_it_stays_for_others_of_the_run(tmp_path: Path) -> None:
    with Lease(tmp_path, "ours", several=True):
        pass
    assert holder_of(tmp_path).token == "ours"
    with Lease(tmp_path, "ours", several=True) as lease:
        lease.retained = False  # the last process of the run
    assert not tmp_path.exists()


def test_what_another_has_taken_is_left_to_it(tmp_path: Path) -> None:
    """A run that was suspended, and whose lease was taken over, stops without saving and leaves the new lease alone."""
    with Lease(tmp_path, "mine", beat=0.02) as lease:
        held_by(tmp_path, ELSEWHERE)
        with pytest.raises(
            LeaseError, match=r"held by process \d+ on n7: it was taken over by another run, .*without saving"
        ):
            check_lease(tmp_path, "mine")
        until(lambda: not lease._thread.is_alive())
    assert holder_of(tmp_path) == ELSEWHERE
    (tmp_path / LEASE).unlink()  # the other run has ended
    with pytest.raises(
        LeaseError, match=r"has no lease\.json any more: another run has taken the folder over and ended, or "
    ):
        check_lease(tmp_path, "mine")


def test_of_many_at_once_one_is_let_in(tmp_path: Path) -> None:
    """Only one of eight simultaneous runs acquires the lease of a free folder, or of a folder whose holder is dead."""
    for attempt in range(10):
        if attempt % 2:
            held_by(tmp_path, ELSEWHERE, 1000.0)
        barrier, over = threading.Barrier(8), threading.Barrier(8)

        def enter(number: int, barrier: threading.Barrier = barrier, over: threading.Barrier = over) -> bool:
            lease = Lease(tmp_path, f"run {number}", silence=LONG)
            barrier.wait(60)
            try:
                with lease:
                    over.wait(60)
                    return True
            except LeaseError:
                over.wait(60)
                return False

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(enter, range(8))) == 1
