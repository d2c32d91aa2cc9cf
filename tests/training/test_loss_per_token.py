"""The loss is the mean over the predicted tokens of the global batch, for any distribution and any mask."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.drawing import config_of
from helpers.equality import Trained, compare
from helpers.whole import whole_state
from optimus.config import load_config
from optimus.model import Batch, Transformer
from optimus.model.init import initialize
from optimus.testing import run_ranks
from optimus.testing.steps import Steps, random_batch
from optimus.testing.traffic import Traffic, counting
from optimus.training.step import StepResult, accumulate_gradients, training_step

MASKS = ["random", "microbatch", "rank", "one", "none"]


def mask_of(kind: str, step: int, shape: tuple[int, int]) -> Tensor:
    """Returns the mask of the predicted tokens [B, S] of the global batch: a random half.

    Some kinds exclude the first microbatch, or the second half of the batch (one data rank), or all tokens but one, or
    all.
    """
    mask_BS = torch.rand(shape, generator=torch.Generator().manual_seed(step)) < 0.5
    if kind == "microbatch":
        mask_BS[:2] = False
    elif kind == "rank":
        mask_BS[shape[0] // 2 :] = False
    elif kind in ("one", "none"):
        mask_BS[:] = False
        mask_BS[3, 7] = kind == "one"
    return mask_BS


def train_masked(config: dict[str, Any], kinds: list[str]) -> Trained:
    """Trains a step with each of these masks."""
    steps = Steps(config)
    shape = config["train"]["global_batch"], config["train"]["sequence_length"]
    results = [steps.train(mask_of(kind, number, shape)) for number, kind in enumerate(kinds)]
    return Trained(results, whole_state(steps.state, everywhere=False))


def run_config(model: str, *overrides: str) -> dict[str, Any]:
    moe = {} if "dense" in model else {"moe": {"balance_coefficient": 0.1, "z_coefficient": 0.01}}
    tree = load_config(config_of(model, **moe), ["train.global_batch=8", *overrides])
    return tree.model_dump(exclude_unset=True)


@pytest.mark.swept("model")
@pytest.mark.parametrize(
    ("model", "ranks", "overrides"),
    [
        ("moe", 2, []),
        ("moe", 2, ["parallel.expert=2", "state.shard=parameters", "moe.balance_scope=global"]),
        ("dense", 2, ["parallel.context=2"]),
        ("moe", 2, ["parallel.context=2", "parallel.context_method=ulysses"]),
        ("moe", 2, ["parallel.tensor=2"]),
        ("dense", 2, ["parallel.tensor=2", "parallel.sequence=false"]),
        ("moe", 4, ["parallel.tensor=[1,2]", "parallel.context=2"]),
        ("moe", 4, ["parallel.pipeline=2"]),
        ("tied dense", 2, ["parallel.pipeline=2", "parallel.executor=message-driven"]),
        ("dense", 4, ["parallel.pipeline=2", "parallel.vocabulary=true", "parallel.context=2"]),
        ("moe", 4, ["parallel.pipeline=2", "parallel.vocabulary=true", "parallel.tensor=2"]),
        (
            "moe",
            4,
            ["model.layers=4", "parallel.pipeline=2", "parallel.schedule=zbv", "parallel.stages_per_rank=2"],
        ),
    ],
    ids=str,
)
def test_masked_targets_are_those_of_one_process(model: str, ranks: int, overrides: list[str]) -> None:
    alone = train_masked(run_config(model, *(each for each in overrides if each.startswith(("model", "moe")))), MASKS)
    for rank, found in enumerate(run_ranks(train_masked, ranks, run_config(model, *overrides), MASKS)):
        compare(found, alone, f"{ranks} ranks, {overrides}, rank {rank}", 2e-5)
    train = run_config(model)["train"]
    masks = [mask_of(kind, n, (train["global_batch"], train["sequence_length"])) for n, kind in enumerate(MASKS)]
    assert [each.predicted for each in alone.steps] == [int(mask_BS[:, 1:].sum()) for mask_BS in masks]


def reference(model: Transformer, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss and the gradient of every parameter by definition, in float64."""
    logits_BSV = model.double()(batch.tokens_BS)
    loss_BS = F.cross_entropy(logits_BSV[:, :-1].transpose(1, 2), batch.tokens_BS[:, 1:], reduction="none")
    chosen_BS = torch.ones_like(batch.tokens_BS) if batch.target_mask_BS is None else batch.target_mask_BS
    loss = (loss_BS * chosen_BS[:, 1:]).sum() / chosen_BS[:, 1:].sum()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("masked", [True, False])
