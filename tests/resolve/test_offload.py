"""Values that `auto` takes for the keys of offloading, given free memory and rates."""

import copy
import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.planned import resolved
from optimus.comm import Groups
from optimus.config import RunConfig, load_config
from optimus.errors import UserError
from optimus.measurements import Measurements, Timing, coarse
from optimus.observe.machine import Bfloat16
from optimus.resolve import facts, offload
from optimus.resolve.facts import AMOUNTS, Facts, measure_facts
from optimus.resolve.memory import memory
from optimus.resolve.ranks import mesh_of
from optimus.resolve.resolve import resolve
from optimus.resolve.run import ResolvedRun, RunInputs
from optimus.state.transfers import transfers
from optimus.testing import run_ranks

MIB = 2**20


def config_of(**state: Any) -> dict[str, Any]:
    model = {"family": "olmo", "hidden": 64, "layers": 8, "heads": 2, "intermediate": 128, "vocab": 128}
    train = {"output": "run", "steps": 1, "global_batch": 8, "micro_batch": 2, "sequence_length": 32}
    return {
        "model": model,
        "data": {"path": "data"},
        "train": {**train, "precision": "bfloat16"},
        "state": {"chunk": 50_000, "gradient_dtype": "bfloat16", **state},
        "tuning": {"cache": None},
    }


def timings(rates: Sequence[float], spread: float = 0.0) -> dict[str, Timing]:
    """Returns the timings of a machine with such rates."""
    seconds = {what: amount / rate for (what, amount), rate in zip(AMOUNTS.items(), rates, strict=True)}
    return {what: Timing(each, each * (1 + spread)) for what, each in seconds.items()}


def decided(
    raw: dict[str, Any], free: int, rates: list[float] | None = None, spread: float = 0.0
) -> tuple[RunConfig, str]:
    """Returns the decided configuration and the reasons, with `free` bytes. Rates make the device an accelerator."""
    run = resolved(
        load_config(copy.deepcopy(raw)),
        device="accelerator" if rates else "cpu",
        device_bytes=free,
        timings=timings(rates, spread) if rates else None,
    )
    return run.config, "; ".join(str(each) for each in run.decisions if each.key.startswith("state."))


def test_memory_alone_decides_on_a_processor() -> None:
    """A processor decides by memory: first the smallest cache, then state of the first chunks, then more cache, as
    fits."""
    before = -1.0, 0
    for free in (0, 4, 6, 8, 12, 1000):
        found, note = decided(config_of(offload="all", resident_fraction="auto"), free * MIB)
        assert isinstance(found.state.resident_fraction, float)
        assert isinstance(found.state.cache, int)
        assert (found.state.resident_fraction, found.state.cache) >= before
        assert found.state.update_on == "host"
        assert f"state.cache: {found.state.cache} (as much as fits into memory)" in note
        before = found.state.resident_fraction, found.state.cache
    assert before == (1.0, 8)  # all chunks
    assert decided(config_of(offload="all", resident_fraction="auto"), 0)[0].state.resident_fraction == 0


def test_a_processors_memory_is_the_hosts() -> None:
    """State on the host takes the memory of the processor too, so offloading frees no memory for other decisions."""
    fitted = 0
    for free in range(1, 12):
        here = Facts(1, 1, "cpu", Bfloat16(False, "made up"), free * MIB)
        for state in (
            {"offload": "optimizer", "resident_fraction": 0.0},
            {"offload": "all", "resident_fraction": "auto"},
        ):
            try:
                run = resolve(load_config(config_of(**state) | {"recompute": ["auto"]}), here, RunInputs())
            except UserError:
                continue
            assert memory(run, 0).taken(here) <= here.device_bytes
            fitted += 1
    assert fitted > 5


def test_copies_for_checkpoints_take_a_processors_memory() -> None:
    run = resolved(load_config(config_of() | {"checkpoint": {"asynchronous": True}}), device="cpu")
    found = memory(run, 0)
    assert found.copies > 0
    assert found.taken(run.facts) == found.total + found.copies
    assert found.taken(replace(run.facts, device="cuda")) == found.total


