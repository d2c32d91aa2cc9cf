"""The benchmark of the sparse block: inputs are routed as requested, contestants agree, and the report follows from the
measurements.

Legend: T tokens, H hidden, I intermediate, J = 2 I, E experts, K experts per token, R = T * K routed rows."""

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import moe, moe_rivals
from benchmarks.moe_inputs import LOADS, Inputs, Shape, Weights, make_inputs, make_weights, parse_shape
from benchmarks.moe_kernel_rivals import contestants
from benchmarks.moe_measure import KINDS, check, expected, memory
from benchmarks.moe_rivals import Block, LeftOut, Make, Ours, Setting, route
from optimus import cli
from optimus.disk import check_plot
from optimus.errors import UserError
from optimus.kernels.expert_mlp import expert_mlp_reference
from optimus.model.moe.router import Router

pytest.importorskip("transformers", reason="the rivals are those of transformers")

CPU = torch.device("cpu")
TINY = Shape("tiny", 32, 16, 8, 2)
TYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def prepare(load: str, dtype: torch.dtype = torch.float32, tokens: int = 48) -> tuple[Setting, Inputs]:
    weights, inputs = make_inputs(TINY, make_weights(TINY, dtype, CPU), tokens, load)
    return Setting(TINY, tokens, weights, Weights(*(torch.zeros_like(weight) for weight in weights))), inputs


def choices(setting: Setting, inputs: Inputs) -> Tensor:
    return route(inputs.x_TH.detach(), setting.weights.router_EH, TINY.experts_per_token)[1]


# ---- Inputs ----


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [TINY, Shape("odd", 32, 16, 6, 4)])
def test_uniform_is_the_routers_own_uniform(dtype: torch.dtype, shape: Shape) -> None:
    weights, inputs = make_inputs(shape, make_weights(shape, dtype, CPU), 50, "uniform")
    router = Router(shape.hidden, shape.experts, shape.experts_per_token, True)
    nn.init.normal_(router.weight)
    _, indices_TK, _ = router(inputs.x_TH.detach().float())
    _, ours_TK = route(inputs.x_TH.detach(), weights.router_EH, shape.experts_per_token)
    assert ours_TK.sort().values.equal(indices_TK.sort().values)


def test_counts_of_the_other_loads() -> None:
    counts = {load: torch.bincount(choices(*prepare(load, tokens=4000)).flatten(), minlength=8) for load in LOADS}
    assert all(int(count_E.sum()) == 8000 for count_E in counts.values())
    assert counts["one-hot"].tolist() == [4000, 4000, 0, 0, 0, 0, 0, 0]
    assert counts["learned"].min() > 700
    zipf_E = counts["zipf"]
    assert zipf_E[0] == zipf_E.max()
    assert zipf_E[:4].sum() > 3 * zipf_E[4:].sum()
    assert zipf_E.min() > 0


@pytest.mark.parametrize("load", ["learned", "zipf"])
def test_no_token_is_undecided(load: str) -> None:
    setting, inputs = prepare(load, torch.bfloat16, 2000)
    logits_TE = F.linear(inputs.x_TH.detach(), setting.weights.router_EH).float()
    last_T, next_T = logits_TE.topk(3).values[:, 1:].unbind(1)
    assert ((last_T - next_T) >= 2**-6).all()


