"""Runs a command as another machine would: `python tests/lib/ways.py COMMAND...`.

WAY in the environment names the way, one of WAYS. Without it a run of what has turns (SWEEP=turn) has this commit's, and any
other run none of its own. Results of numerical code differ from processor to processor, as sums are in another order; a test
that passes on one alone is wrong.
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
    before: Sequence[str] = ()  # the command's own words
    busy: int = 0  # loops that run beside it


def _without_avx512() -> str:
    """Those of NumPy's features that this processor has beyond AVX2, as NumPy names them."""
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
        # oneDNN must not know more of the processor: PyTorch packs bf16 for AMX where it does, which these kernels lack.
        "plain": Way(
            "with PyTorch's kernels for any processor",
            {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "AVX2"},
        ),
        "threads": Way("with four threads a process", {"OMP_NUM_THREADS": "4"}),
        "one-core": Way("on one core", before=("taskset", "--cpu-list", str(min(os.sched_getaffinity(0))))),
        "busy": Way("beside two busy loops", busy=2),
    }


def name_of_turn(number: int) -> str:
    """Each part that has a turn comes in each way after so many commits."""
    return [*ways()][number // PARTS % len(ways())]


_LOOP = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"  # ends with us, however we end


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
        # What torch.compile keeps is not told apart by it: loops for 8 numbers, compiled again for 16, write over others.
        compiled = {"TORCHINDUCTOR_CACHE_DIR": os.path.join(tempfile.gettempdir(), f"optimus-compiled-{asked}")}
    with busy_loops(way.busy):
        return subprocess.run([*way.before, *command], env={**os.environ, **way.environment, **compiled}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