def test_uneven_microbatches_are_one_mean(masked: bool) -> None:
    """Seven sequences in microbatches of two, with a decreasing share of predicted tokens, give one mean."""
    steps = Steps(config_of("dense"))
    tokens_BS = random_batch(steps.config, 1)[:7]
    mask_BS = torch.rand(tokens_BS.shape) < torch.linspace(1, 0.1, 7)[:, None] if masked else None
    batch = Batch(tokens_BS, mask_BS)
    model = Transformer(steps.config.model)
    initialize(model, steps.config.train.seed, steps.config.model.init_std)
    loss, gradients = reference(model, batch)
    steps.state.begin_step()
    found, predicted = accumulate_gradients(steps.model, steps.state, batch, steps.config)
    assert predicted == (7 * 23 if mask_BS is None else int(mask_BS[:, 1:].sum()))
    torch.testing.assert_close(found[0].double(), loss, rtol=1e-6, atol=0)
    for name, parameter in steps.model.model.named_parameters():
        error = float((parameter.grad.double() - gradients[name]).norm() / gradients[name].norm())  # type: ignore[union-attr]
        assert error < 1e-5, name


def uneven(config: dict[str, Any]) -> StepResult:
    """Trains a step of seven sequences in microbatches of two."""
    steps = Steps(config)
    batch = Batch(random_batch(steps.config, 1), mask_of("random", 1, (16, 24))).split(7)[0]
    return training_step(steps.model, steps.state, batch, steps.config, 1)


@pytest.mark.parametrize("override", ["schedule=1f1b", "executor=message-driven", "vocabulary=true"])
def test_uneven_microbatches_go_through_a_pipeline(override: str) -> None:
    config = config_of("moe", moe={"force_balanced": True})
    right = uneven(config)
    tree = load_config(config, ["parallel.pipeline=2", f"parallel.{override}"]).model_dump(exclude_unset=True)
    for found in run_ranks(uneven, 2, tree):
        assert found[:-1] == pytest.approx(right[:-1], rel=2e-5)


def test_a_batch_without_targets_is_a_loss_of_zero() -> None:
    steps = Steps(config_of("dense"))
    before = [parameter.clone() for parameter in steps.model.parameters()]
    result = steps.train(torch.zeros(16, 24, dtype=torch.bool))
    assert (result.loss, result.grad_norm, result.skipped) == (0.0, 0.0, False)
    assert all(torch.isfinite(parameter).all() for parameter in steps.model.parameters())
    # Weight decay alone changes the parameters
    assert all(torch.allclose(a, b, rtol=1e-2) for a, b in zip(before, steps.model.parameters()))


def test_a_mask_of_all_is_no_mask() -> None:
    """A mask of all tokens changes nothing, and the first token of a sequence is never predicted."""
    plain, masked = Steps(config_of("moe")), Steps(config_of("moe"))
    mask_BS = torch.ones(16, 24, dtype=torch.bool)
    mask_BS[::2, 0] = False
    assert masked.train(mask_BS) == plain.train()


def counted(config: dict[str, Any]) -> list[Traffic]:
    """Returns the traffic of a step without a mask and of one with a mask."""
    steps, found = Steps(config), []
    for mask_BS in (None, mask_of("random", 1, (16, 24))):
        with counting() as traffic:
            steps.train(mask_BS)
        found.append(traffic)
    return found


def test_what_is_exchanged_is_one_number_of_masked_batches() -> None:
    for plain, masked in run_ranks(counted, 2, config_of("dense")):
        assert masked.calls - plain.calls == {"all_reduce": 1}
        assert masked.bytes - plain.bytes == {"all_reduce": 8}
