"""The benchmark of the optimizer step: bytes held by both ways of sharding; ratios follow from the rows."""

import pytest

from benchmarks import optimizer
from optimus.config import ModelConfig
from optimus.errors import UserError
from optimus.model.count import count_parameters

MODEL = ModelConfig(
    family="olmoe", hidden=64, layers=2, heads=2, intermediate=64, vocab=1024, experts=4, experts_per_token=2
)
EXPERT = 2 * 4 * 3 * 64 * 64
NORMS = 2 * 4 * 64 + 64  # norms before attention and experts, of q and k; the final norm
NON_EXPERT = 2 * 1024 * 64 + 2 * (4 * 64 * 64 + 4 * 64) + NORMS
STATE = 12 / 2**20  # MiB of a parameter's master weight and moments


@pytest.mark.in_turn(0, 5)
@pytest.mark.slow
def test_rows_and_ratios() -> None:
    found = optimizer.run(ranks=4, steps=1, model=MODEL)
    rows, ratios = found.rows, found.ratios
    assert [(row["dp"], row["ep"], row["sharding"]) for row in rows] == [
        (dp, ep, sharding) for dp, ep in [(2, 2), (4, 2), (4, 4)] for sharding in ("standard", "EPSO")
    ]
    for row in rows:
        holders = row["dp"] if row["sharding"] == "EPSO" else row["dp"] // row["ep"]
        assert row["non_expert_mib"] == pytest.approx(NON_EXPERT / holders * STATE, rel=0.01)
        assert row["expert_mib"] == pytest.approx(EXPERT / row["dp"] * STATE, rel=0.01)
        assert 0 < row["step_ms"] < row["reduce_and_step_ms"]
    four = rows[2:]  # ratios compare runs on all four ranks
    for kind in ("step", "reduce_and_step"):
        standard, epso = (four[i][f"{kind}_ms"] * four[i + 2][f"{kind}_ms"] for i in (0, 1))
        assert ratios[f"epso.{kind}_speedup"] == pytest.approx((standard / epso) ** 0.5)
    assert ratios["epso.non_expert_bytes"] == pytest.approx(4, rel=0.01)


def test_half_of_the_benchmarks_own_model_is_experts() -> None:
    total, _ = count_parameters(optimizer._MODEL)
    model = optimizer._MODEL
    assert model.experts is not None
    experts = model.layers * model.experts * 3 * model.hidden * model.intermediate
    assert experts / total == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("ranks", [1, 3, 16])
def test_ranks_that_no_layout_fits(ranks: int) -> None:
    with pytest.raises(UserError, match=f"--ranks {ranks}: .* need 2, 4, 8 ranks"):
        optimizer.run(ranks=ranks)
