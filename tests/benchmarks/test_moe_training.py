"""The benchmark of table 3: reduced models keep what decides, variants do the same work, and gains with their errors."""

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import moe_training
from benchmarks.harness import apart
from benchmarks.moe_training import (
    LoopedExperts,
    columns,
    config_of,
    contestant,
    mean_gains,
    published,
    reduced,
    step,
    summary,
    within_noise,
)
from benchmarks.papers.optimus_aurora import LAYOUTS, Parts, model_of, predicted, table_3
from optimus.errors import UserError
from optimus.model.moe.layer import Experts
from optimus.testing import run_ranks
from optimus.testing.steps import Steps


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
    assert small.vocab == full.vocab // 128
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


def losses(name: str) -> list[tuple[float, ...]]:
    """Returns the losses of three steps: this rank's with and without FSMOE, EPSO and both, then those of a run."""
    configs = [config_of(name, 2, epso) for epso in (False, True)]
    made = [contestant(config, fsmoe) for config in configs for fsmoe in (False, True)]
    run = Steps(configs[True])
    return [(*(step(each)[1] for each in made), run.train().loss) for _ in range(3)]


@pytest.mark.parametrize("name", ["mula-7b-a1b", "mula-20b-a2b"])
def test_all_variants_train_as_a_run_does(name: str) -> None:
    """The passes of all gradients come before any reduction, and yet the losses are those of a run."""
    of_ranks = run_ranks(losses, 2, name, timeout=300)
    for *ours, run in np.mean(of_ranks, axis=0):
        assert apart(ours, [run] * 4) < 1e-5
    assert of_ranks[0][-1][-1] < of_ranks[0][0][-1] - 1e-2  # the steps have learnt


@pytest.mark.parametrize("name", LAYOUTS)
def test_columns(name: str) -> None:
    """Columns have the planner's points of table 3, and the published ones, each in its place."""
    ways = [(fsmoe, epso) for fsmoe in (False, True) for epso in (False, True)]
    planned, said = columns(name, {way: predicted(name, *way) for way in ways}), published(name)
    parts = ["passes", "fsmoe", *(("optimizer", "epso") if LAYOUTS[name].expert > 1 else ()), "both"]
    points = [point for point in table_3() if point.what.startswith(name)]
    assert [planned[part] for part in parts] == pytest.approx([point.predicted for point in points])
    assert [said[part] for part in parts] == [point.published for point in points]
    assert (planned["epso"] is None) == (planned["optimizer"] is None) == (said["epso"] is None) == (len(points) == 3)


def test_medians_and_standard_errors() -> None:
    """The gain is the median of ratios within rounds, and the error that of the ratios; what is shared cancels."""
    slower = np.array([1.0, 9.0, 2.0, 1.0, 5.0])[:, None]  # rounds
    parts = {(False, False): (8.0, 2.0), (False, True): (8.0, 1.0), (True, False): (4.0, 2.0), (True, True): (4.0, 1.0)}
    alone = np.array([[3.0, 3.0, 3.0, 3.0, 3.0], [2.0, 1.0, 3.0, 1.5, 6.0]])  # ratios 1.5, 3, 1, 2 and 0.5
    found, errors = summary("mula-20b-a2b", np.stack([slower * each for each in parts.values()]), alone)
    expected = columns("mula-20b-a2b", {way: Parts(*each) for way, each in parts.items()})
    assert found == pytest.approx({**expected, "optimizer": 1.5})
    assert errors.pop("optimizer") == pytest.approx(0.929 * 1.75 / 5**0.5, rel=1e-3)
    assert list(errors.values()) == pytest.approx([0.0] * 6, abs=1e-12)
    assert expected == pytest.approx(
        {
            "passes": 2.0,
            "optimizer": 2.0,
            "share": 0.2,
            "fsmoe": 10 / 6,
            "epso": 10 / 9,
            "product": 100 / 54,
            "both": 2.0,
        }
    )


def test_what_is_within_noise() -> None:
    found = {"passes": 1.2, "optimizer": None, "share": 0.9, "fsmoe": 1.2, "epso": None, "product": 0.9, "both": 0.8}
    errors = dict.fromkeys(found, 0.09) | {"fsmoe": 0.11, "product": 0.06}
    assert within_noise(found, errors) == "fsmoe, product"
    assert within_noise(found, dict.fromkeys(found, 0.01)) is None


def test_means_of_gains() -> None:
    gains = ("passes", "optimizer", "fsmoe", "epso", "product", "both")
    first, second = (
        dict(zip(gains, (2.0, None, 2.0, None, 2.0, 1.0))),
        dict(zip(gains, (2.0, 3.0, 8.0, 1.5, 12.0, 4.0))),
    )
    means = dict(zip(gains, (2.0, 3.0, 4.0, 1.5, 24**0.5, 2.0)))
    assert mean_gains([first, second]) == {f"moe_training.{name}": pytest.approx(mean) for name, mean in means.items()}
    assert mean_gains([first])["moe_training.epso"] is None


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match="--ranks 3: give 2 or 4"):
        moe_training.run(ranks=3)
    with pytest.raises(UserError, match="--steps 1: give at least 2"):
        moe_training.run(steps=1)
    with pytest.raises(UserError, match="--model mula-1b: "):
        moe_training.run(model=["mula-1b"])
