"""What `auto` makes of the keys about residency, with made-up free memory and rates."""

import copy
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from optimus.comm import Groups
from optimus.config import RunConfig, load_config
from optimus.measurements import Measurements, Timing, coarse
from optimus.state.transfers import transfers
from optimus.testing import run_ranks
from optimus.train import residency, run
from optimus.train.run import _planned_chunks, layouts_of, mesh_of, recipe_of, whole_model

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
    """Of a machine with such rates."""
    seconds = {what: amount / rate for (what, amount), rate in zip(residency._AMOUNTS.items(), rates, strict=True)}
    return {what: Timing(each, each * (1 + spread)) for what, each in seconds.items()}


def decided(raw: dict[str, Any], free: int, rates: list[float] | None = None, ranks: int = 1) -> tuple[RunConfig, str]:
    """What a rank decides with so many bytes free; on an accelerator, if it is given rates."""
    config = load_config(copy.deepcopy(raw))
    groups = Groups(mesh_of(config, ranks))
    whole = whole_model(config)
    layouts, recipe = layouts_of(whole, config), recipe_of(config, whole)
    device = torch.device("meta" if rates else "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residency, "transfers", lambda device: None)
        patch.setattr(residency, "measurements_of", lambda device, cache: Measurements(cache and Path(cache) / "chip"))
        patch.setattr(residency, "_measured", lambda *given: timings(rates or ()))
        free -= groups.rank * MIB
        found, note = residency.with_residency(
            config,
            groups,
            device,
            free,
            lambda each: _planned_chunks(each, groups.mesh, [groups.rank], layouts, recipe)[0],
        )
    return found, note or ""


def test_memory_alone_decides_on_a_processor() -> None:
    """First the least cache, then state of the first chunks, then more cache; never more than there is room for."""
    before = -1.0, 0
    for free in (0, 4, 6, 8, 12, 1000):
        found, note = decided(config_of(residency="all", device_states="auto"), free * MIB)
        assert isinstance(found.state.device_states, float)
        assert isinstance(found.state.cache, int)
        assert (found.state.device_states, found.state.cache) >= before
        assert found.state.update_on == "host"
        assert f"{found.state.cache} chunks of parameters" in note
        before = found.state.device_states, found.state.cache
    assert before == (1.0, 8)  # all chunks
    assert decided(config_of(residency="all", device_states="auto"), 0)[0].state.device_states == 0


def test_rates_decide_on_an_accelerator() -> None:
    """A fast link streams updates; a slow one leaves them to the host."""
    raw, room = config_of(residency="all", device_states="auto"), 6 * MIB
    fast, note = decided(raw, room, [4e11, 4e11, 1e9, 5e10, 1e12])
    assert fast.state.update_on == "device"
    assert "link 400 GB/s" in note
    assert "times its computation" in note
    slow, _ = decided(raw, room, [4e9, 4e9, 2e9, 5e10, 1e12])
    assert slow.state.update_on == "host"
    assert decided(config_of(residency="optimizer", update_on="device"), room)[0].state.update_on == "device"


def test_what_is_given_stays() -> None:
    found, _ = decided(config_of(residency="all", device_states=0.5, cache=5), 0, [1e10, 1e10, 1e9, 5e10, 1e12])
    assert (found.state.device_states, found.state.cache) == (0.5, 5)
    found, _ = decided(config_of(residency="disk"), 0)
    assert found.state.disk == "run"
    assert decided(config_of(), 0)[1] == ""


def _on_ranks(raw: dict[str, Any], free: int) -> list[Any]:
    ranks = torch.distributed.get_world_size()
    state = decided(raw, free, [2e10, 2e10, 1e9, 5e10, 1e12], ranks)[0].state
    return [state.device_states, state.cache, state.update_on]


def test_ranks_agree() -> None:
    """On the least that any of them has room for, with other chunks in each stage."""
    raw = config_of(residency="all", device_states="auto", shard="optimizer") | {"parallel": {"pipeline": 2}}
    first, *others = run_ranks(_on_ranks, 4, raw, 7 * MIB)
    assert all(other == first for other in others)


def test_what_is_measured_are_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the link both ways, updates on host and device, and products; here of a device that is the host."""
    monkeypatch.setattr(residency, "_SQUARE", 256)
    monkeypatch.setattr(residency, "_MEASURED", 1 << 16)
    found = residency._measured(transfers(torch.device("cpu")), torch.float32)
    assert found.keys() == residency._AMOUNTS.keys()
    assert all(0 < timing.best <= timing.usual < float("inf") for timing in found.values())


FAST, SLOW = [4e11, 4e11, 1e9, 5e10, 1e12], [4e9, 4e9, 2e9, 5e10, 1e12]


def test_what_is_not_clear_is_left_as_it_is_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The place of the update; and as much state as there is room for, which needs no link."""
    raw, room = config_of(residency="all", device_states="auto"), 6 * MIB
    assert decided(raw, room, SLOW)[0].state.update_on == "host"
    made = timings
    monkeypatch.setitem(globals(), "timings", lambda rates: made(rates, spread=20.0))
    found, note = decided(raw, room, SLOW)
    assert found.state.update_on == "device"
    assert "within 2000%" in note


def test_all_runs_decide_the_same_by_what_the_first_has_measured(tmp_path: Path) -> None:
    """Which was as noisy as the others: each finds rates of another machine."""
    raw, draw = config_of(residency="all", device_states="auto"), random.Random(0)
    without = {decided(raw, 6 * MIB, [rate * draw.uniform(0.02, 1) for rate in FAST])[1] for _ in range(10)}
    assert len(without) == 10
    raw["tuning"] = {"cache": str(tmp_path)}
    found = [decided(raw, 6 * MIB, [rate * draw.uniform(0.02, 1) for rate in FAST])[1] for _ in range(10)]
    assert len(set(found)) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_measurements_of_other_things_are_of_no_use(tmp_path: Path) -> None:
    raw = config_of(residency="all", device_states="auto")
    raw["tuning"] = {"cache": str(tmp_path)}
    first = decided(raw, 6 * MIB, SLOW)
    kept = json.loads((tmp_path / "chip").read_text())
    (each,) = kept["seconds"].values()
    del each["product"]
    (tmp_path / "chip").write_text(json.dumps(kept))
    assert decided(raw, 6 * MIB, SLOW) == first


def _counted(raw: dict[str, Any], free: list[int]) -> tuple[int, list[str]]:
    """What a rank counts on, whose device has other memory free than those of the others."""
    config = load_config(raw)
    groups = Groups(mesh_of(config, len(free)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "free_memory", lambda device: free[groups.rank])
        return run._memory_to_count_on(config, groups, torch.device("cpu"))


def test_ranks_count_on_the_same_memory_and_so_does_the_next_run(tmp_path: Path) -> None:
    """That of the fullest node, as it was when it was a little fuller; an even part of it on a processor."""
    raw = config_of(residency="optimizer", device_states="auto")
    raw["tuning"] = {"cache": str(tmp_path)}
    (first, said), *others = run_ranks(_counted, 3, raw, [2_000, 1_000, 3_000])
    assert first == coarse(1_000) // 3
    assert [each for each, _ in others] == [first] * 2
    assert said[0].startswith("memory: ")
    assert coarse(1_000) < coarse(1_050)
    assert run_ranks(_counted, 3, raw, [1_050, 1_100, 3_000])[2][0] == first
    assert _counted(config_of(), [1_000]) == (0, [])  # nothing depends on it
