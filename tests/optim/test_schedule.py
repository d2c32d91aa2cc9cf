"""The learning rate at its corners and in between."""

import math
from itertools import pairwise
from typing import Any

import pytest

from helpers.plugin_tables import tables_restored
from optimus.errors import UserError
from optimus.optim.schedule import COOLDOWNS, SCHEDULES, LrRow, LrSchedule, learning_rate


def rates(name: Any = "cosine", steps: int = 100, warmup_steps: int = 20, **more: Any) -> list[float]:
    rule = LrSchedule(name, peak=1.0, minimum=0.1, warmup_steps=warmup_steps, steps=steps, **more)
    return [learning_rate(rule, step) for step in range(1, steps + 1)]


def test_points() -> None:
    found = rates()
    assert found[0] == pytest.approx(1 / 20)
    assert found[9] == pytest.approx(0.5)
    assert found[19] == 1.0  # the peak, at the last step of the warm-up
    assert found[59] == pytest.approx(0.55)  # half-way down
    assert found[39] == pytest.approx(0.1 + 0.9 * (1 + 2**-0.5) / 2)  # a quarter of the cosine
    assert found[99] == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["cosine", "linear", "inverse-sqrt"])
def test_rises_then_falls(name: str) -> None:
    found = rates(name)
    assert all(a < b for a, b in pairwise(found[:20]))
    assert all(a > b for a, b in pairwise(found[19:]))


@pytest.mark.parametrize("name", SCHEDULES)
def test_all_warm_up_alike(name: str) -> None:
    assert rates(name, cooldown_steps=10)[:20] == rates("constant")[:20]


def test_constant_stays_at_the_peak() -> None:
    assert set(rates("constant")[19:]) == {1.0}


def test_linear_is_a_line() -> None:
    found = rates("linear")
    assert found[59] == pytest.approx(0.55)
    assert found[39] == pytest.approx(0.775)
    assert found[99] == pytest.approx(0.1)


def test_inverse_sqrt_halves_with_four_times_the_steps() -> None:
    found = rates("inverse-sqrt", steps=4000)
    assert found[79] == pytest.approx(0.5)
    assert found[319] == pytest.approx(0.25)
    assert found[-1] == 0.1  # the minimum, which is above the root of 1 / 200


@pytest.mark.parametrize(
    ("cooldown", "half"), [("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5)), ("cosine", 0.5)], ids=str
)
def test_wsd_is_constant_until_its_cooldown(cooldown: Any, half: float) -> None:
    found = rates("wsd", cooldown=cooldown, cooldown_steps=30)
    assert set(found[19:70]) == {1.0}
    assert all(a > b for a, b in pairwise(found[69:]))
    assert found[84] == pytest.approx(0.1 + 0.9 * half)
    assert found[99] == pytest.approx(0.1)


def test_shapes_of_cooldowns_begin_and_end_alike() -> None:
    for shape in COOLDOWNS.values():
        assert shape(0.0) == 1.0
        assert shape(1.0) == pytest.approx(0.0)
    assert COOLDOWNS["sqrt"](0.25) == 0.5
    assert COOLDOWNS["cosine"](0.25) > COOLDOWNS["linear"](0.25) > COOLDOWNS["sqrt"](0.25)


def test_corner_lengths() -> None:
    assert rates(warmup_steps=0)[0] < 1.0
    assert rates(warmup_steps=0)[-1] == pytest.approx(0.1)
    assert rates("inverse-sqrt", warmup_steps=0)[0] == 1.0
    assert rates(steps=20)[-1] == 1.0  # all warm-up
    assert rates(steps=10)[-1] == 0.5  # the run ends during the warm-up
    assert rates(steps=21)[-1] == pytest.approx(0.1)
    assert learning_rate(LrSchedule("cosine", 1.0, 0.1, 20, 100), 500) == pytest.approx(0.1)


@pytest.mark.parametrize("value", ["fast", math.nan, math.inf, -0.1, None], ids=str)
def test_what_is_no_rate_is_named(value: Any) -> None:
    with tables_restored():
        SCHEDULES.extend({"odd": LrRow("odd", lambda rule, step: value)})
        assert rates("odd", steps=20)[-1] == 1.0  # all warm-up
        with pytest.raises(UserError) as refused:
            rates("odd")
    assert str(refused.value) == (
        f"the learning-rate schedule odd returns {value!r}: return a finite number of at least 0"
    )


@pytest.mark.parametrize(("error", "said"), [(KeyError("a\nb"), "KeyError: 'a"), (SystemExit(3), "SystemExit: 3")])
def test_a_rate_that_raises_is_named(error: BaseException, said: str) -> None:
    def rate(rule: LrSchedule, step: int) -> float:
        raise error

    with tables_restored():
        SCHEDULES.extend({"odd": LrRow("odd", rate)})
        with pytest.raises(UserError) as refused:
            rates("odd")
    assert f"the learning-rate schedule odd failed ({said}" in str(refused.value)
    assert str(refused.value).endswith("): correct its function rate")
    assert "\n" not in str(refused.value)
