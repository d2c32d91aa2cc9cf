"""Devices by name, and peak rates by product name."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from optimus.errors import UserError
from optimus.observe.machine import describe_machine, find_device, free_memory, peak_flops, versions


class Accelerator:
    """Two devices of type xpu, as `torch.accelerator` describes them."""

    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 2)
    current_accelerator = staticmethod(lambda: torch.device("xpu"))


def test_devices_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert find_device("auto", "train.device") == find_device("cpu", "train.device") == torch.device("cpu")
    for name in ("cuda", "cuda:0", "xpu", "gpu", "turbo:x", ""):
        with pytest.raises(
            UserError, match=rf"train\.device '{name}' is not available: this machine has cpu alone \(torch "
        ):
            find_device(name, "train.device")


def test_devices_with_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "accelerator", Accelerator)
    assert find_device("auto", "--device") == torch.device("xpu", 0)
    assert find_device("auto", "--device", local_rank=1) == torch.device("xpu", 1)
    assert find_device("xpu", "--device", local_rank=1) == torch.device("xpu", 1)
    assert find_device("xpu:1", "--device") == torch.device("xpu", 1)
    assert find_device("cpu", "--device") == torch.device("cpu")
    for name in ("cuda", "xpu:2", "gpu"):
        with pytest.raises(UserError, match=rf"--device '{name}' is not available: this machine has 2 x xpu and cpu"):
            find_device(name, "--device")
    with pytest.raises(
        UserError, match=r"'auto' is not available: .*named with its index, such as xpu:0"
    ):  # more ranks than devices
        find_device("auto", "--device", local_rank=2)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("Intel(R) Data Center GPU Max 1550", 419),
        ("AMD Instinct MI250X", 191.5),
        ("Something else", None),
    ],
)
def test_peak_by_product(monkeypatch: pytest.MonkeyPatch, name: str, tflops: float | None) -> None:
    module = SimpleNamespace(get_device_name=lambda device: name)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    device = SimpleNamespace(type="accelerator")
    assert peak_flops(device) == (tflops * 1e12 if tflops else None)


def test_a_cpu_has_no_known_peak_but_memory() -> None:
    assert peak_flops(torch.device("cpu")) is None
    assert 2**20 < free_memory(torch.device("cpu")) <= describe_machine()["memory_gib"] * 1.01 * 2**30


def test_reports_name_what_is_there() -> None:
    machine = describe_machine()
    assert machine["cores"] >= 1
    assert machine["cpu"]
    found = versions("no-such-package")
    assert found["torch"] == torch.__version__.split("+")[0] or found["torch"] == torch.__version__
    assert found["no-such-package"] == "not installed"


def test_what_an_earlier_run_left_on_a_device_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of an earlier run counts as free: its modules in reference cycles are collected, and the allocator's cache
    is emptied."""
    run = torch.nn.Identity()
    run.itself = [run]
    alive, cached = weakref.ref(run), [100]
    del run

    def empty_cache() -> None:
        cached[0] = 100 if alive() is not None else 0

    module = SimpleNamespace(mem_get_info=lambda device: (1000 - cached[0], 1000), empty_cache=empty_cache)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    gc.disable()
    try:
        assert free_memory(torch.device("meta")) == 1000
    finally:
        gc.enable()
