"""All kernels compile for an H100 or H200 in bf16, on a machine that has none: what the interpreter does not notice.

Compiling needs no device once triton is told for which to compile, and kernels are stopped before they are launched. A
process that interprets cannot compile, so it happens in another: this file as a program.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

PRODUCTS = {"_expert_up", "_expert_down_backward", "_grouped_product", "_weight_gradient"}
OTHERS = {
    "_count", "_index", "_row_tiles", "_reduce", "_sum_parts", "_route", "_route_backward", "_rms_norm",
    "_rms_norm_backward", "_rotate", "_swiglu", "_swiglu_backward", "_softmax_gradient", "_adamw",
}  # fmt: skip
SHARED_MEMORY = 232_448  # bytes of a program


@pytest.mark.slow
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("triton.backends.nvidia", reason="this triton compiles for no NVIDIA chip")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = json.loads(done.stdout)
    assert {kernel["name"] for kernel in compiled} == PRODUCTS | OTHERS
    for kernel in compiled:
        assert kernel["shared"] <= SHARED_MEMORY, kernel
        assert kernel["wgmma"] == (kernel["name"] in PRODUCTS), kernel  # Hopper's matrix instructions
        assert kernel["spilled"] < 64, f"registers do not suffice: {kernel}"


def compile_only() -> list[dict[str, Any]]:
    """Make every launch from here on compile its kernel for sm_90 and go no further; returns the growing list of them."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class NoDevice:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

    compiled: list[dict[str, Any]] = []
    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = original(self, *args, grid=grid, warmup=True, **options)
        ptx = kernel.asm["ptx"]
        entry = {"name": self.fn.__name__, "shared": kernel.metadata.shared, "wgmma": "wgmma.mma_async" in ptx}
        compiled.append(entry | {"spilled": spilled(ptx)})

    driver.set_active(NoDevice())
    JITFunction.run = run
    return compiled


def spilled(ptx: str) -> int:
    """Bytes of registers that the assembler had to move to memory."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(90).path, "--verbose", "--gpu-name=sm_90a", file.name, "--output-file=/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (stores,) = re.findall(r"(\d+) bytes spill stores", report)
    return int(stores)


def run_all() -> None:
    """Every kernel at the widths of OLMoE, those of the experts at those of the largest Mula as well."""
    import torch
    from torch import Tensor

    from optimus.kernels import backend
    from optimus.kernels.activation import activation
    from optimus.kernels.expert_mlp import expert_mlp
    from optimus.kernels.gradient_buffer import TensorBuffer
    from optimus.kernels.linear_cross_entropy import linear_cross_entropy
    from optimus.kernels.rms_norm import rms_norm
    from optimus.kernels.rotary import rotary, rotary_table
    from optimus.kernels.triton.adamw import adamw
    from optimus.kernels.triton.router import router
    from optimus.kernels.triton.token_index import token_index

    backend.use_triton = lambda x: True

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)

    H, I, E, K, T = 2048, 1024, 4, 2, 256
    indices = torch.zeros(T, K, dtype=torch.int64)
    expert_mlp(empty(T, H), empty(T, K), indices, empty(E, 2 * I, H), empty(E, H, I)).sum().backward()
    wide = empty(E, 2 * 1536, 3072), empty(E, 3072, 1536)  # Mula-100B's, adding to fp32 gradients as chunks have them
    buffers = TensorBuffer(wide[0].float()), TensorBuffer(wide[1].float())
    expert_mlp(empty(T, 3072), empty(T, K), indices, *wide, buffers).sum().backward()
    token_index(torch.zeros(T, 8, dtype=torch.int64), 240, 128)
    for experts, renormalise in ((64, False), (240, True)):
        routed = router(empty(64, experts), 8, renormalise=renormalise)
        (routed.weights_TK.sum() + routed.probabilities_E.sum() + routed.z).backward()
    rms_norm(empty(64, H), empty(H), 1e-5).sum().backward()
    rotary(empty(2, 8, 16, 128), rotary_table(torch.arange(8), 128, 10_000.0)).sum().backward()
    activation(empty(64, 2 * I), "silu", gated=True).sum().backward()
    for cap in (None, 30.0):
        linear_cross_entropy(empty(64, 32), empty(50_304, 32), torch.zeros(64, dtype=torch.int64), cap=cap).backward()
    weight, m, v = (torch.empty(5000) for _ in range(3))
    gradient, copy = torch.empty(2, 5000, dtype=torch.bfloat16)
    adamw((0.9, 0.95, 1e-8, 0.1), 3, 1e-3, weight, gradient, m, v, 1.0, copy)


if __name__ == "__main__":
    compiled = compile_only()
    run_all()
    print(json.dumps(compiled))
