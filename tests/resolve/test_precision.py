"""`train.precision: auto` is decided once for all ranks, and the run keeps the decision."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

import optimus
from optimus.comm import Groups
from optimus.config import RunConfig, load_config
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.observe import machine
from optimus.plan.job import job_of
from optimus.plan.machine import load_machine
from optimus.resolve.ranks import mesh_of
from optimus.testing import run_ranks
from optimus.training.resolving import resolve_run

CPU = torch.device("cpu")


def left_open(run: dict[str, Any]) -> dict[str, Any]:
    return run | {"train": {key: value for key, value in run["train"].items() if key != "precision"}}


def processor(monkeypatch: pytest.MonkeyPatch, *features: str, **environment: str) -> None:
    """Simulates a processor with these features, and a torch that these environment variables limit."""
    monkeypatch.setattr(machine, "_cpu_features", lambda: {"avx2", *features})
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def saved(run: dict[str, Any]) -> str:
    return str(yaml.safe_load((Path(run["train"]["output"]) / "config.yaml").read_text())["train"]["precision"])


@pytest.mark.parametrize(
    ("features", "environment", "expected", "why"),
    [
        ((), {}, "float32", "the processor has no instructions for bfloat16 that torch uses"),
        (("avx512_f", "avx512_vnni"), {}, "float32", "the processor has no instructions for bfloat16 that torch uses"),
        (("neon", "bf16"), {}, "float32", "the processor has no instructions for bfloat16 that torch uses"),
        (("avx512_bf16",), {}, "bfloat16", "the processor has AVX512-BF16"),
        (("avx512_bf16", "amx_bf16"), {}, "bfloat16", "the processor has AMX-BF16"),
        (("sve_bf16",), {}, "bfloat16", "the processor has SVE BF16"),
        (("svebf16",), {}, "bfloat16", "the processor has SVE BF16"),
        (("avx512_bf16",), {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, "bfloat16", "the processor has AVX512-BF16"),
        (("avx512_bf16",), {"ONEDNN_MAX_CPU_ISA": "DEFAULT"}, "bfloat16", "the processor has AVX512-BF16"),
        (("avx512_bf16",), {"ATEN_CPU_CAPABILITY": "avx512"}, "bfloat16", "the processor has AVX512-BF16"),
        (
            ("avx512_bf16",),
            {"ONEDNN_MAX_CPU_ISA": "AVX2"},
            "float32",
            "ONEDNN_MAX_CPU_ISA=AVX2 keeps torch from using the processor's AVX512-BF16",
        ),
        (
            ("amx_bf16",),
            {"DNNL_MAX_CPU_ISA": "avx512_core"},
            "float32",
            "DNNL_MAX_CPU_ISA=avx512_core keeps torch from using the processor's AMX-BF16",
        ),
        (
            ("amx_bf16",),
            {"DNNL_MAX_CPU_ISA": "avx2", "ONEDNN_MAX_CPU_ISA": "all"},
            "bfloat16",
            "the processor has AMX-BF16",
        ),
        (
            ("sve_bf16",),
            {"ATEN_CPU_CAPABILITY": "default"},
            "float32",
            "ATEN_CPU_CAPABILITY=default keeps torch from using the processor's SVE BF16",
        ),
    ],
)
def test_a_processor_is_asked_what_it_has(
    small_run: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    features: tuple[str, ...],
    environment: dict[str, str],
    expected: str,
    why: str,
) -> None:
    processor(monkeypatch, *features, **environment)
    assert chosen(load_config(left_open(small_run)), CPU) == (expected, why)


def test_without_onednn_products_in_bfloat16_are_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    processor(monkeypatch, "avx512_bf16")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not machine.bfloat16_of(CPU).native


def test_the_kernel_is_asked_where_torch_cannot_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch and the kernel report the same bf16 instructions on this machine."""
    names = {"amx_bf16", "avx512_bf16"}
    by_torch = machine._cpu_features()
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    by_kernel = machine._cpu_features()
    assert len(by_kernel) > 10
    assert by_torch & names == by_kernel & names
    assert ("sve_bf16" in by_torch) == ("svebf16" in by_kernel)


