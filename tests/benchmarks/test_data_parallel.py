"""The data-parallel benchmark: every contestant does the same work, and rows and ratios are complete."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessRaisedException
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import data_parallel
from benchmarks.training import configuration, turn
from optimus.plan.measure.ranks import run_fresh

TINY = {"family": "olmo", "hidden": 32, "layers": 1, "heads": 2, "intermediate": 32, "vocab": 64}
PARAMETERS = 4 * (4 * 128 * 128 + 3 * 128 * 512) + 2 * 4096 * 128  # mula-tiny


class Products(TorchDispatchMode):
    """Records the types of the operands of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function).startswith(("aten.mm", "aten.addmm")):
            self.types |= {str(each.dtype).removeprefix("torch.") for each in args if isinstance(each, torch.Tensor)}
        return function(*args, **(kwargs or {}))


@pytest.mark.in_turn(3, 5)
@pytest.mark.parametrize(("precision", "same"), [("float32", 1e-4), ("bfloat16", 1e-3)])
def test_rows_and_ratios(precision: Any, same: float) -> None:
    shape: dict[str, Any] = {"model": "mula-tiny", "steps": 1, "rounds": 1, "sequences": 2, "context": 32}
    found = data_parallel.run(**shape, rank_counts=(2,), precision=precision)
    rows, ratios = found.rows, found.ratios
    assert [row["contestant"] for row in rows] == [who.name for who in data_parallel.contestants("float32")]
    assert {row["precision"] for row in rows} == {precision} == {found.more["precision"]}
    row = {(row["mode"], row["contestant"]): row for row in rows}
    for mode, ratio, rival in [
        ("ddp", "ddp.vs_torch", "torch DDP, fp32 weights"),
        ("zero1", "zero1.vs_torch", "torch ZeroRedundancyOptimizer"),
        ("zero2", "zero2.vs_fsdp2", "torch FSDP2, kept"),
        ("zero3", "zero3.vs_fsdp2", "torch FSDP2"),
    ]:
        speeds = [row[mode, name]["tokens_per_second"] for name in ("optimus", rival)]
        assert ratios[ratio] == pytest.approx(speeds[0] / speeds[1])
    # All contestants take three steps on one batch from the same weights, so different training gives a different loss.
    assert all(one["loss"] == pytest.approx(rows[0]["loss"], rel=same) for one in rows)
    assert rows[0]["loss"] < 8.0  # log(4096) = 8.3 is the initial loss on random tokens
    # In an all-reduce of two ranks, each rank sends as many bytes as the buffer holds. The counter may include other
    # programs' traffic.
    assert row["ddp", "optimus"]["sent_mib"] > 0.99 * 4 * PARAMETERS / 2**20
    assert row["ddp", "torch DDP, fp32 weights"]["sent_mib"] > 0.99 * 4 * PARAMETERS / 2**20
    # ZeRO-1 saves each of two ranks half of the moments (8 bytes per parameter) and, in bf16, half of the master
    # weights (4).
    spared = row["ddp", "optimus"]["peak_mib"] - row["zero1", "optimus"]["peak_mib"]
    assert spared == pytest.approx((4 if precision == "float32" else 6) * PARAMETERS / 2**20, rel=0.4)


def test_who_knows_bf16_alone_is_left_out_and_named() -> None:
    who, left_out = data_parallel.competing("bfloat16", "float32")
    assert left_out == ["torch DDP, bf16 weights"]
    assert {*left_out} | {each.name for each in who} == {each.name for each in data_parallel.contestants("bfloat16")}
    assert not {*left_out} & {each.name for each in who}
    assert data_parallel.competing("bfloat16", "bfloat16")[1] == data_parallel.competing("float32", "float32")[1] == []


def computed(precision: str, gradients: str) -> list[tuple[str, set[str]]]:
    """Returns, on one rank, each contestant's name and the types of the matrix products of its training step."""
    found = []
    for who in data_parallel.contestants(gradients):  # type: ignore[arg-type]
        if who.only in (None, precision):
            sections = data_parallel.sections(who.mode, 1, gradients)  # type: ignore[arg-type]
            step = who.make(configuration(TINY, 1, 16, precision=precision, **sections))
            with Products() as products:
                step(torch.zeros(1, 16, dtype=torch.int64))
            found.append((who.name, products.types))
    return found


@pytest.mark.swept
@pytest.mark.parametrize("gradients", ["float32", "bfloat16"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_all_compute_in_the_same_type(precision: str, gradients: str) -> None:
    for name, types in run_fresh(computed, 1, precision, gradients)[0]:
        assert types == {precision}, name


@pytest.mark.in_turn(4, 5)
def test_ddp_with_bf16_weights_trains_alike() -> None:
    losses = []
    for who in data_parallel.contestants("bfloat16"):
        if who.mode == "ddp":
            sections = data_parallel.sections(who.mode, 2, "bfloat16")
            config = configuration("mula-tiny", 2, 16, micro_batch=1, precision="bfloat16", **sections)
            losses.append([seen.loss for seen in run_fresh(turn, 2, who.make, config, 1, data_parallel.WARM_UP)])
    ours, theirs = (sum(both) for both in losses)
    assert ours == pytest.approx(theirs, rel=1e-3)


def test_ratios_are_those_of_the_worst_number_of_ranks_against_the_best_rival() -> None:
    def row(ranks: int, side: str, speed: float) -> dict[str, object]:
        return {"mode": "zero2", "ranks": ranks, "side": side, "tokens_per_second": speed}

    two = data_parallel.compare([row(2, "optimus", 30.0), row(2, "fsdp2", 10.0), row(2, "fsdp2", 20.0)])
    four = data_parallel.compare([row(4, "optimus", 50.0), row(4, "fsdp2", 40.0), row(4, "deepspeed", 100.0)])
    assert [one["optimus_over_it"] for one in two] == [1.0, 3.0, 1.5]
    assert data_parallel.ratios(two + four) == {"zero2.vs_fsdp2": 1.25, "zero2.vs_deepspeed": 0.5}


def test_fresh_ranks_are_processes_of_one_group() -> None:
    assert run_fresh(_who, 3) == [(0, 3), (1, 3), (2, 3)]


def _who() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def test_a_rank_that_fails_is_heard() -> None:
    with pytest.raises(ProcessRaisedException, match=r"rank \d says no"):
        run_fresh(_fail, 2)


def _fail() -> None:
    raise ValueError(f"rank {dist.get_rank()} says no")
