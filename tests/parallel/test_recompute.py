"""Recomputation keeps fewer bytes for the backward pass and changes no bit of the gradients."""

import pytest
import torch

from optimus.config import ModelConfig
from optimus.model import Transformer
from optimus.model.init import initialize
from optimus.parallel.recompute import recompute

DENSE = ModelConfig(family="olmo", hidden=32, layers=2, heads=2, intermediate=64, vocab=50)
EXPERTS = ModelConfig(
    family="olmoe", hidden=32, layers=2, heads=2, intermediate=24, vocab=50, experts=4, experts_per_token=2
)
TOKENS = torch.randint(50, (2, 64), generator=torch.Generator().manual_seed(0))


def measured(config: ModelConfig, kinds: list[str], precision: torch.dtype) -> tuple[list[torch.Tensor], int]:
    """(losses and all gradients, bytes kept for the backward pass besides the parameters)."""
    model = Transformer(config)
    initialize(model, 0, 0.2)
    model = model.to(precision)
    recompute(model.blocks, kinds)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        losses = model.losses(TOKENS)
        bytes_kept = sum(kept.values())
    (losses.cross_entropy + 0.01 * losses.balance + 0.001 * losses.z).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return [losses.cross_entropy, losses.balance, losses.z, *gradients], bytes_kept


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (DENSE, ["norm"]),
        (DENSE, ["attention"]),
        (DENSE, ["mlp"]),
        (DENSE, ["norm", "attention", "mlp"]),
        (EXPERTS, ["norm"]),
        (EXPERTS, ["attention"]),
        (EXPERTS, ["moe"]),
        (EXPERTS, ["norm", "attention", "moe"]),
    ],
)
def test_same_gradients_from_fewer_bytes(config: ModelConfig, kinds: list[str], precision: torch.dtype) -> None:
    expected, everything = measured(config, [], precision)
    found, kept = measured(config, kinds, precision)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    assert kept < everything


@pytest.mark.parametrize(("config", "feed_forward"), [(DENSE, "mlp"), (EXPERTS, "moe")])
def test_more_kinds_keep_less(config: ModelConfig, feed_forward: str) -> None:
    kept = [measured(config, kinds, torch.float32)[1] for kinds in ([], [feed_forward], [feed_forward, "attention"])]
    assert kept[0] > kept[1] > kept[2]
