"""Router biases balance experts without a loss: they follow the global batch and are kept with the weights."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import optimus
from helpers.drawing import config_of
from helpers.equality import Layout, assert_same_as_one_process, train_steps
from helpers.sweep import in_turns
from optimus.config import load_config
from optimus.config.tree import MoeConfig
from optimus.model.moe.router import Router
from optimus.testing.steps import Steps
from optimus.training.step import accumulate_gradients

MODEL: dict[str, Any] = {
    "family": "deepseek_v3",
    "hidden": 16,
    "layers": 3,
    "heads": 4,
    "head_size": 6,
    "intermediate": 24,
    "vocab": 59,
    "latent": {"keys": 8, "rotary": 4, "value": 6},
    "dense_layers": 1,
    "experts": 8,
    "experts_per_token": 2,
    "expert_intermediate": 12,
    "shared_experts": 1,
    "expert_groups": 2,
}
MOE = {"bias_rate": 0.02, "balance_coefficient": 0.0, "z_coefficient": 0.0}
RATE = MOE["bias_rate"]


def config(**sections: dict[str, Any]) -> dict[str, Any]:
    made = config_of("dense")
    made["train"]["global_batch"] = 8
    return made | {"model": MODEL, "moe": MOE} | sections


def routers(steps: Steps) -> list[Router]:
    return [module for module in steps.model.modules() if isinstance(module, Router)]


def biases(path: str | Path) -> torch.Tensor:
    model = optimus.load_model(path)
    return torch.stack([buffer for _, buffer in model.named_buffers()])


@pytest.mark.parametrize("again", [[], ["moe"], ["block"]])
def test_a_bias_moves_towards_the_mean(again: list[str]) -> None:
    """A bias follows the choices of all microbatches, which hooks count here; recomputation and validation add nothing."""
    steps = Steps(config() | {"recompute": again})
    before = [torch.zeros(8) for _ in routers(steps)]
    for _ in range(3):
        counts = [torch.zeros(8) for _ in routers(steps)]

        def count(router: torch.nn.Module, _: object, output: Any, counts: list[torch.Tensor] = counts) -> None:
            counts[routers(steps).index(router)] += output[2].counts_E

        hooks = [router.register_forward_hook(count) for router in routers(steps)]
        steps.train()
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            # Would count for a few experts if evaluation counted
            steps.model.model(torch.zeros(1, 24, dtype=torch.int64))
        for router, counts_E, then in zip(routers(steps), counts, before, strict=True):
            assert router.bias is not None
            torch.testing.assert_close(router.bias, then + RATE * (counts_E.mean() - counts_E).sign())
            then.copy_(router.bias)
    assert min(bias.abs().max() for bias in before) >= RATE


def test_what_a_dry_run_has_chosen_is_forgotten() -> None:
    """Choices of a dry run, which each start makes to measure its memory, do not move a bias."""
    plain, after = Steps(config()), Steps(config())
    for _ in range(8):
        tokens_BS = torch.zeros(1, 24, dtype=torch.int64)
        after.state.clear_gradients()
        accumulate_gradients(after.model, after.state, tokens_BS, after.config)
    plain.train()
    after.train()
    for one, other in zip(routers(plain), routers(after), strict=True):
        assert one.bias is not None
        assert other.bias is not None
        assert torch.equal(one.bias, other.bias)


def test_a_step_that_is_left_out_moves_no_bias() -> None:
    steps = Steps(config())
    steps.model.model.final_norm.weight.data.fill_(torch.nan)
    assert steps.train().skipped
    steps.model.model.final_norm.weight.data.fill_(1.0)
    assert not any(router.bias.any() for router in routers(steps))  # type: ignore[union-attr]
    right = Steps(config())
    right.done = 1
    assert not steps.train().skipped
    assert not right.train().skipped
    for router, other in zip(routers(steps), routers(right), strict=True):
        torch.testing.assert_close(router.bias, other.bias)  # the second step's choices alone


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    in_turns(
        [
            (
                2,
                [
                    "parallel.tensor=2",
                    "parallel.expert_tensor=2",
                    "parallel.sequence=false",
                    "moe.drop_duplicates=false",
                ],
            ),
            (4, ["parallel.tensor=[2,2]", "parallel.expert=2", "parallel.expert_tensor=2", "recompute=[moe]"]),
            (4, ["parallel.expert=2", "moe.dispatch=allgather", "moe.balance_scope=global", "state.shard=parameters"]),
            (4, ["parallel.pipeline=2", "parallel.context=2", "parallel.executor=message-driven", "recompute=[block]"]),
            (
                3,
                [
                    "parallel.pipeline=3",
                    "parallel.schedule=1f1b",
                    "parallel.layers_per_stage=[1,1,1]",
                    "recompute=[mlp,moe]",
                ],
            ),
        ],
        3,
        always=1,
    ),
)
def test_layouts(ranks: int, overrides: list[str]) -> None:
    """The comparison includes biases, whose steps do not depend on rounding."""
    assert_same_as_one_process(config(), [Layout(ranks, overrides)], 3, rtol=2e-5)
    assert any(key.endswith("router.bias") for key in train_steps(config(), 1).tensors)


@pytest.mark.in_turn(2, 3)
@pytest.mark.usefixtures("warm_ranks")
def test_runs_go_on_with_their_biases(prepared: Path, tmp_path: Path) -> None:
    """Biases stay fp32 in a bf16 run, on two stages, then on two sharded ranks, and through an exported folder."""
    rate = 1e-5  # less than the distances of scores: no step reverses another
    base: dict[str, Any] = config(
        moe=MOE | {"bias_rate": rate}, model=MODEL | {"vocab": 320}, data={"path": str(prepared)}
    ) | {
        "train": {"steps": 4, "global_batch": 4, "micro_batch": 2, "sequence_length": 32, "precision": "bfloat16"},
        "checkpoint": {"every": 2, "asynchronous": True},
        "observe": {"tensorboard": False},
    }
    base["train"]["output"] = str(tmp_path / "run")
    optimus.train(base, ["train.stop_at=2", "parallel.pipeline=2", "parallel.schedule=1f1b"], ranks=2)
    found = biases(tmp_path / "run")
    assert found.dtype == torch.float32
    assert found.abs().max() == pytest.approx(2 * rate)
    second = copy.deepcopy(base)
    optimus.train(second, ["train.stop_at=3", "state.shard=parameters", "checkpoint.every=1"], ranks=2, resume=True)
    moved = biases(tmp_path / "run") - found
    assert set((moved / rate).round(decimals=3).abs().unique().tolist()) <= {0.0, 1.0}
    assert moved.any()
    optimus.export(tmp_path / "run", tmp_path / "folder", dtype="bfloat16")
    optimus.import_folder(tmp_path / "folder", tmp_path / "imported")
    assert torch.equal(biases(tmp_path / "imported"), found + moved)
    third = base | {"model": str(tmp_path / "folder")}
    third["train"] = base["train"] | {"output": str(tmp_path / "third"), "steps": 1}
    optimus.train(third, ["checkpoint.every=1"])
    assert set(((biases(tmp_path / "third") - found - moved) / rate).round(decimals=3).abs().unique().tolist()) <= {
        0,
        1,
    }


def test_a_rate_without_biases_is_refused() -> None:
    assert MoeConfig().bias_rate == 1e-3
    with pytest.raises(optimus.UserError, match=r"moe\.bias_rate: the routers of the model have no bias: remove it"):
        load_config(config_of("moe", moe={"bias_rate": 0.1}))
