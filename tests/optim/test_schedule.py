"""The learning rate at its corners and in between."""

from itertools import pairwise

import pytest

from optimus.optim.schedule import learning_rate


def rates(name: str = "cosine", steps: int = 100, warmup_steps: int = 20) -> list[float]:
    return [
        learning_rate(step, name=name, peak=1.0, minimum=0.1, warmup_steps=warmup_steps, steps=steps)
        for step in range(1, steps + 1)
    ]


def test_points() -> None:
    found = rates()
    assert found[0] == pytest.approx(1 / 20)
    assert found[9] == pytest.approx(0.5)
    assert found[19] == 1.0  # the peak, at the last step of the warm-up
    assert found[59] == pytest.approx(0.55)  # half-way down
    assert found[39] == pytest.approx(0.1 + 0.9 * (1 + 2**-0.5) / 2)  # a quarter of the cosine
    assert found[99] == pytest.approx(0.1)


def test_rises_then_falls() -> None:
    found = rates()
    assert all(a < b for a, b in pairwise(found[:20]))
    assert all(a > b for a, b in pairwise(found[19:]))


def test_constant_stays_at_the_peak() -> None:
    found = rates("constant")
    assert found[:20] == rates()[:20]
    assert set(found[19:]) == {1.0}


def test_corner_lengths() -> None:
    assert rates(warmup_steps=0)[0] < 1.0
    assert rates(warmup_steps=0)[-1] == pytest.approx(0.1)
    assert rates(steps=20)[-1] == 1.0  # all warm-up
    assert rates(steps=10)[-1] == 0.5  # the run ends within it
    assert rates(steps=21)[-1] == pytest.approx(0.1)
    assert learning_rate(500, name="cosine", peak=1.0, minimum=0.1, warmup_steps=20, steps=100) == pytest.approx(0.1)
