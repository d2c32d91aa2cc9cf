"""The training benchmark runs every contestant on the same work and reports all promised rows."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import train


@pytest.mark.in_turn(0, 5)
@pytest.mark.parametrize(
    ("precision", "rivals"), [("float32", ["fp32"]), ("bfloat16", ["bf16 autocast", "bf16 weights"])]
)
def test_rows_and_ratios(precision: Any, rivals: list[str]) -> None:
    found = train.run(model="mula-tiny", steps=1, rounds=1, precision=precision, share=False, batch=8)
    rows, ratios = found.rows, found.ratios
    assert [row["contestant"] for row in rows] == [
        "optimus",
        *(f"transformers Trainer, grouped_mm, {how}" for how in rivals),
    ]
    assert {row["precision"] for row in rows} == {precision} == {found.more["precision"]}
    same = train.SAME_LOSS[precision]
    assert all(row["cross_entropy"] == pytest.approx(rows[0]["cross_entropy"], rel=same) for row in rows)
    rival = max(row["tokens_per_second"] for row in rows[1:])
    assert ratios["train.vs_best_rival"] == pytest.approx(rows[0]["tokens_per_second"] / rival)
    assert 0 <= ratios["loader.share_of_step"] < 1


def test_who_knows_bf16_alone_is_left_out_and_named(tmp_path: Path) -> None:
    config = train.configuration("mula-tiny-moe", 8, 16, precision="float32")
    who, left_out = train.contestants(config)
    kinds = [f"transformers Trainer, {experts}" for experts in ("grouped_mm", "eager")]
    assert [*who] == ["optimus", *(f"{kind}, fp32" for kind in kinds)]
    assert left_out == [f"{kind}, bf16 {how}" for kind in kinds for how in ("autocast", "weights")]
    assert not train.contestants(train.configuration("mula-tiny-moe", 8, 16))[1]


@pytest.mark.in_turn(1, 5)
def test_the_trainer_does_the_same_work(tmp_path: Path) -> None:
    """A `transformers` trainer and our run agree with experts and two microbatches. Cross-entropies and gradient norms
    cover the balance loss; weights of later steps cover rates, clipping and decay."""
    config = train.prepared("mula-tiny-moe", tmp_path, 16, "float32")
    ours, theirs = (
        way(config, tmp_path / name, 5)
        for name, way in (("ours", train._optimus), ("theirs", train.trainer("eager", "fp32")))
    )
    assert theirs.cross_entropies == pytest.approx(ours.cross_entropies, rel=1e-4)
    assert theirs.norms == pytest.approx(ours.norms, rel=1e-3)
    assert max(ours.norms) > 1  # some gradients are clipped
    # The model learns; otherwise any work would pass.
    assert ours.cross_entropies[-1] < 0.95 * ours.cross_entropies[0]