def test_rates_decide_on_an_accelerator() -> None:
    """A fast link streams updates to the device; a slow link leaves updates to the host."""
    raw, room = config_of(offload="all", resident_fraction="auto"), 6 * MIB
    fast, note = decided(raw, room, [4e11, 4e11, 1e9, 5e10, 1e12])
    assert fast.state.update_on == "device"
    assert "link 400 GB/s" in note
    assert "updates 28.6 G elements/s" in note  # 14 bytes each way: master, moments, and a gradient or a parameter
    assert "times its computation" in note
    by_device, note = decided(raw, room, [4e12, 4e12, 1e9, 5e10, 1e12])
    assert by_device.state.update_on == "device"
    assert "updates 50 G elements/s" in note  # the rate of the device
    slow, _ = decided(raw, room, [4e9, 4e9, 2e9, 5e10, 1e12])
    assert slow.state.update_on == "host"
    assert decided(config_of(offload="optimizer", update_on="device"), room)[0].state.update_on == "device"


def test_recomputation_takes_the_time_of_what_it_computes() -> None:
    """The predicted backward pass recomputes the chosen modules only."""

    def passes(**options: Any) -> float:
        run = resolved(load_config(config_of(offload="all") | options), device="accelerator")
        plans = run.chunk_plans(0)
        shape = offload._shape(run, plans, offload._device_memory(run, 0, plans, plans), 1e12)
        return shape.backward / shape.forward

    every = [passes(recompute=kinds) for kinds in ([], ["norm"], ["attention"], ["mlp", "attention"], ["block"])]
    assert every == sorted({*every})
    assert every[0] == 2
    assert every[-1] == pytest.approx(3, abs=0.2)
    less, more = (passes(recompute=["mlp"], recompute_every=each) - 2 for each in (4, 1))
    assert 4 * less == pytest.approx(more)


def test_where_gradients_are_added_up() -> None:
    """Gradients accumulate on the device if gradients of all chunks fit beside the minimum; otherwise a note says so."""
    rates = [2e10, 2e10, 1e9, 5e10, 1e12]

    def chosen(raw: dict[str, Any], free: int, speeds: list[float] | None = rates) -> tuple[str, str]:
        found, note = decided(raw, free * MIB, speeds)
        return found.state.accumulate_on, note

    raw, said = config_of(offload="all"), "no room for the gradients of several microbatches"
    assert said in chosen(raw, 0)[1]
    by_room = [chosen(raw, free)[0] for free in range(12)]
    assert by_room == sorted(by_room, reverse=True)  # the host, then the device
    assert {*by_room} == {"device", "host"}
    least = by_room.index("device")
    # Whole gradients of bf16 take more in a deeper model.
    deeper = raw | {"model": raw["model"] | {"layers": 24}}
    assert chosen(deeper, least)[0] == "host"
    assert said not in chosen(raw, least)[1]
    one = raw | {"train": raw["train"] | {"micro_batch": 8}}
    assert chosen(one, 0)[0] == "device"
    assert chosen(raw, 0, None)[0] == "device"  # a processor, whose memory is that of the host
    assert chosen(config_of(offload="all", accumulate_on="host"), 100)[0] == "host"
    assert chosen(config_of(offload="all", accumulate_on="device"), 0)[0] == "device"
    given = config_of(offload="all", cache=3, update_on="host")
    assert said in chosen(given, 0)[1]


def test_what_is_given_stays() -> None:
    found, _ = decided(config_of(offload="all", resident_fraction=0.5, cache=5), 0, [1e10, 1e10, 1e9, 5e10, 1e12])
    assert (found.state.resident_fraction, found.state.cache) == (0.5, 5)
    found, _ = decided(config_of(offload="disk"), 0)
    assert found.state.disk == "run"
    assert "state.resident_fraction" not in decided(config_of(), 0)[1]


