"""The time, the memory and the expert load that a run writes every `observe.log_every` steps."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import optimus
from optimus.comm.recorder import Recorder
from optimus.config import load_config
from optimus.model.moe.router import Router
from optimus.observe.metrics import read_metrics
from optimus.training.accounting import memory_by_kind, seconds_by_kind
from optimus.training.build import build_run
from optimus.training.record import StepClock


def loads(run: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run["train"]["output"]) / "experts.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("recompute", [[], ["moe"]])
def test_the_load_is_that_of_the_routers(
    small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch, recompute: list[str]
) -> None:
    """Each written step has the load of every layer, and a resumed run cuts the file at its first step."""
    seen: list[torch.Tensor] = []
    forward = Router.forward

    def spied(self: Router, *args: Any) -> Any:
        found = forward(self, *args)
        seen.append(torch.bincount(found[1].flatten(), minlength=len(self.weight)))
        return found

    small_run["observe"] |= {"log_every": 3}
    small_run["recompute"] = recompute
    small_run["checkpoint"] = {"every": 3}
    small_run["train"]["stop_at"] = 3
    optimus.train(small_run)
    with (Path(small_run["train"]["output"]) / "experts.jsonl").open("a") as file:
        file.write('{"step": 4, "load": {}}\n{"st')
    small_run["train"]["stop_at"] = None
    monkeypatch.setattr(Router, "forward", spied)
    optimus.train(small_run, resume=True)
    records = loads(small_run)
    assert [each["step"] for each in records] == [3, 6]
    model, train = small_run["model"], small_run["train"]
    layers, microbatches = model["layers"], train["global_batch"] // train["micro_batch"]
    of_step = seen[-layers * microbatches * (2 if recompute else 1) :]
    total = torch.stack(of_step).sum(0).float()
    written = torch.tensor([records[-1]["load"][str(layer)] for layer in range(layers)])
    assert written.mean(0).tolist() == pytest.approx((total / total.mean()).tolist(), abs=1e-3)
    last = read_metrics(Path(train["output"]))[-1]
    assert last["experts/worst_imbalance"] == pytest.approx(float(written.max()), abs=1e-3)
    assert "experts/imbalance" not in read_metrics(Path(train["output"]))[-2]


@pytest.mark.in_turn(1, 4)
@pytest.mark.usefixtures("warm_ranks")
def test_uniform_routing_is_balanced_over_ranks_and_stages(small_run: dict[str, Any]) -> None:
    """The load includes every rank's tokens and every stage's layers; parts of the time add up to the step."""
    small_run["observe"] |= {"log_every": 2}
    small_run["moe"] = {"force_balanced": True}
    small_run["parallel"] = {"pipeline": 2}
    small_run["train"]["stop_at"] = 4
    optimus.train(small_run, ranks=2)
    for record in loads(small_run):
        assert record["load"] == {str(layer): [1.0] * small_run["model"]["experts"] for layer in range(2)}
    records = read_metrics(Path(small_run["train"]["output"]))
    assert ["memory/parameters" in each for each in records] == [False, True, False, True]
    for each in records[1::2]:
        times = {key: value for key, value in each.items() if key.startswith("time/")}
        assert {"time/computation", "time/data", "time/checkpoint", "time/exposed_message"} <= times.keys()
        assert sum(times.values()) - each["checkpoint_seconds"] == pytest.approx(each["step_seconds"], rel=1e-6)


@pytest.mark.usefixtures("warm_ranks")
def test_layouts_have_one_load(small_run: dict[str, Any], tmp_path: Path) -> None:
    small_run["observe"] |= {"log_every": 2}
    small_run["train"] |= {"stop_at": 2, "precision": "float32"}
    optimus.train(small_run)
    other = small_run | {"train": small_run["train"] | {"output": str(tmp_path / "other")}, "parallel": {"expert": 2}}
    optimus.train(other, ranks=2)
    assert loads(small_run) == loads(other)


def test_the_wait_for_the_data_of_another_rank_counts_once() -> None:
    """Ranks learn by a collective that all ranks have their data, and this collective is no exposed communication."""
    recorder = Recorder()
    clock = StepClock(recorder)
    with recorder.waits("all", "all-reduce", 1):
        time.sleep(0.05)
    clock.data_is_there()
    with recorder.waits("all", "all-gather", 2):
        time.sleep(0.02)
    time.sleep(0.1)
    times = clock.times()
    found = seconds_by_kind(times, 0.0)
    assert found.keys() == {"time/computation", "time/exposed_all-gather", "time/data", "time/checkpoint"}
    assert found["time/data"] >= 0.05
    assert found["time/computation"] >= 0.1
    assert sum(found.values()) == pytest.approx(times.total)
    assert times.waited >= 0.07  # a slow rank is one that does not wait, for whatever


@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
def test_state_on_the_host_is_no_activation_of_a_processor(small_run: dict[str, Any], offload: str) -> None:
    """The memory of a processor by kind has the same state wherever the state lies."""
    small_run["state"] = {"offload": offload}
    run = build_run(load_config(small_run), torch.device("cpu"), resume=False)
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    found = memory_by_kind(run)
    assert 8 * parameters <= found["memory/moments"] < 8.2 * parameters
    assert 4 * parameters <= found["memory/master"] < 4.2 * parameters
