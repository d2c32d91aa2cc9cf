"""Runs a command as another machine would: `python tests/lib/ways.py COMMAND...`.

WAY in the environment selects the way, one of WAYS. Without it, a run of turns (SWEEP=turn) uses this commit's way, and
any other run changes nothing. Results of numerical code depend on the processor's order of additions, so tests must
pass in every way.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import pytest

from helpers.sweep import PARTS, part_of_sweep


class Way(NamedTuple):
    summary: str
    environment: Mapping[str, str] = {}
    before: Sequence[str] = ()  # words before the command
    busy: int = 0  # busy loops beside the command


def _without_avx512() -> str:
    """Returns NumPy's names of the features beyond AVX2 that this processor has."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    return " ".join(
        name for name in __cpu_dispatch__ if __cpu_features__[name] and ("AVX512" in name or name == "X86_V4")
    )


def ways() -> dict[str, Way]:
    avx2 = {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
        "NPY_DISABLE_CPU_FEATURES": _without_avx512(),
    }
    return {
        "as-it-is": Way("on this machine as it is"),
        "avx2": Way("as on a processor without AVX-512", avx2),
        # oneDNN is limited, too: on processors with AMX, PyTorch would pack bf16 for kernels that are missing here.
        "plain": Way(
            "with PyTorch's kernels for any processor",
            {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "AVX2"},
        ),
        "threads": Way("with four threads a process", {"OMP_NUM_THREADS": "4"}),
        "one-core": Way("on one core", before=("taskset", "--cpu-list", str(min(os.sched_getaffinity(0))))),
        "busy": Way("beside two busy loops", busy=2),
    }


def name_of_turn(number: int) -> str:
    """Returns the way for a commit's number: each part with turns meets each way after enough commits."""
    return [*ways()][number // PARTS % len(ways())]


_LOOP = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"  # ends with its parent process


@contextmanager
def busy_loops(number: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(number):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", _LOOP]))
            stack.callback(loop.kill)
        yield


def main(command: Sequence[str]) -> int:
    sweep = os.environ.get("SWEEP")
    try:
        part = part_of_sweep(sweep)
    except pytest.UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    asked = os.environ.get("WAY") or (name_of_turn(part.number) if sweep == "turn" else "as-it-is")
    if (way := ways().get(asked)) is None:
        print(f"error: WAY={asked}: say one of {', '.join(ways())}", file=sys.stderr)
        return 2
    again = f"SWEEP={part.number}/{part.of} WAY={asked}" if sweep == "turn" else f"WAY={asked}"
    print(f"{asked}: {way.summary}; {again} repeats it", flush=True)
    compiled = {}
    if "ATEN_CPU_CAPABILITY" in way.environment:
        # torch.compile's cache ignores this variable, so code for vectors of 8 and of 16 numbers needs separate caches.
        compiled = {"TORCHINDUCTOR_CACHE_DIR": os.path.join(tempfile.gettempdir(), f"optimus-compiled-{asked}")}
    with busy_loops(way.busy):
        return subprocess.run([*way.before, *command], env={**os.environ, **way.environment, **compiled}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
