"""`run_ranks` returns results, reports every failure of a rank, and leaves nothing for the next call."""

import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from helpers.sweep import in_turns
from optimus.testing import RankError, run_ranks


@dataclass
class Own:
    """A class of this file alone, sent both ways."""

    value: int


def rank_and_size(offset: int) -> tuple[int, int]:
    return dist.get_rank() + offset, dist.get_world_size()


def summed(tensor: torch.Tensor) -> torch.Tensor:
    tensor += dist.get_rank()
    dist.all_reduce(tensor)
    return tensor


def one_more(own: Own) -> Own:
    return Own(own.value + dist.get_rank())


def surroundings() -> tuple[str, str | None, int, float]:
    return os.getcwd(), os.environ.get("RANKS_TEST"), torch.get_num_threads(), torch.rand(()).item()


def process_id() -> int:
    return os.getpid()


def use_subgroup() -> float:
    group = dist.new_group([0, 1])
    one = torch.ones(())
    if dist.get_rank() < 2:
        dist.all_reduce(one, group=group)
    return one.item()


def raise_on_1() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the missing thing")
    dist.barrier()


def sleep_on_2() -> None:
    if dist.get_rank() == 2:
        time.sleep(60)
    dist.barrier()


def sleep_alone() -> None:
    """Rank 0 sleeps; rank 1 ends at once and is not at fault."""
    if dist.get_rank() == 0:
        time.sleep(60)


def exit_on_1() -> None:
    dist.barrier()  # connects the ranks, so that the others fail when rank 1 ends
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def kill_2() -> None:
    dist.barrier()
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def unpicklable() -> threading.Event:
    return threading.Event()


def of_no_module() -> Callable[[int], int]:
    rank = dist.get_rank()
    return lambda number: number + rank


def test_functions_of_no_module_are_sent_both_ways() -> None:
    assert [function(3) for function in run_ranks(of_no_module, 2)] == [3, 4]


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_results_are_in_rank_order(n: int) -> None:
    assert run_ranks(rank_and_size, n, 10) == [(10 + rank, n) for rank in range(n)]


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_all_reduce(n: int) -> None:
    for result in run_ranks(summed, n, torch.ones(3)):
        assert result.tolist() == [n + n * (n - 1) / 2] * 3


def test_subgroups() -> None:
    assert run_ranks(use_subgroup, 3) == [2.0, 2.0, 1.0]


def test_classes_of_the_test_module_travel() -> None:
    assert run_ranks(one_more, 2, Own(3)) == [Own(3), Own(4)]


def test_definitions_of_a_module_without_a_file_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ModuleType("made_here")
    monkeypatch.setitem(sys.modules, "made_here", made)
    exec("def rank_plus(x):\n    import torch.distributed as dist\n    return dist.get_rank() + x", made.__dict__)
    assert run_ranks(made.rank_plus, 2, 3) == [3, 4]
    assert run_ranks(math.sqrt, 2, 4) == [2.0, 2.0]


def test_ranks_see_the_callers_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(surroundings, 2)  # the workers exist before the change
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANKS_TEST", "seen")
    torch.manual_seed(0)
    assert run_ranks(surroundings, 2) == [(str(tmp_path), "seen", 1, torch.rand(()).item())] * 2
    monkeypatch.delenv("RANKS_TEST")
    assert run_ranks(surroundings, 2)[0][1] is None


def test_workers_are_used_again() -> None:
    first = run_ranks(process_id, 4)
    assert len(set(first)) == 4
    assert set(run_ranks(process_id, 2)) <= set(first)


@pytest.mark.in_turn(1, 3)
def test_many_calls_in_a_row() -> None:
    for call in range(20):
        assert [result.item() for result in run_ranks(summed, 4, torch.tensor(call))] == [4 * call + 6] * 4


@pytest.mark.parametrize(
    ("function", "n", "timeout", "ranks", "message"),
    in_turns(
        [
            (raise_on_1, 4, 60, [1], r"rank 1 failed:\n(.|\n)*in raise_on_1(.|\n)*KeyError: 'the missing thing'"),
            (exit_on_1, 4, 60, [1], r"rank 1 died \(exit code 7\)"),
            (kill_2, 3, 60, [2], r"rank 2 died \(killed by SIGKILL\)"),
            (sleep_on_2, 3, 2, [0, 1, 2], r"ranks 0, 1, 2 of 3 had not finished after 2 s\n(.|\n)*in sleep_on_2"),
            (sleep_alone, 2, 1, [0], r"rank 0 of 2 had not finished after 1 s\nrank 0 was at:\n(.|\n)*in sleep_alone"),
            (unpicklable, 2, 60, None, r"rank [01] failed:\n(.|\n)*the result of unpicklable cannot be pickled .*lock"),
        ],
        3,
        always=3,
    ),
)
def test_failures_name_the_rank_and_end_all(
    function: Callable[[], None], n: int, timeout: float, ranks: list[int] | None, message: str
) -> None:
    processes = run_ranks(process_id, n)
    with pytest.raises(RankError, match=message) as error:
        run_ranks(function, n, timeout=timeout)
    assert ranks is None or error.value.ranks == ranks
    after = run_ranks(rank_and_size, n, 0)
    assert after == [(rank, n) for rank in range(n)]
    assert not any(Path(f"/proc/{process}").exists() for process in processes)


def test_a_worker_that_died_while_idle_is_replaced() -> None:
    victim = run_ranks(process_id, 2)[0]
    os.kill(victim, signal.SIGKILL)
    deadline = time.monotonic() + 120
    while Path(f"/proc/{victim}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert victim not in run_ranks(process_id, 2)


@pytest.mark.parametrize("end", in_turns(["return", "killed"], 1, always=1))
def test_a_plain_script_leaves_no_processes_or_files(tmp_path: Path, request: pytest.FixtureRequest, end: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys\n"
        "from optimus.testing import run_ranks\n"
        "class Own:\n"
        "    def __init__(self): self.process = os.getpid()\n"
        "def own(): return Own()\n"
        "if __name__ == '__main__':\n"
        "    print(*[result.process for result in run_ranks(own, 3)], flush=True)\n"
        "    if sys.argv[1] == 'killed': os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    temporary = Path(tempfile.mkdtemp())  # the test's own folder may be too long for the name of a socket
    request.addfinalizer(lambda: shutil.rmtree(temporary))
    environment = {**os.environ, "TMPDIR": str(temporary)}
    command = [sys.executable, str(script), end]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    processes = done.stdout.split()
    assert len(set(processes)) == 3, done.stderr
    assert done.returncode == {"return": 0, "killed": -signal.SIGKILL}[end]
    if end == "return":
        assert done.stderr == ""

    def left() -> list[Path]:
        running = [Path(f"/proc/{process}") for process in processes]
        return [*(path for path in running if path.exists()), *temporary.glob("ranks-*")]

    deadline = time.monotonic() + 120
    while left() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left()


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        run_ranks(process_id, 0)
