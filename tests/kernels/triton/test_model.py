"""A whole model on the Triton path has the losses, gradients and optimizer step of PyTorch's path."""

from typing import Any

import pytest
import torch
from torch import Tensor

from optimus.config import ModelConfig
from optimus.kernels import backend
from optimus.model import Transformer
from optimus.model.init import initialize
from optimus.optim.adamw import AdamW
from optimus.optim.rule import OptimizerStep, Tile

pytest.importorskip("triton")

SIZES: dict[str, Any] = {"hidden": 32, "layers": 2, "heads": 2, "intermediate": 24, "vocab": 97}
EXPERTS: dict[str, Any] = {"family": "olmoe", "experts": 5, "experts_per_token": 3}
# Eps is as large as rounding errors of gradients; otherwise near-zero gradients would give full steps of random sign.
RULE = AdamW(beta1=0.9, beta2=0.95, eps=3e-5, weight_decay=0.1)


def step(config: ModelConfig, force_balanced: bool, device: torch.device) -> list[Tensor]:
    """Returns the losses, all gradients, and all parameters after one step."""
    model = Transformer(config, force_balanced)
    initialize(model, seed=1, std=0.15)
    model.to(device)
    tokens_BS = torch.randint(97, (2, 17), generator=torch.Generator().manual_seed(2)).to(device)
    losses = model.losses(tokens_BS)
    (losses.cross_entropy + 0.01 * losses.balance + 0.001 * losses.z).backward()
    results = [losses.cross_entropy, losses.balance, losses.z]
    for parameter in model.parameters():
        weight, gradient = parameter.detach().flatten(), parameter.grad
        assert gradient is not None
        results.append(gradient.clone())
        kept = list(torch.zeros(2, len(weight), device=device))
        RULE.update(OptimizerStep(1, 1e-3), Tile(weight, gradient.flatten(), kept))
        results.append(weight)
    return results


@pytest.mark.parametrize(
    ("config", "force_balanced"),
    [({"family": "olmo"}, False), (EXPERTS, False), (EXPERTS, True)],
    ids=["dense", "experts", "uniform routing"],
)
def test_one_step_of_training(
    config: dict[str, Any], force_balanced: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def use(answer: bool) -> list[Tensor]:
        monkeypatch.setattr(backend, "use_triton", lambda x: asked.append(x) or answer)
        return step(ModelConfig.model_validate(SIZES | config), force_balanced, device)

    for ours, expected in zip(use(True), use(False)):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
    assert asked
