"""The benchmark of table 3: reduced models keep what decides; loops of experts compute the same; means of gains."""

import pytest
import torch
from torch import Tensor

from benchmarks import moe_training
from benchmarks.moe_training import LoopedExperts, config_of, mean_gains, reduced
from benchmarks.papers.optimus_aurora import LAYOUTS, Gains, model_of
from optimus.errors import UserError
from optimus.model.moe.layer import Experts


@pytest.mark.parametrize("name", LAYOUTS)
def test_reduced_models(name: str) -> None:
    """A rank has as many experts as at full size, and sizes keep their proportions."""
    full, small, layout = model_of(name), reduced(name), LAYOUTS[name]
    here, there = config_of(name, 4, epso=False), config_of(name, 4, epso=True)
    assert full.experts is not None
    assert small.experts is not None
    assert small.experts // int(here.parallel.expert) == full.experts // layout.expert
    assert full.hidden / small.hidden == full.intermediate / small.intermediate == 16
    assert full.layers / small.layers == full.heads / small.heads == 8
    assert (here.state.shard_over, there.state.shard_over) == ("data", "replicas")
    assert {*here.recompute} == {*layout.recompute}


def test_loops_equal_our_experts() -> None:
    """Outputs and gradients agree in float64, with skipped choices and an idle expert."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    indices, given = torch.tensor([[0, 2], [-1, 1], [1, -1], [2, 0], [-1, -1]]), [random(5, 8), random(5, 2)]
    matrices, results = [random(4, 2, 6, 8), random(4, 8, 6)], []
    for kind in (Experts, LoopedExperts):
        experts = kind(4, 8, 6)
        experts.gate_up, experts.down = (torch.nn.Parameter(each.clone()) for each in matrices)
        x, weights = (each.clone().requires_grad_() for each in given)
        y = experts(x, weights, indices)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, weights.grad, experts.gate_up.grad, experts.down.grad])
    for ours, looped in zip(*results):
        torch.testing.assert_close(looped, ours, rtol=1e-12, atol=1e-12)


def test_means_of_gains() -> None:
    found = mean_gains([Gains(2.0, None, 2.0), Gains(8.0, 1.5, 18.0)])
    expected = {"fsmoe": 4.0, "epso": 1.5, "product": 24**0.5, "both": 6.0}
    assert found == {f"moe_training.{name}": pytest.approx(value) for name, value in expected.items()}
    assert mean_gains([Gains(2.0, None, 2.0)])["moe_training.epso"] is None


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match="--ranks 3: give 2 or 4"):
        moe_training.run(ranks=3)
    with pytest.raises(UserError, match="--model mula-1b: "):
        moe_training.run(model=["mula-1b"])
