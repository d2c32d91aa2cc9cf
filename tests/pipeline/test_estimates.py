"""Estimates of live microbatches and of the time of a step equal those of the whole schedule."""

import random
from operator import ge, sub

import pytest

from optimus.pipeline.costs import Costs
from optimus.pipeline.estimates import StageTimes, least_seconds, live_microbatches, pipeline_seconds, stages_of_ranks
from optimus.pipeline.schedule import Kind
from optimus.pipeline.schedules import make_schedule
from optimus.pipeline.simulation import makespan

ORDERS = [
    ("1f1b", 1), ("zb-h1", 1), ("zbv", 2), ("v-half", 2), ("v-min", 2), ("interleaved-1f1b", 2), ("interleaved-1f1b", 3),
    ("gpipe", 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "per_rank"), ORDERS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("times", [1, 2, 3, 5])
def test_what_ranks_keep_is_what_the_schedule_keeps(name: str, per_rank: int, ranks: int, times: int) -> None:
    microbatches = ranks * times + (name != "interleaved-1f1b")
    plan = make_schedule(name, ranks, microbatches, per_rank)
    for rank, found in enumerate(live_microbatches(name, ranks, microbatches, per_rank)):
        stages, most = plan.stages_of(rank), 0
        done = {kind: dict.fromkeys(stages, 0) for kind in Kind}
        seen = set()
        for action in plan.actions[rank]:
            began = [done[Kind.FORWARD][stage] for stage in stages]
            ended = [done[plan.first_backward][stage] for stage in stages]
            whole = [
                done[Kind.BACKWARD_WEIGHTS][stage] if plan.splits_backward else end for stage, end in zip(stages, ended)
            ]
            if action.kind is plan.first_backward:
                seen.add((tuple(map(sub, began, ended)), tuple(map(sub, ended, whole))))
                most = max(most, sum(began) - sum(whole))
            if action.kind in done:
                done[action.kind][action.stage] += 1
        assert max(sum(one.saved) + sum(one.waiting) for one in found) == most
        assert set(found) <= seen
        for one in seen:
            assert any(all(map(ge, sum(other, ()), sum(one, ()))) for other in found)


@pytest.mark.parametrize("name", ["interleaved-1f1b", "zbv"])
def test_one_rank_has_a_number_for_each_of_its_stages(name: str) -> None:
    (found,) = live_microbatches(name, 1, 4, 2)
    assert {(len(one.saved), len(one.waiting)) for one in found} == {(2, 2)}
    assert max(map(sum, (one.saved for one in found))) == 2


@pytest.mark.parametrize(("name", "per_rank"), ORDERS)
@pytest.mark.parametrize("blocking", [False, True])
def test_a_step_takes_as_long_as_its_schedule(name: str, per_rank: int, blocking: bool) -> None:
    """Estimates hold for uneven stages.

    The simulation skips the middle of many microbatches, unless ranks wait for transfers.
    """
    draws = random.Random(per_rank)
    for ranks, microbatches in ((2, 2), (3, 6), (4, 8), *([] if blocking else [(4, 24)])):
        times = [StageTimes(*(draws.uniform(0.5, 1.5) for _ in range(3))) for _ in range(ranks * per_rank)]
        forward, backward, weights = map(list, zip(*times))
        costs = Costs(forward, backward, weights, link=0.2, blocking=blocking)
        whole = makespan(make_schedule(name, ranks, microbatches, per_rank), costs)
        found = pipeline_seconds(name, ranks, microbatches, times, 0.2, blocking=blocking)
        few = microbatches <= 2 * ranks
        assert found == pytest.approx(whole, rel=1e-9 if few else 0.05)
        busy = [sum(times[stage].seconds for stage in own) for own in stages_of_ranks(name, ranks, per_rank)]
        assert least_seconds(name, microbatches, times, busy) <= found * (1 + 1e-9)


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("factor", [1.5, 2.0, 3.0])
def test_a_deeper_warm_up_hides_messages(factor: float, blocking: bool) -> None:
    times, link = [StageTimes(1.0, 1.5, 0.5)] * 4, 0.4
    costs = Costs([1.0] * 4, [1.5] * 4, [0.5] * 4, link=link, blocking=blocking)
    simulated = makespan(make_schedule("1f1b", 4, 12, warmup_factor=factor), costs)
    found = pipeline_seconds("1f1b", 4, 12, times, link, blocking=blocking, warmup_factor=factor)
    assert found == pytest.approx(simulated, rel=0.05)
    if not blocking:
        assert found < pipeline_seconds("1f1b", 4, 12, times, link)