def test_shapes() -> None:
    assert [str(parse_shape(name)) for name in ("olmoe", "small", "mula-100b-a7b", "64/32/8/2")] == [
        "2048/1024/64/8",
        "512/256/32/4",
        "3072/1536/144/8",
        "64/32/8/2",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": ["olme"]}, r"--shape olme: .*did you mean 'olmoe'"),
        ({"shape": ["mula-1b"]}, "--shape mula-1b: this preset has no experts"),
        ({"shape": ["64/32/8/9"]}, "--shape 64/32/8/9: .* chosen at most experts"),
        ({"shape": ["64/32/8"]}, "--shape 64/32/8: give hidden/intermediate/experts/chosen"),
        (
            {"shape": ["4/4/64/8"], "load": ["uniform"]},
            "--shape 4/4/64/8: uniform routing here needs hidden of at least 8",
        ),
        ({"load": ["zip"]}, "--load zip: did you mean 'zipf'"),
        ({"dtype": ["fp8"]}, "--dtype fp8: "),
        ({"tokens": [0]}, "--tokens 0: give at least 1"),
        ({"rounds": 0}, "--rounds 0: give at least 1"),
        ({"device": "abacus"}, "--device 'abacus' is not available"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        moe.run(**options)


# ---- Contestants ----


@pytest.mark.parametrize("load", LOADS)
def test_expected_is_the_definition(load: str) -> None:
    setting, inputs = prepare(load)
    want = expected(setting.weights, inputs, TINY.experts_per_token)
    leaves = [tensor.detach().double().requires_grad_() for tensor in (inputs.x_TH, *setting.weights)]
    x_TH, router_EH, gate_up_EJH, down_EHI = leaves
    indices_TK = choices(setting, inputs)
    weights_TK = (x_TH @ router_EH.T).softmax(-1).gather(1, indices_TK)
    y_TH = expert_mlp_reference(x_TH, weights_TK, indices_TK, gate_up_EJH, down_EHI)
    grads = torch.autograd.grad(y_TH, leaves, inputs.y_grad_TH.double())
    torch.testing.assert_close(want.y_TH, y_TH.detach())
    for got, grad in zip((want.x_grad_TH, *want.gradients), grads):
        torch.testing.assert_close(got.double(), grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("name", contestants(CPU))
def test_contestants_are_right(name: str, load: str, dtype: torch.dtype) -> None:
    setting, inputs = prepare(load, dtype)
    block = contestants(CPU)[name](setting)
    assert max(check(block, expected(setting.weights, inputs, 2), setting.gradients)) < TYPES[dtype]


@pytest.mark.parametrize("name", contestants(CPU))
def test_fresh_gradients_are_those_that_accumulate(name: str) -> None:
    setting, inputs = prepare("one-hot")
    block = contestants(CPU)[name](setting)
    block.begin(accumulating=True)
    block(inputs.x_TH).backward(inputs.y_grad_TH)
    block.begin(accumulating=False)
    assert all(parameter.grad is None for parameter, _ in block._parameters)
    block(inputs.x_TH).backward(inputs.y_grad_TH)
    for parameter, buffer in block._parameters:
        assert parameter.grad is not None
        assert parameter.grad is not buffer
        torch.testing.assert_close(parameter.grad, buffer)


def test_check_sees_gradients_that_do_not_add_up() -> None:
    setting, inputs = prepare("learned")
    ours = Ours(setting)

    class Forgets(Block):
        def begin(self, *, accumulating: bool) -> None:
            setting.gradients.down_EHI.zero_()
            ours.begin(accumulating=accumulating)

    errors = check(Forgets(ours, []), expected(setting.weights, inputs, 2), setting.gradients)
    assert errors.output < 1e-5
    assert errors.gradient == pytest.approx(1, abs=1e-3)  # accumulates once instead of twice


def test_check_sees_what_is_not_a_number() -> None:
    setting, inputs = prepare("learned")
    errors = check(Block(lambda x_TH: x_TH * torch.nan, []), expected(setting.weights, inputs, 2), setting.gradients)
    assert errors == (math.inf, math.inf)


def test_batched_mm_is_left_out_where_its_copies_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    setting, _ = prepare("learned")
    copies = 48 * 2 * 3 * 32 * 16 * 4
    for free, fits in ((2.6 * copies, True), (2.4 * copies, False)):
        monkeypatch.setattr(moe_rivals, "free_memory", lambda device, free=free: free)
        make = contestants(CPU)["transformers batched_mm"]
        if fits:
            make(setting)
            continue
        with pytest.raises(LeftOut, match="copies of weights need"):
            make(setting)


def test_memory_of_a_pass() -> None:
    shape, tokens = Shape("wide", 64, 128, 4, 2), 128  # 64 rows per expert, so no row is padding
    weights, inputs = make_inputs(shape, make_weights(shape, torch.bfloat16, CPU), tokens, "uniform")
    block = Ours(Setting(shape, tokens, weights, Weights(*(torch.zeros_like(weight) for weight in weights))))
    counted = memory(block, inputs)
    theory = tokens * (2 * shape.hidden + 2 * shape.experts_per_token * 2 * shape.intermediate)  # x and z
    assert theory < counted.saved < 1.2 * theory  # the rest: logits, weights, indices
    assert counted.saved < counted.peak


# ---- Whole benchmark ----


@pytest.fixture(scope="module", autouse=True)
def _small_product() -> Iterator[None]:
    """Shrinks the reference product: a large one in bf16 takes half a minute on a CPU without bf16 instructions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "_PRODUCT", (64, 64))
        yield


@pytest.fixture(scope="module")
def result() -> tuple[list[dict[str, Any]], dict[str, float | None]]:
    found = moe.run(shape=["32/16/8/2"], tokens=[16, 24], load=["learned", "zipf"], dtype=["bf16"], rounds=1)
    return found.rows, dict(found.ratios)


def test_rows(result: tuple[list[dict[str, Any]], dict[str, float | None]]) -> None:
    rows, _ = result
    names = [*contestants(CPU), "one product 64 NN", "one product 64 NT"]
    assert [row["contestant"] for row in rows] == 4 * names
    assert [row["case"] for row in rows[:: len(names)]] == [
        f"32/16/8/2 bf16 {tokens} {load}" for load in ("learned", "zipf") for tokens in (16, 24)
    ]
    for row in rows:
        assert row["tflops"] > 0
        if row["role"] != "product":
            assert row["note"] == ""
            assert all(row[f"{kind}_ms"] > 0 for kind in KINDS)
            assert row["error"] == max(row["output_error"], row["gradient_error"]) < 2e-2
            flops = 18 * row["tokens"] * 2 * 32 * 16
            assert row["tflops"] == pytest.approx(flops / row["accumulating_ms"] / 1e9)


def test_ratios(result: tuple[list[dict[str, Any]], dict[str, float | None]]) -> None:
    rows, ratios = result
    name = "cpu.32/16/8/2.bf16"
    by_case: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_case.setdefault(row["case"], []).append(row)

    def worst(load: str, of: Callable[[list[dict[str, Any]]], float]) -> float:
        return min(of(table) for case, table in by_case.items() if case.endswith(load))

    def speedup(kind: str) -> Callable[[list[dict[str, Any]]], float]:
        return lambda table: min(row[f"{kind}_ms"] for row in table[1:5]) / table[0][f"{kind}_ms"]

    assert ratios == pytest.approx(
        {
            f"{name}.vs_best_rival": worst("learned", speedup("accumulating")),
            f"{name}.fresh.vs_best_rival": worst("learned", speedup("fresh")),
            f"{name}.forward.vs_best_rival": worst("learned", speedup("forward")),
            f"{name}.vs_module_list": worst("learned", lambda t: t[4]["accumulating_ms"] / t[0]["accumulating_ms"]),
            f"{name}.vs_transformers": worst(
                "learned", lambda t: min(row["accumulating_ms"] for row in t[1:4]) / t[0]["accumulating_ms"]
            ),
            f"{name}.tflops": worst("learned", lambda t: t[0]["tflops"]),
            f"{name}.share_of_matmul": worst("learned", lambda t: t[0]["tflops"] / max(row["tflops"] for row in t[5:])),
            f"{name}.learned.vs_best_rival": worst("learned", speedup("accumulating")),
            f"{name}.zipf.vs_best_rival": worst("zipf", speedup("accumulating")),
        }
    )


def test_rivals_that_fail_are_named_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(setting: Setting) -> Block:
        raise RuntimeError("no such chip\nand more")

    def runs_out(setting: Setting) -> Block:
        def call(x_TH: Tensor) -> Tensor:
            if len(x_TH) > 128:
                raise MemoryError("no room")
            return ours(x_TH)

        ours = Ours(setting)
        block = Block(call, [])
        block.begin = ours.begin  # type: ignore[method-assign]
        return block

    def wrong(setting: Setting) -> Block:
        return Ours(setting._replace(weights=setting.weights._replace(down_EHI=2 * setting.weights.down_EHI)))

    def left_out(setting: Setting) -> Block:
        raise LeftOut("not installed")

    rivals: dict[str, Make] = {"breaks": breaks, "runs out": runs_out, "wrong": wrong, "left out": left_out}
    monkeypatch.setattr(moe, "contestants", lambda device: {"optimus": Ours, **rivals})
    found = moe.run(shape=["32/16/8/2"], tokens=[130], dtype=["fp32"], rounds=1)
    rows, ratios = found.rows, found.ratios
    notes = {row["contestant"]: row["note"] for row in rows if row["role"] != "product"}
    assert notes == {
        "optimus": "",
        "breaks": "failed: RuntimeError: no such chip",
        "runs out": "failed: MemoryError: no room",
        "wrong": "wrong: 1.0e+00 from float64",
        "left out": "left out: not installed",
    }
    assert [row["contestant"] for row in rows if row.get("accumulating_ms")] == ["optimus"]
    assert set(ratios) == {"cpu.32/16/8/2.fp32.tflops", "cpu.32/16/8/2.fp32.share_of_matmul"}


def test_the_hopeless_have_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "_HOPELESS", (0, 0.0))
    found = moe.run(shape=["32/16/8/2"], tokens=[16], dtype=["fp32"], rounds=1)
    rows, ratios = found.rows, found.ratios
    for row in rows[1:5]:
        assert row["note"] == "one pass only: too slow"
        assert (row["forward_ms"], row["fresh_ms"]) == (None, None)
        assert row["accumulating_ms"] > 0
    assert "cpu.32/16/8/2.fp32.vs_best_rival" in ratios
    assert "cpu.32/16/8/2.fp32.fresh.vs_best_rival" not in ratios


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"shape": "32/16/8/2", "tokens": 16, "load": "one-hot", "dtype": "fp32", "rounds": 1}
    options |= {"output": tmp_path / "r.json", "plot": tmp_path / "r.png"}
    words = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
    monkeypatch.setattr(sys, "argv", ["optimus", "bench", "moe", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert not caught.value.code
    shown = capsys.readouterr().out
    assert "32/16/8/2 (32/16/8/2) fp32, 16 tokens, one-hot load" in shown
    assert f"torch {torch.__version__}" in shown
    report = json.loads((tmp_path / "r.json").read_text())
    # One-hot routing alone is no balanced load, so the report has no headline ratio.
    assert list(report["ratios"]) == ["cpu.32/16/8/2.fp32.one-hot.vs_best_rival"]
    assert report["versions"]["triton"]
    assert (tmp_path / "r.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("name", "message"), [("a.jpg", r"name a \.png file"), ("no/a.png", "does not exist: create it first")]
)
def test_a_plot_that_cannot_be(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_plot(tmp_path / name)
