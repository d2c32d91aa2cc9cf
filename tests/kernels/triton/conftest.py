"""Fixtures for Triton kernels, which run on the accelerator if there is one, otherwise in Triton's interpreter."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from optimus.kernels import backend, devices
from optimus.kernels.devices import CHIPS

NATIVE = torch.accelerator.is_available()
HALF = torch.bfloat16 if NATIVE else torch.float16  # the interpreter is silently wrong for bf16


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "half"])


@pytest.fixture
def device() -> torch.device:
    return torch.device(torch.accelerator.current_accelerator() or "cpu") if NATIVE else torch.device("cpu")


@pytest.fixture(autouse=True)
def in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes operations use kernels on any device, except in float64, the type of references."""
    monkeypatch.setattr(backend, "use_triton", lambda x: x.dtype != torch.float64)


@pytest.fixture(autouse=True)
def mended_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repairs Triton 3.6's interpreter for NumPy 2.4 (triton issue 9171), where loop bounds are arrays of one element."""
    if NATIVE:
        return
    assert os.environ.get("TRITON_INTERPRET") == "1", "tests/conftest.py asks for the interpreter"
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    original: Callable[[Any, Any], None] = interpreter._patch_lang_tensor

    def mended(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", mended)


@pytest.fixture
def by_descriptors() -> Callable[[], AbstractContextManager[None]]:
    """A context in which the interpreter reads tiles by descriptors, where widths allow it, with three programs. An
    accelerator is left as it is."""
    chip = CHIPS["sm_90"]._replace(processors=3)
    return nullcontext if NATIVE else partial(mock.patch.object, devices, "chip_of", return_value=chip)


@pytest.fixture(params=["pointers", "descriptors"])
def reading(
    request: pytest.FixtureRequest, by_descriptors: Callable[[], AbstractContextManager[None]]
) -> Iterator[str]:
    """The way in which tiles are read."""
    with by_descriptors() if request.param == "descriptors" else nullcontext():
        yield request.param


@pytest.fixture
def generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


@pytest.fixture
def random(device: torch.device, generator: torch.Generator) -> Callable[..., Tensor]:
    """random(*shape, dtype=...) returns normal numbers on the device."""

    def make(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    return make


@pytest.fixture
def close() -> Callable[[Tensor, Tensor], None]:
    """close(ours, expected) asserts a relative error (Frobenius norm) of at most 1e-5 in fp32 and 1e-2 in 16 bits;
    `expected` is float64."""

    def check(ours: Tensor, expected: Tensor) -> None:
        assert expected.dtype == torch.float64
        assert ours.shape == expected.shape
        error = (ours.double() - expected).norm()
        assert error <= (1e-5 if ours.dtype == torch.float32 else 1e-2) * expected.norm()

    return check


@pytest.fixture
def same_function(close: Callable[[Tensor, Tensor], None]) -> Callable[..., None]:
    """same_function(ours, reference, inputs, *rest) asserts that output and gradients equal the float64 reference."""

    def check(ours: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: list[Tensor], *rest: Any) -> None:
        results = []
        for function, leaves in (
            (ours, [x.detach().clone().requires_grad_() for x in inputs]),
            (reference, [x.detach().double().requires_grad_() for x in inputs]),
        ):
            y = function(*leaves, *rest)
            y_grad = torch.linspace(-1, 2, y.numel(), dtype=torch.float64, device=y.device).view_as(y).to(y.dtype)
            results.append([y, *torch.autograd.grad(y, leaves, y_grad)])
        for a, b, leaf in zip(*results, [results[0][0], *inputs]):
            assert a.dtype == leaf.dtype
            close(a, b)

    return check