def test_what_is_given_is_taken(small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    processor(monkeypatch)
    config = load_config(small_run)
    assert config.train.precision == "bfloat16"
    assert chosen(config, CPU) == ("bfloat16", "")


def test_a_run_says_its_choice_writes_it_and_keeps_it(
    small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = left_open(small_run)
    run["train"]["stop_at"] = 2
    processor(monkeypatch)
    optimus.train(run)
    assert saved(run) == "float32"
    assert "train.precision: float32 (the processor has no instructions for" in capfd.readouterr().err
    processor(monkeypatch, "avx512_bf16")  # the run continues on another node
    run["train"]["stop_at"] = 4
    assert optimus.train(run, resume=True)["step"] == 4
    assert saved(run) == "float32"
    assert "train.precision: float32 (as the run chose at its start)" in capfd.readouterr().err


def test_what_a_run_has_kept_is_looked_at(small_run: dict[str, Any]) -> None:
    """Bad values in the kept configuration, which somebody may have edited, are refused before training."""
    run = left_open(small_run)
    run["train"]["stop_at"] = 2
    optimus.train(run)
    path = Path(run["train"]["output"]) / "config.yaml"
    whole = path.read_text()
    for key, value, message in [
        ("train.precision", "float8", "it must be 'auto', 'bfloat16', 'float16' or 'float32'"),
        ("lr_schedule.warmup_steps", "many", "it must be a whole number"),
        ("lr_schedule.warmup_steps", 3.7, "it must be a whole number"),
        ("lr_schedule.warmup_steps", -1, "it must be greater than or equal to 0"),
        ("train.micro_batch", "large", "it must be a whole number"),
    ]:
        tree = yaml.safe_load(whole)
        section, field = key.split(".")
        tree[section][field] = value
        path.write_text(yaml.safe_dump(tree))
        for check in (False, True):
            with pytest.raises(UserError, match=re.escape(f"{path}: '{key}' is {value!r}: {message}")):
                optimus.train(run, resume=True, check=check)


def chosen(config: RunConfig, device: torch.device, where: Groups | None = None) -> tuple[str, str]:
    """Returns the decided precision and its reason, which is empty for a given precision."""
    run = resolve_run(config, device, where or mesh_of(config, 1))
    return run.config.train.precision, "".join(each.why for each in run.decisions if each.key == "train.precision")


def decide(config: RunConfig) -> tuple[str, str]:
    """Returns the decision of a rank. The first rank's node has no bf16 instructions, those of the others have."""
    groups = Groups(Mesh.from_sizes(dist.get_world_size()))
    with pytest.MonkeyPatch.context() as patch:
        processor(patch, *(["avx512_bf16"] if groups.rank else []))
        return chosen(config, CPU, groups)


def test_the_first_rank_decides_for_all(small_run: dict[str, Any]) -> None:
    found = run_ranks(decide, 2, load_config(left_open(small_run)))
    assert found == [("float32", "the processor has no instructions for bfloat16 that torch uses")] * 2


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (SimpleNamespace(is_bf16_supported=lambda including_emulation=True: True), "bfloat16"),
        (SimpleNamespace(is_bf16_supported=lambda including_emulation=True: including_emulation), "float32"),
        (SimpleNamespace(is_bf16_supported=lambda: True), "bfloat16"),
        (SimpleNamespace(is_bf16_supported=lambda: False), "float32"),
        (SimpleNamespace(), "float32"),
    ],
)
def test_accelerators_are_asked(
    small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch, module: Any, expected: str
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert chosen(load_config(left_open(small_run)), torch.device("meta"))[0] == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("dgx-h100", "bfloat16"), ("dgx-v100", "float32"), ("laptop", "float32"), ("tpu-v5e", "bfloat16")],
)
def test_the_planner_asks_the_machine(small_run: dict[str, Any], name: str, expected: str) -> None:
    kind = load_machine(name)
    assert job_of(load_config(left_open(small_run)), kind, Mesh()).train.precision == expected
    if "bf16" in kind.arithmetic:
        assert job_of(load_config(small_run), kind, Mesh()).train.precision == "bfloat16"
