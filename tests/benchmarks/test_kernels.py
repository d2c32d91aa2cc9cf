"""The kernel benchmark: every kernel is correct at the widths of real layers; rows and ratios are consistent."""

import pytest
import torch
from torch import Tensor

from benchmarks import kernel_cases, kernels, tiles
from benchmarks.kernel_cases import Case, Sizes, cases
from optimus.config.load import model_config_from, resolve_model
from optimus.errors import UserError

CPU = torch.device("cpu")
OLMOE = {
    "embedding", "rms_norm", "qkv_projection", "qk_norm", "rotary", "attention", "output_projection", "router", "experts",
    "linear_cross_entropy", "gradient_norm", "adamw",
}  # fmt: skip
OLMO = OLMOE - {"rms_norm", "qk_norm", "router", "experts"} | {
    "layer_norm", "gate_up_projection", "swiglu", "down_projection",
}  # fmt: skip


def sizes(preset: str, tokens: int, dtype: torch.dtype) -> Sizes:
    return Sizes(model_config_from(resolve_model(preset)["model"], preset), tokens, tokens, dtype, CPU, {})


@pytest.mark.swept
@pytest.mark.slow
@pytest.mark.parametrize("dtype", kernels.TOLERANCE, ids=["fp32", "bf16"])
@pytest.mark.parametrize("model", ["mula-7b-a1b", "mula-tiny"])
def test_every_kernel_is_right_at_the_widths_of_real_layers(
    model: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_CHECK_EXPERTS", 8)
    monkeypatch.setattr(kernel_cases, "_STATE_ELEMENTS", 1 << 16)
    few = sizes(model, 32, dtype)
    assert few.model.vocab in (50304, 4096)
    found = kernels.check(few._replace(model=few.model.model_copy(update={"vocab": 4096})))
    library = {"embedding", "attention", "layer_norm"}
    assert found.keys() == (OLMOE if few.model.experts else OLMO) - library
    assert all(error <= kernels.TOLERANCE[dtype] for error in found.values()), found


@pytest.mark.parametrize("model", ["mula-tiny-moe", "mula-tiny"])
def test_every_contestant_does_the_same(model: str) -> None:
    for make in cases(sizes(model, 32, torch.float32)):
        case = make()
        if case.reference is not None and not case.in_place:
            assert all(kernels.error(way, case) <= 1e-5 for way in case.plain.values()), case.kernel


@pytest.mark.in_turn(3, 5)
def test_what_is_wrong_is_seen_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def half_wrong(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(1.01 * y for y in case.ours(*tensors))

    case = next(c for c in (make() for make in cases(sizes("mula-tiny", 16, torch.float32))) if c.kernel == "swiglu")
    assert kernels.error(half_wrong, case) == pytest.approx(0.01, rel=0.01)
    monkeypatch.setattr(kernels, "check", lambda sizes: {"swiglu": 0.01, "rotary": float("nan")})
    found = kernels.run(model="mula-tiny", tokens=64, context=32, dtype="fp32", device="cpu", rounds=1)
    for row in found.rows:
        assert ("ours_ms" in row) == (row["kernel"] not in ("swiglu", "rotary"))
    assert "cpu.swiglu.vs_plain" not in found.ratios


@pytest.mark.in_turn(2, 5)
def test_rows_and_ratios() -> None:
    found = kernels.run(model="mula-tiny-moe", tokens=64, context=32, microbatches=3, device="cpu", rounds=1)
    rows, ratios = found.rows, found.ratios
    assert {row["kernel"] for row in rows} == OLMOE
    by_name = {row["kernel"]: row for row in rows}
    assert by_name["rms_norm"]["calls_per_step"] == 3 * (2 * 4 + 1)
    assert by_name["experts"]["calls_per_step"] == 3 * 4
    assert by_name["adamw"]["calls_per_step"] == 1  # one call per step updates so few parameters
    for when in ("before", "after"):
        assert sum(row[f"percent_{when}"] for row in rows) == pytest.approx(100)
    for name in OLMOE - {"embedding", "attention"}:
        row = by_name[name]
        assert ratios[f"cpu.{name}.vs_plain"] == pytest.approx(row["plain_ms"] / row["ours_ms"])
        assert (row["tflops"] is None) != (row["gb_per_s"] is None)
    plain, ours = (sum(row["calls_per_step"] * row[f"{way}_ms"] for row in rows) for way in ("plain", "ours"))
    assert ratios["cpu.step.vs_plain"] == pytest.approx(plain / ours)
    shares = kernels.shares(rows)
    assert [row["percent_before"] for row in shares] == sorted((row["percent_before"] for row in rows), reverse=True)


def test_a_plain_way_that_does_not_fit_the_memory_is_left_out() -> None:
    def too_large(*_: Tensor) -> tuple[Tensor, ...]:
        raise torch.OutOfMemoryError

    few = sizes("mula-tiny", 16, torch.float32)
    case = next(c for c in (make() for make in cases(few)) if c.kernel == "swiglu")._replace(plain={"chain": too_large})
    row = kernels.row_of(case, 0.0, few, rounds=1)
    assert row["plain"] == "does not fit"
    assert row["vs_plain"] is None
    assert row["plain_ms"] == row["ours_ms"]


def test_saved_bytes_leave_parameters_out() -> None:
    x, w = torch.randn(5, 8, requires_grad=True), torch.nn.Parameter(torch.randn(3, 8))
    case = Case("linear", "", 1, [x, w], lambda x, w: (torch.nn.functional.linear(x, w),), {}, None)
    assert kernels.saved_bytes(case.ours, case) == x.nbytes


def test_tokens_that_fill_no_sequence() -> None:
    with pytest.raises(UserError, match=r"--tokens 100 is no multiple of --context 64"):
        kernels.run(model="mula-tiny", tokens=100, context=64)


@pytest.mark.parametrize(("model", "reason"), [("mula-7b-a1b", "--device says cpu"), ("mula-1b", "has no experts")])
def test_tiles_need_experts_and_an_accelerator(model: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        tiles.run(model=model, device="cpu")
