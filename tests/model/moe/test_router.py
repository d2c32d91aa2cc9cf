"""Forced routing by positions, and weights that sum to 1 for any logits."""

import pytest
import torch

from optimus.config import ModelConfig
from optimus.model import Transformer
from optimus.model.cache import KVCache
from optimus.model.init import initialize
from optimus.model.moe.choices import RouterConfig
from optimus.model.moe.router import Router, move_biases


def forced(**model: object) -> Transformer:
    """Returns a small model in which a sequence's choices do not divide evenly over the experts."""
    sizes = {"hidden": 16, "layers": 2, "heads": 2, "intermediate": 16, "vocab": 64, "experts": 6}
    made = Transformer(ModelConfig(family="olmoe", experts_per_token=2, **(sizes | model)), force_balanced=True)
    initialize(made, seed=0, std=0.5)
    return made


def tokens(sequences: int, length: int) -> torch.Tensor:
    return torch.randint(64, (sequences, length), generator=torch.Generator().manual_seed(0))


def test_forced_experts_follow_from_the_position_in_the_sequence() -> None:
    """A sequence has the same outputs alone, in a batch, and token by token."""
    model, batch = forced(), tokens(3, 11)
    with torch.no_grad():
        together = model(batch)
        cache = KVCache(2)
        pieces = [model(piece, cache=cache) for piece in batch.split([5, 1, 1, 4], dim=1)]
        torch.testing.assert_close(torch.cat([model(row[None]) for row in batch]), together)
        torch.testing.assert_close(torch.cat(pieces, 1), together)


def test_forced_experts_get_as_many_tokens_of_every_sequence_or_one_more() -> None:
    router = forced().blocks[0].moe.router
    for length in range(1, 14):
        _, indices_TK, _ = router(torch.randn(2 * length, 16), torch.arange(length).repeat(2))
        counts_E = torch.bincount(indices_TK.flatten(), minlength=6)
        assert counts_E.sum() == 4 * length
        assert counts_E.max() - counts_E.min() <= 2  # over two sequences


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_sum_to_1_where_all_chosen_probabilities_are_0(dtype: torch.dtype) -> None:
    """Weights sum to 1 for token 1, which is forced to experts 2 and 3: fp32 cannot represent their probabilities,
    which differ by a factor of e."""
    router = Router(5, 5, 2, True, RouterConfig(renormalise=True)).to(dtype)
    torch.nn.init.eye_(router.weight)
    x_TH = torch.tensor([[0.0, 0, 0, 0, 0], [300.0, 0, 1.0, 0.0, 0]], dtype=dtype, requires_grad=True)
    weights_TK, indices_TK, stats = router(x_TH)
    assert indices_TK[1].tolist() == [2, 3]
    expected = torch.tensor([[0.5, 0.5], [torch.e / (torch.e + 1), 1 / (torch.e + 1)]])
    torch.testing.assert_close(weights_TK.float(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0)
    (weights_TK[:, 0].sum() + stats.z_loss() + stats.balance_loss()).backward()
    assert x_TH.grad is not None
    assert x_TH.grad.isfinite().all()
    assert x_TH.grad[1, 2] > 0.1


def test_biases_balance() -> None:
    """Updates of the router's biases reduce the load imbalance (max/mean) of similar tokens from above 1.8 to below 1.3."""
    generator = torch.Generator().manual_seed(0)
    router = Router(16, 8, 2, router_config=RouterConfig("sigmoid", bias=True))
    torch.nn.init.normal_(router.weight, std=0.3, generator=generator)
    busiest = []
    for _ in range(300):
        _, _, stats = router(torch.randn(2048, 16, generator=generator) + 1)
        busiest.append(float(stats.counts_E.max() / stats.counts_E.mean()))
        move_biases([router], 0.01, lambda counts: None)
    assert min(busiest[:5]) > 1.8
    assert max(busiest[-5:]) < 1.3


def test_a_bias_stays_fp32() -> None:
    """The bias stays fp32 when the model changes its type or device; bf16 would not represent a third exactly."""
    router = Router(4, 8, 2, router_config=RouterConfig(bias=True))
    assert router.bias is not None
    router.bias.fill_(1 / 3)
    assert router.to(torch.bfloat16).weight.dtype == torch.bfloat16
    assert router.bias.dtype == torch.float32
    assert float(router.bias[0]) == pytest.approx(1 / 3, rel=1e-7)
    with torch.device("meta"):
        empty = Router(4, 8, 2, router_config=RouterConfig(bias=True)).bfloat16()
    assert empty.to_empty(device="cpu").bias.dtype == torch.float32


def test_nobody_counts_choices_outside_of_training() -> None:
    router = Router(4, 8, 2, router_config=RouterConfig(bias=True))
    with torch.no_grad():
        router(torch.randn(5, 4))
    assert router.take_choices().sum() == 0
    router(torch.randn(5, 4))
    assert router.take_choices().sum() == 10
    assert router.take_choices().sum() == 0
