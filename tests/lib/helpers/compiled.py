"""Compiles every kernel ahead of time for a chip that this machine lacks, which finds errors that the interpreter
misses.

Compilation needs no device once Triton knows the target, and kernels are stopped before their launch. A process that
interprets kernels cannot compile any, so this file runs as a program. Results are cached in `build/` by a hash of the
kernels and Triton's version. `python tests/lib/helpers/compiled.py` prints the table of all chips.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx90a", "gfx942")
_COUNTS = {
    "wgmma": "wgmma.mma_async", "tcgen05": r"tcgen05\.mma", "mma": r"\bmma\.sync", "mfma": "v_mfma",
    "tma": r"cp\.async\.bulk\.tensor", "copies": r"cp\.async\.c[ag]",
    "added": r"atom\.global\.\S*add\S*\.f32|global_atomic_add_f32|buffer_atomic_add_f32",
}  # fmt: skip


def compiled(target: str, triton: str | None = None) -> list[dict[str, Any]]:
    """Returns a row per kernel and variant; `triton` is a folder with another Triton version."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [p for p in (triton, str(ROOT), environment.get("PYTHONPATH")) if p]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    version = subprocess.run(
        [sys.executable, "-c", "import triton; print(triton.__version__)"], env=environment, capture_output=True,
        text=True, check=True,
    ).stdout.strip()  # fmt: skip
    kept = ROOT / "build" / "kernels" / f"{target}-{version}-{_sources()}.json"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, __file__, target]
            environment["TRITON_CACHE_DIR"] = cache
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise AssertionError(f"{target}, Triton {version}: {done.stderr[-3000:]}")
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(done.stdout, encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(kept.read_text(encoding="utf-8"))
    return rows


def _sources() -> str:
    files = [*(ROOT / "optimus/kernels").rglob("*.py"), Path(__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()[:16]


def compile_only(target: str) -> list[dict[str, Any]]:
    """Makes every later launch only compile its kernel for `target`; returns the growing list of rows."""
    import torch
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from optimus.kernels import backend, devices

    chip = devices.CHIPS[target]
    nvidia = target.startswith("sm_")
    name = GPUTarget("cuda", int(target[3:]), chip.warp) if nvidia else GPUTarget("hip", target, chip.warp)

    class NoDevice:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return name

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

    rows: dict[str, dict[str, Any]] = {}
    found: list[dict[str, Any]] = []
    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            kernel = original(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash in rows:
            return
        code = kernel.asm["ptx" if nvidia else "amdgcn"]
        row = {"name": self.fn.__name__, "shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps}
        row |= {"stages": kernel.metadata.num_stages}
        if nvidia:
            row |= {"registers": _number(r"Used (\d+) registers", log.getvalue())}
            row |= {"spilled": _number(r"(\d+) bytes spill stores", log.getvalue())}
        else:
            row |= {"registers": _number(r"\.vgpr_count:\s+(\d+)", code)}
            row |= {"spilled": 4 * _number(r"\.vgpr_spill_count:\s+(\d+)", code)}
        row |= {name: len(re.findall(pattern, code)) for name, pattern in _COUNTS.items()}
        row |= {"loads": accesses(code, nvidia, "load"), "stores": accesses(code, nvidia, "store")}
        row["type"] = next((str(a.dtype).removeprefix("torch.") for a in args if isinstance(a, torch.Tensor)), "")
        row["constants"] = {k: getattr(v, "__name__", v) for k, v in options.items() if k.isupper()}
        rows[kernel.hash] = row
        found.append(row)
        if folder := os.environ.get("OPTIMUS_DUMP"):  # keeps the code for inspection
            for stage in ("ttgir", "ptx" if nvidia else "amdgcn"):
                Path(folder, f"{len(found):02}{row['name']}.{stage}").write_text(kernel.asm[stage], encoding="utf-8")

    knobs.nvidia.dump_ptxas_log = True
    driver.set_active(NoDevice())
    JITFunction.run = run
    devices.chip_of = lambda device: chip
    backend.use_triton = lambda x: True
    return found


def accesses(code: str, nvidia: bool, what: str) -> dict[str, int]:
    """Returns the number of instructions that read (`load`) or write (`store`) global memory, by bytes per thread."""
    if nvidia:
        name = {"load": "ld", "store": "st"}[what]
        found = re.findall(rf"\b{name}\.global\S*?(?:\.v(\d))?\.b(\d+)", code)
        sizes = [int(many or 1) * int(bits) // 8 for many, bits in found]
    else:
        width = {"byte": 1, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
        found = re.findall(rf"\b(?:global|buffer)_{what}_[us]?((?:byte|short|dword)(?:x\d)?)", code)
        sizes = [width[name] for name in found]
    return {str(size): sizes.count(size) for size in sorted(set(sizes))}


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match is not None, f"no {pattern} in {text[-300:]}"
    return int(match.group(1))


def run_experts() -> None:
    """Runs the sparse block at the widths of OLMoE and the largest Mula, at widths that no tile divides, and in fp32."""
    import torch
    from torch import Tensor

    from optimus.kernels.activation import Activation
    from optimus.kernels.expert_mlp import expert_mlp
    from optimus.kernels.gradient_buffer import TensorBuffer
    from optimus.kernels.triton.activation import GATED

    E, K, T = 4, 2, 256

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, requires_grad=True)

    def layer(
        H: int,
        I: int,
        into: torch.dtype | None,
        dtype: torch.dtype = torch.bfloat16,
        *,
        kind: Activation = "silu",
        biased: bool = False,
    ) -> None:
        x, weights = empty(T, H, dtype=dtype), empty(T, K, dtype=dtype)
        parameters = [empty(E, 2 * I, H, dtype=dtype), empty(E, H, I, dtype=dtype)]
        buffers = tuple(None if into is None else TensorBuffer(p.detach().to(into)) for p in parameters)
        bias = empty(E, 2 * I, dtype=dtype) if biased else None
        indices = torch.zeros(T, K, dtype=torch.int64)
        y = expert_mlp(x, weights, indices, *parameters, buffers, kind=kind, bias_EJ=bias)
        y.sum().backward()

    layer(2048, 1024, torch.float32)  # fp32 gradients, as in chunks
    layer(3072, 1536, torch.float32)
    layer(2048, 1024, None)
    layer(2048, 1024, torch.bfloat16)
    layer(2880, 2880, torch.float32, kind="clamped_silu", biased=True)  # gpt-oss
    for kind in GATED.keys() - {"silu"}:
        layer(2048, 1024, torch.float32, kind=kind)
    layer(2048, 1024, torch.float32, kind="gelu", biased=True)
    layer(1000, 712, torch.float32)
    layer(1024, 512, torch.float32, torch.float32)


def run_others() -> None:
    """Runs the other kernels at the widths of OLMoE."""
    import torch
    from torch import Tensor

    from optimus.kernels.activation import activation
    from optimus.kernels.linear_cross_entropy import linear_cross_entropy
    from optimus.kernels.rms_norm import rms_norm
    from optimus.kernels.rotary import rotary, rotary_table
    from optimus.kernels.triton.adamw import adamw
    from optimus.kernels.triton.compression import compress, expand
    from optimus.kernels.triton.router import router
    from optimus.kernels.triton.row_sum import add_rows
    from optimus.kernels.triton.square_sum import square_sum
    from optimus.kernels.triton.token_index import token_index
    from optimus.state.buffers import ALIGN

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)

    H, I = 2048, 1024
    token_index(torch.zeros(T := 64, 8, dtype=torch.int64), 240, 128)
    for experts, chosen, renormalise in ((64, 8, False), (240, 8, True), (60, 4, False)):
        routed = router(empty(T, experts), chosen, renormalise=renormalise)
        (routed.weights_TK.sum() + routed.probabilities_E.sum() + routed.z).backward()
    rms_norm(empty(T, H), empty(H), 1e-5).sum().backward()
    rotary(empty(2, 8, 16, 128), rotary_table(torch.arange(8), 128, 10_000.0)).sum().backward()
    activation(empty(T, 2 * I), "silu", gated=True).sum().backward()
    for cap in (None, 30.0):
        linear_cross_entropy(empty(T, 32), empty(50_304, 32), torch.zeros(T, dtype=torch.int64), cap=cap).backward()
    size = 157 * ALIGN  # the alignment of all chunks; not a multiple of a program's elements
    weight, m, v = (torch.empty(size) for _ in range(3))
    gradient, copy = torch.empty(2, size, dtype=torch.bfloat16)
    adamw((0.9, 0.95, 1e-8, 0.1), 3, 1e-3, weight, gradient, m, v, 1.0, copy)
    square_sum(weight, torch.float64)
    add_rows([gradient, weight, m], weight, torch.float32)
    add_rows([gradient] * 8, copy, torch.float32)
    words, before = torch.empty(size // 32, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
    expand(compress(weight, words, before, 1000, 4096), words, before, weight, 4096)


def table() -> str:
    """Returns the shared memory, registers and spills of the widest variant of each kernel, by chip."""
    cells: dict[str, dict[str, str]] = {}
    for target in TARGETS:
        for row in compiled(target):
            cell = f"{row['shared'] // 1024} KB, {row['registers']}" + (
                f", spills {row['spilled']}" if row["spilled"] else ""
            )
            if row["type"] != "float32" or row["name"] in ("_adamw", "_square_sum"):
                cells.setdefault(row["name"], {}).setdefault(target, cell)
    lines = ["| Kernel | " + " | ".join(TARGETS) + " |", "|---" * (len(TARGETS) + 1) + "|"]
    return "\n".join(
        [*lines, *(f"| `{k}` | " + " | ".join(v.get(t, "") for t in TARGETS) + " |" for k, v in cells.items())]
    )


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(table())
    else:
        kernels = compile_only(sys.argv[1])
        run_experts()
        if "--experts" not in sys.argv:
            run_others()
        print(json.dumps(kernels, default=str))  # a constant may be a type
