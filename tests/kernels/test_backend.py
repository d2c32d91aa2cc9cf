"""The rule for using Triton; where Triton is not used, it is not imported."""

import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import torch

from optimus.kernels import backend


class Stand(NamedTuple):
    """The attributes that the rule reads, for a tensor on a device that this machine may lack."""

    device: Any
    dtype: torch.dtype


@pytest.mark.parametrize(
    ("device", "dtype", "there", "uses"),
    [
        ("cuda", torch.bfloat16, True, True), ("xpu", torch.float32, True, True), ("cpu", torch.float32, True, False),
        ("meta", torch.float32, True, False), ("cuda", torch.float64, True, False), ("mps", torch.float32, False, False),
    ],
)  # fmt: skip
def test_rule(device: str, dtype: torch.dtype, there: bool, uses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "has_triton_package", lambda: there)
    assert backend.use_triton(Stand(torch.device(device), dtype)) is uses  # type: ignore[arg-type]


def test_on_a_cpu_triton_is_not_imported() -> None:
    program = """
import sys, torch
from optimus.kernels import activation, backend, expert_mlp, linear_cross_entropy, rms_norm, rotary
z = torch.ones(3, 8, requires_grad=True)
activation.activation(z, "silu", gated=True).sum().backward()
rms_norm.rms_norm(z, torch.ones(8), 1e-5).sum().backward()
assert not backend.use_triton(z)
sys.exit("triton" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
