"""Training on the phantom gives the CPU's numbers, and mistakes in the order of copies and updates are found."""

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from helpers.equality import Layout, Trained, assert_same_as_one_process, compare, train_steps
from helpers.phantom import on_phantom
from helpers.sweep import in_turns
from optimus.comm import DONE
from optimus.kernels import attention
from optimus.state.transfers import StreamTransfers
from optimus.testing.ranks import RankError

STEPS = 3
SIZES = {"hidden": 64, "layers": 2, "heads": 2, "intermediate": 64, "vocab": 320}
DENSE = {"family": "llama", **SIZES}
EXPERTS = {"family": "olmoe", **SIZES, "experts": 4, "experts_per_token": 2}
MUON = {"optimizer": {"name": "muon"}}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": (DENSE, {}),
    "ZeRO-3": (DENSE, {"state": {"shard": "parameters"}}),
    "experts": (EXPERTS, {}),
    "recomputed": (EXPERTS, {"recompute": ["block"]}),
    "bfloat16": (DENSE, {"train": {"precision": "bfloat16"}}),
    "Muon": (DENSE, MUON),
    "Muon on the host": (DENSE, MUON | {"state": {"offload": "all", "update_on": "device", "cache": 2}}),
    "on disk": (DENSE, {"state": {"offload": "disk", "update_on": "host", "cache": 2, "disk": "."}}),
    "from disk to device": (DENSE, {"state": {"offload": "disk", "update_on": "device", "cache": 2, "disk": "."}}),
    "optimizer on the host": (DENSE, {"state": {"offload": "optimizer", "update_on": "host"}}),
    "all on the host": (EXPERTS, {"state": {"offload": "all", "update_on": "device", "cache": 2}}),
    "gradients added up there": (
        EXPERTS,
        {"state": {"offload": "all", "update_on": "host", "cache": 2, "accumulate_on": "host"}},
    ),
}


def configured(layout: str) -> dict[str, Any]:
    model, more = LAYOUTS[layout]
    train = {
        "output": "none",
        "steps": 10,
        "global_batch": 4,
        "micro_batch": 2,
        "sequence_length": 32,
        "precision": "float32",
    }
    return {
        "model": model,
        "data": {"path": "random"},
        "lr_schedule": {"lr": 3e-3, "min_lr": 3e-4, "warmup_steps": 2},
        **more,
        # A smaller eps would enlarge gradients that are hardly more than rounding errors.
        "optimizer": {"eps": 3e-5} | more.get("optimizer", {}),
        "train": train | more.get("train", {}),
    }


@pytest.mark.parametrize("layout", in_turns([*LAYOUTS], 4, always=2))
def test_the_numbers_of_the_cpu(layout: str) -> None:
    config = configured(layout)
    rtol = 1e-5 if config["train"]["precision"] == "float32" else 3e-2  # bf16 rounds the result of every operation
    assert_same_as_one_process(config, [Layout(1)], STEPS, rtol=rtol, device="phantom")


def with_shared_keys(config: dict[str, Any]) -> tuple[Trained, int]:
    """Trains with flash attention; returns the calls of torch's attention whose heads share keys without repetition."""
    attend, shared = torch.nn.functional.scaled_dot_product_attention, []

    def noted(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        assert (q.shape[1] != k.shape[1]) == options.get("enable_gqa", False)
        shared.append(q.shape[1] != k.shape[1])
        return attend(q, k, v, **options)

    with (
        mock.patch.object(attention, "flash_fits", return_value=True),
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", noted),
    ):
        return train_steps(config, 2, device="phantom"), sum(shared)


@pytest.mark.parametrize("family", in_turns(["llama", "qwen3", "mistral"], 2, always=1))
def test_heads_that_share_keys(family: str) -> None:
    """Torch's operator for dense grouped-query attention gives the numbers of the CPU's own path."""
    config = configured("dense") | {"model": SIZES | {"family": family, "heads": 4, "kv_heads": 2}}
    ((found, shared),) = on_phantom(with_shared_keys, 1, config)
    assert shared == 2 * 2 * 2  # steps, microbatches, layers
    compare(found, train_steps(config, 2), family, 1e-5)


SHARED = [
    Layout(2, ["parallel.tensor=2", "parallel.sequence=true", "state.shard=parameters", "train.micro_batch=2"]),
    Layout(4, ["parallel.tensor=[2,2]", "parallel.expert=2", "train.micro_batch=2"]),
    Layout(4, ["parallel.context=2", "parallel.context_method=ring", "state.shard=gradients"], per_node=2),
    Layout(2, ["parallel.context=2", "parallel.context_method=ulysses", "train.micro_batch=2"]),
    Layout(4, ["parallel.expert=4", "moe.dispatch=alltoall", "state.shard=optimizer"], per_node=2),
    Layout(2, ["parallel.expert=2", "moe.dispatch=allgather", "recompute=[block]"]),
    Layout(2, ["parallel.pipeline=2", "parallel.schedule=1f1b", "parallel.vocabulary=true"]),
    Layout(2, ["parallel.pipeline=2", "parallel.schedule=zb-h1"]),
    Layout(4, ["parallel.pipeline=2", "parallel.executor=message-driven"]),
    Layout(2, ["state.shard=parameters", "state.offload=all", "state.update_on=device", "state.cache=2"]),
    Layout(2, ["state.offload=all", "state.update_on=device", "state.cache=2", "state.accumulate_on=host"]),
]


@pytest.mark.parametrize("layout", in_turns(SHARED, 3, always=2), ids=lambda layout: ",".join(layout.overrides))
def test_ranks_that_share_a_device(layout: Layout) -> None:
    config = configured("experts")
    config["train"]["micro_batch"] = 1
    assert_same_as_one_process(config, [layout], 2, rtol=5e-5, device="phantom")


def planted(layout: str, name: str) -> None:
    """Trains with `StreamTransfers` that lacks one of its waits."""
    with mock.patch.object(StreamTransfers, name, PLANTED[name]):
        train_steps(configured(layout), STEPS, device="phantom")


def staged_without_waiting(self: StreamTransfers, name: object, part: Tensor, on: str, *, filled: bool) -> Tensor:
    scratch = self._held((name, self._tile.number), part, on)
    return scratch.copy_(part, non_blocking=True) if filled else scratch


PLANTED: dict[str, Any] = {
    "in_order": lambda self: nullcontext(),
    "_behind": lambda self, done: DONE,
    "staged": staged_without_waiting,
}


@pytest.mark.parametrize(
    ("layout", "name", "message"),
    in_turns(
        [
            (
                "dense",
                "in_order",
                "FaultError: (.*\n)*race: _fused_adamw_ on stream",
            ),  # an update during the backward pass
            ("all on the host", "_behind", "FaultError: (.*\n)*race: copy to the device on stream"),
            ("all on the host", "_behind", "FaultError: (.*\n)*use after release: copy to the host on stream"),
            ("optimizer on the host", "staged", "killed by SIGSEGV"),  # an update of a tensor that has not arrived
        ],
        2,
        always=2,
    ),
)
def test_planted_mistakes_are_found(layout: str, name: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        on_phantom(planted, 1, layout, name)