@pytest.mark.parametrize("sharding", [{"offload": "all"}, {"shard": "parameters"}])
def test_a_cache_of_so_many_bytes(sharding: dict[str, str]) -> None:
    """The number of blocks is the bytes divided by the bytes of the largest chunk, whatever memory is free."""

    def found(cache: int | str) -> ResolvedRun:
        return resolved(load_config(config_of(cache=cache, **sharding)), 2, device_bytes=0)

    run = found(8)
    block = max(2 * plan.size for rank in run.stage_ranks for plan in run.chunk_plans(rank, 0.0))  # bfloat16
    for size, blocks in ((f"{block}B", 1), (f"{3 * block - 1}B", 2), (f"{3 * block}B", 3), ("1GB", 10**9 // block)):
        run = found(size)
        assert run.config.state.cache == blocks
        (why,) = (each.why for each in run.decisions if each.key == "state.cache")
        assert why.startswith(f"{size} have room for so many blocks of ")
        assert memory(run, 0).parameters_in_use == memory(found(blocks), 0).parameters_in_use
    with pytest.raises(
        UserError,
        match=rf"^state\.cache {block - 1}B: the largest chunk of parameters has .*: give at least {block}B, or",
    ):
        found(f"{block - 1}B")


@pytest.mark.parametrize("cache", ["atuo", "12", "12x", "0GB"])
def test_a_cache_that_has_no_size(cache: str) -> None:
    with pytest.raises(
        UserError, match=rf"^config: state\.cache: '{cache}' is no size: write auto, a number of chunks"
    ):
        load_config(config_of(cache=cache, offload="all"))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"chunk_sizes": [4, 8], "chunk": 3},
            "chunk_sizes is the range of the search for a chunk size, but chunk is given",
        ),
        ({"chunk_sizes": [8, 4], "chunk": None}, "the smallest size 8 is larger than the largest 4: swap them"),
        (
            {"unsharded_below": 3},
            "unsharded_below applies to sharded or offloaded state, but shard and offload are none",
        ),
        ({"pin_memory": False}, "pin_memory does not apply to offload: none: change offload, or remove pin_memory"),
    ],
)
def test_options_without_a_use(state: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        load_config(config_of(**state))


def test_a_fraction_that_no_chunk_fits_is_none() -> None:
    """A tenth of the elements is less than one of eight chunks."""
    for free in range(12):
        tenth, none = (decided(config_of(offload="all", resident_fraction=each), free * MIB)[0] for each in (0.1, 0.0))
        assert tenth.state.cache == none.state.cache


def test_the_rank_that_has_least_decides() -> None:
    """The fullest stage decides if stages have unequal numbers of blocks, as if all stages were as full."""
    raw = config_of(offload="all", resident_fraction="auto", shard="optimizer")

    def share(blocks: list[int]) -> Any:
        run = resolved(
            load_config(raw | {"parallel": {"pipeline": 2, "layers_per_stage": blocks}}),
            4,
            device="accelerator",
            device_bytes=5 * MIB,
            timings=timings([2e10, 2e10, 1e9, 5e10, 1e12]),
        )
        return run.config.state.resident_fraction

    even, first, last = share([4, 4]), share([7, 1]), share([1, 7])
    assert 0 <= first < even
    assert 0 <= last < even


def test_what_is_measured_are_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured rates are those of both directions of the link, updates on host and device, and products.

    The device here is the host.
    """
    monkeypatch.setattr(facts, "_SQUARE", 256)
    monkeypatch.setattr(facts, "_ELEMENTS", 1 << 16)
    found = facts._measured(transfers(torch.device("cpu")), torch.float32)
    assert found.keys() == AMOUNTS.keys()
    assert all(0 < timing.best <= timing.usual < float("inf") for timing in found.values())


FAST, SLOW = [4e11, 4e11, 1e9, 5e10, 1e12], [4e9, 4e9, 2e9, 5e10, 1e12]


def test_what_is_not_clear_is_left_as_it_is_by_default() -> None:
    """Noisy rates leave the place of the update at its default; the fraction of resident state needs no rate."""
    raw, room = config_of(offload="all", resident_fraction="auto"), 6 * MIB
    assert decided(raw, room, SLOW)[0].state.update_on == "host"
    found, note = decided(raw, room, SLOW, spread=20.0)
    assert found.state.update_on == "device"
    assert "spread 2000%" in note


def measured(raw: dict[str, Any], free: int, rates: list[float]) -> Facts:
    """Returns the facts of a rank on an accelerator with `free` bytes and such rates."""
    config = load_config(copy.deepcopy(raw))
    groups = Groups(mesh_of(config, dist.get_world_size() if dist.is_initialized() else 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts, "transfers", lambda device, *, pinned: None)
        patch.setattr(facts, "free_memory", lambda device: free)
        patch.setattr(facts, "bfloat16_of", lambda device: Bfloat16(True, "made up"))
        patch.setattr(facts, "measurements_of", lambda device, cache: Measurements(cache and Path(cache) / "chip"))
        patch.setattr(facts, "_measured", lambda *given: timings(rates))
        return measure_facts(config, torch.device("meta"), groups.mesh, previous={}, world=groups.world)


def test_all_runs_find_what_the_first_has_measured(tmp_path: Path) -> None:
    """Noisy measurements differ from run to run; later runs read the cached one of the first."""
    raw, draw = config_of(offload="all", resident_fraction="auto"), random.Random(0)

    def rates() -> list[float]:
        return [rate * draw.uniform(0.02, 1) for rate in FAST]

    assert len({str(measured(raw, 6 * MIB, rates())) for _ in range(10)}) == 10
    raw["tuning"] = {"cache": str(tmp_path)}
    assert len({str(measured(raw, 6 * MIB, rates())) for _ in range(10)}) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_measurements_of_other_things_are_of_no_use(tmp_path: Path) -> None:
    raw = config_of(offload="all", resident_fraction="auto")
    raw["tuning"] = {"cache": str(tmp_path)}
    first = measured(raw, 6 * MIB, SLOW)
    kept = json.loads((tmp_path / "chip").read_text())
    (each,) = kept["seconds"].values()
    del each["product"]
    (tmp_path / "chip").write_text(json.dumps(kept))
    assert measured(raw, 6 * MIB, SLOW) == first


def test_only_what_is_open_is_measured() -> None:
    closed = measured(config_of(), 6 * MIB, SLOW)
    assert (closed.device_bytes, closed.timings, closed.notes) == (0, None, ())
    given = config_of(offload="all", resident_fraction=0.5, cache=5, update_on="host", accumulate_on="device")
    assert measured(given, 6 * MIB, SLOW).timings is None
    assert measured(given | {"recompute": ["auto"]}, 6 * MIB, SLOW).device_bytes == coarse(6 * MIB)


def _by_rank(raw: dict[str, Any], free: list[int]) -> Facts:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return measured(raw, free[rank], [rate / (1 + rank) for rate in FAST])


def test_ranks_find_the_same_and_so_does_the_next_run(tmp_path: Path) -> None:
    """The fullest rank's memory, rounded down, and the slowest rank's rates hold for all ranks and for the next run."""
    raw = config_of(offload="optimizer", resident_fraction="auto")
    raw["tuning"] = {"cache": str(tmp_path)}
    first, *others = run_ranks(_by_rank, 3, raw, [2_000, 1_000, 3_000])
    assert others == [first] * 2
    assert first.device_bytes == coarse(1_000) // 3  # Gloo's ranks share one device
    assert first.notes[0].startswith("memory: ")
    assert first.timings is not None
    assert first.timings["up"].best == pytest.approx(3 * timings(FAST)["up"].best)
    assert coarse(1_000) < coarse(1_050)
    assert run_ranks(_by_rank, 3, raw, [1_050, 1_100, 3_000])[2].device_bytes == first.device_bytes


def test_a_stage_whose_chunks_are_all_in_the_cache_limits_no_other() -> None:
    raw = config_of(offload="all", shard="optimizer", chunk=1_000_000) | {
        "parallel": {"pipeline": 4, "layers_per_stage": [1, 1, 1, 5]}
    }
    raw["model"]["vocab"] = 30_000
    run = resolved(load_config(raw), 4, device_bytes=2**40)
    chunks = [len(run.chunk_plans(rank)) for rank in run.stage_ranks]
    assert min(chunks) == 1 < max(chunks)
    assert run.config.state.cache == max(chunks)
