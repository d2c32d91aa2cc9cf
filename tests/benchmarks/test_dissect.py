"""The dissection of a step: every moment has one row, every module and collective a row, and shares add up."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from benchmarks.dissect import (
    Key,
    allowed,
    by_key,
    by_part,
    changed,
    compare,
    job_on,
    option_rows,
    planned_parts,
    rows_of,
    typical,
    typical_step,
)
from benchmarks.dissect_steps import WAITING, Measured, Slice, Step, Work, measure, steps_of
from helpers.sweep import in_turns
from optimus.config import RunConfig
from optimus.errors import UserError
from optimus.plan.job_builder import configured
from optimus.plan.machine import load_machine
from optimus.step_context import REDUCTION, UPDATE
from optimus.testing import run_ranks

_NODE = "autograd::engine::evaluate_function: "
SMALL = ("model.layers=2", "model.hidden=32", "model.vocab=64", "train.global_batch=4", "train.sequence_length=16")
ATTENTION = Key("attention", "forward", "compute")


def slices(*rows: tuple[str, float, float, dict[str, Any]]) -> list[Slice]:
    return [Slice(name, start, end, options.pop("thread", 1), **options) for name, start, end, options in rows]


def region(name: str, start: float, end: float) -> tuple[str, float, float, dict[str, Any]]:
    return name, start, end, {"is_region": True}


def test_each_moment_counts_once() -> None:
    """A step of 100 microseconds, written down by hand: modules, a backward pass with a recomputation, collectives."""
    (step,) = steps_of(
        slices(
            region("before", 0, 4),
            region("dissect: step", 10, 110),
            region("dissect: part attention", 12, 30),
            ("aten::mm", 13, 20, {"number": 7}),  # makes the autograd node 7
            region("all_reduce, ranks 0, 1", 22, 26),
            (_NODE + "MmBackward0", 40, 60, {"number": 7, "forward_thread": 1}),
            ("MmBackward0", 41, 60, {"number": 7, "forward_thread": 1, "is_backward": True}),
            region("dissect: part attention", 42, 47),
            region(REDUCTION, 50, 58),
            region("reduce_scatter, ranks 0, 2", 51, 57),
            region("backward 0 to rank 1, ranks 0 to 1 (2)", 62, 65),
            region(UPDATE, 70, 100),
            ("aten::mul", 71, 90, {}),
            ("aten::mm", 20, 90, {"thread": 2}),  # beside the main thread
        ),
        {"0, 1": "tp", "0, 2": "dp"},
    )
    found = {work: sum(pieces) * 1e6 for work, pieces in step.pieces.items()}
    assert found == {
        Work(Key("other", "step", "compute")): pytest.approx(2 + 10 + 2 + 5 + 10),
        Work(ATTENTION): pytest.approx(14),
        Work(Key("attention", "forward", "tensor"), "all_reduce", "tp"): pytest.approx(4),
        Work(Key("attention", "backward", "compute")): pytest.approx(2 + 3 + 2),
        Work(Key("attention", "recompute", "compute")): pytest.approx(5),
        Work(Key("gradients", "step", "reduction")): pytest.approx(2),
        Work(Key("gradients", "step", "reduction"), "reduce_scatter", "dp"): pytest.approx(6),
        Work(WAITING, "message", "pp"): pytest.approx(3),
        Work(Key("optimizer", "step", "update")): pytest.approx(30),
    }
    assert step.seconds == pytest.approx(100e-6)
    assert {work.kind: number for work, number in step.calls.items()} == {
        "all_reduce": 1,
        "reduce_scatter": 1,
        "message": 1,
    }


def test_the_typical_step_has_least_pieces_and_shares_of_waits() -> None:
    """Two of three steps are disturbed, each in another piece; the second is the fastest."""
    attention, mlp = Work(ATTENTION), Work(ATTENTION._replace(part="mlp"))
    wait = Work(WAITING, "message", "pp")
    steps = [
        Step({attention: [1, 9], mlp: [4], wait: [0]}, {wait: 1}),
        Step({attention: [2, 3], mlp: [2, 1], wait: [2]}, {wait: 1}),  # another number of pieces of mlp
        Step({attention: [7, 2], mlp: [9], wait: [2]}, {wait: 1}),
    ]
    found = typical(steps, fastest=[1])
    assert found.seconds == {attention: 3, mlp: 3, wait: pytest.approx(1.5)}  # 1 + 2, least sum, 2 of 10 of the step
    assert found.waits == pytest.approx(0.2)
    assert found.calls[wait] == 1
    late = typical([Step({attention: [1], wait: [3]}, {})], [0])
    seen = [Measured([Step({attention: [1], wait: [3]}, {})], 1, 1, [], []), Measured(steps[1:2], 1, 1, [], [])]
    assert late.waits == pytest.approx(0.75)
    assert typical_step(seen).waits == pytest.approx(0.2)  # the rank that waits least


def test_rows_have_shares_of_both_sides() -> None:
    back, only = ATTENTION._replace(pass_="backward"), Key("gradients", "step", "norm")
    parts = compare({ATTENTION: 3.0, back: 6.0, only: 1.0}, {ATTENTION: 1.0, WAITING: 3.0})
    rows = {(row["part"], row["pass"]): row for row in rows_of(parts)}
    assert [row["share"] for row in rows.values()] == pytest.approx([60, 30, 10, 0])
    assert rows["attention", "forward"]["difference"] == pytest.approx(25 - 30)
    assert rows["gradients", "step"]["note"] == "not planned"
    assert rows["pipeline", "step"]["note"] == "not measured"
    wide = {part.key: part[1:] for part in by_part(parts)}
    assert wide[ATTENTION._replace(pass_="all")] == (9.0, 1.0)
    assert wide[only] == (1.0, None)


class Layout(NamedTuple):
    ranks: int
    model: str
    overrides: Sequence[str]
    collectives: set[tuple[str, str, str]]  # (part, work, axes) that must have rows


LAYOUTS = {
    "tensor": Layout(
        2, "mula-tiny", ("parallel.tensor=2",), {("attention", "tensor", "tp_out"), ("mlp", "tensor", "tp_out")}
    ),
    "moe, recomputed, sharded": Layout(
        2,
        "mula-tiny-moe",
        ("recompute=[attention]", "state.shard=parameters", "parallel.expert=2"),
        {("parameters", "gathering", "dp"), ("gradients", "reduction", "dp"), ("moe", "expert", "dp")},
    ),
    "pipeline": Layout(2, "mula-tiny", ("parallel.pipeline=2",), {("pipeline", "waiting", "pp")}),
    "offload": Layout(1, "mula-tiny", ("state.offload=all",), set()),
}


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("name", in_turns([*LAYOUTS], 4, always=1))
def test_every_module_and_collective_of_a_run_has_a_row(name: str) -> None:
    ranks, model, overrides, collectives = LAYOUTS[name]
    config = configured(model, [*SMALL, "train.micro_batch=1", "train.precision=float32", *overrides], ranks)
    seen = run_ranks(measure, ranks, config, 2, 1)
    for each in seen:
        assert len(each.steps) == 2
        last = each.steps[-1]
        rows: dict[str, set[str]] = defaultdict(set)
        for key in by_key(typical(each.steps, [0])):
            rows[key.part].add(key.pass_)
        for part in each.parts:
            assert {"forward", "backward"} <= rows[part], part
        assert {"optimizer", "gradients"} <= rows.keys()
        assert ("recompute" in rows["attention"]) == ("recomputed" in name)
        assert {work.kind for work in last.calls} == set(each.kinds)  # as the rank's own recorder counts
        assert collectives <= {(work.key.part, work.key.work, work.axes) for work in last.calls}
        parts = compare(by_key(typical(each.steps, [0])), planned_parts(job_on(config, load_machine("laptop"), ranks)))
        for side in ("share", "planned_share"):
            assert sum(row[side] for row in rows_of(parts)) == pytest.approx(100)
        # The planner has no term for what the run does not do. A stage's rank lacks parts of the slowest rank.
        assert "pipeline" in name or not [part.key for part in parts if part.measured is None]
    of_run = set().union(*(each.parts for each in seen))
    assert of_run == {"embedding", "norm", "attention", "head", "moe" if "moe" in model else "mlp"}


def test_options_that_a_configuration_allows() -> None:
    config = configured("mula-tiny", SMALL, 1)
    options = [
        ("recompute", ["block"]),
        ("recompute", ["moe"]),  # no experts
        ("state.shard", "none"),  # as it is
        ("parallel.schedule", "no such"),
        ("train.precision", "float32"),
    ]
    found = allowed(config, options)
    assert list(found) == ["recompute=[block]", "train.precision=float32"]
    assert found["recompute=[block]"].recompute == ["block"]
    assert changed(config, "state.shard", "optimizer").state.shard == "optimizer"

    def measured(other: RunConfig) -> tuple[float, float]:
        return (3.0, 2**20) if other.recompute else (2.0, 2**21)

    def planned(other: RunConfig) -> tuple[float, float]:
        if other.train.precision == "float32":
            raise UserError("no rate for fp32")
        return (5.0, 2**20) if other.recompute else (4.0, 2**20)

    first, block, float32 = option_rows(config, found, measured, planned)
    assert (first["option"], first["time"], first["memory"]) == ("as configured", 0, 0)
    assert (block["time"], block["planned_time"]) == pytest.approx((50, 25))
    assert (block["memory"], block["planned_memory"]) == pytest.approx((-50, 0))
    assert float32 == {"option": "train.precision=float32", "note": "no rate for fp32"}
