"""The router's kernel equals softmax, top-k and the sums of the losses in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from optimus.kernels.triton.router import Routed, router

Close = Callable[[Tensor, Tensor], None]
Random = Callable[..., Tensor]
W = torch.tensor([[1.0, 0.0]]).softmax(-1)


def reference(logits_TE: Tensor, K: int, forced_T: Tensor | None, renormalise: bool) -> Routed:
    p = logits_TE.softmax(-1)
    E, choice_K = p.shape[1], torch.arange(K, device=p.device)
    indices = p.topk(K).indices if forced_T is None else (forced_T[:, None] * K + choice_K) % E
    weights = p.gather(1, indices)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    counts = torch.bincount(indices.flatten(), minlength=E).double()
    return Routed(weights, indices, counts, p.sum(0), logits_TE.logsumexp(-1).square().sum())


def total(routed: Routed) -> Tensor:
    """Returns a scalar that depends on every differentiable output."""
    weights, probabilities = routed.weights_TK.double(), routed.probabilities_E.double()
    w_weight, p_weight = (
        torch.linspace(-1, 2, x.numel(), dtype=x.dtype, device=x.device).view_as(x) for x in (weights, probabilities)
    )
    return (weights * w_weight).sum() + (probabilities * p_weight).sum() + 0.1 * routed.z.double()


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize(("T", "E", "K"), [(75, 8, 2), (90, 11, 3), (3, 256, 7), (1, 1, 1), (0, 4, 2), (20, 5, 5)])
def test_equals_the_definition(
    T: int, E: int, K: int, uniform: bool, renormalise: bool, dtype: torch.dtype, device: torch.device,
    generator: torch.Generator, close: Close,
) -> None:  # fmt: skip
    # All logits of a token are different, also in 16 bits.
    order = torch.rand(T, E, generator=generator, device=device).argsort(-1)
    logits = ((order - E / 2) * 2.0 ** (4 - E.bit_length())).to(dtype).requires_grad_()
    expected_logits = logits.detach().double().requires_grad_()
    forced_T = (torch.arange(T, device=device) + 7) % 31 if uniform else None
    ours = router(logits, K, forced_T=forced_T, renormalise=renormalise)
    expected = reference(expected_logits, K, forced_T, renormalise)
    assert ours.indices_TK.equal(expected.indices_TK)
    assert ours.counts_E.double().equal(expected.counts_E)
    assert ours.weights_TK.dtype == dtype
    for ours_sum, expected_sum in zip(ours[3:], expected[3:]):
        assert ours_sum.dtype == torch.float32
        close(ours_sum, expected_sum)
    close(ours.weights_TK, expected.weights_TK)
    (grad,) = torch.autograd.grad(total(ours), logits)
    (expected_grad,) = torch.autograd.grad(total(expected), expected_logits)
    if E > 1 or renormalise:  # the probability of a single expert is always 1
        close(grad, expected_grad)


def test_weights_sum_to_1_where_all_chosen_probabilities_are_0(device: torch.device) -> None:
    """Weights sum to 1 for a token that is forced to experts whose probabilities fp32 cannot represent."""
    logits = torch.tensor([[300.0, 0.0, 1.0, 0.0]], device=device, requires_grad=True)
    routed = router(logits, 2, forced_T=torch.tensor([1], device=device), renormalise=True)
    torch.testing.assert_close(routed.weights_TK.detach().cpu(), W)
    (grad,) = torch.autograd.grad(routed.weights_TK[0, 0], logits)
    torch.testing.assert_close(grad.cpu(), torch.tensor([[0.0, 0.0, 1.0, -1.0]]) * W[0, 0] * W[0, 1])


def test_of_equals_the_first_is_chosen(device: torch.device) -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]], device=device)
    assert router(logits, 2).indices_TK.tolist() == [[1, 2], [0, 1]]


@pytest.mark.filterwarnings("ignore:invalid value")
def test_what_is_not_a_number_shows_but_stays_in_its_token(device: torch.device, random: Random) -> None:
    """NaN logits give NaN weights for their token only, so the health check sees them; indices stay in bounds."""
    logits = random(4, 5, dtype=torch.float32)
    clean = router(logits, 2)
    logits[1] = torch.nan
    routed = router(logits, 2)
    others = [0, 2, 3]
    assert routed.weights_TK[others].equal(clean.weights_TK[others])
    assert routed.weights_TK[1].isnan().all()
    assert routed.counts_E.sum() == 8
    assert routed.indices_TK.min() >= 0
    assert routed.indices_TK.max() < 5


def test_twice_the_same_bits(random: Random) -> None:
    logits = random(200, 12, dtype=torch.float32)
    assert all(a.equal(b) for a, b in zip(router(logits, 3), router(logits, 3)))
