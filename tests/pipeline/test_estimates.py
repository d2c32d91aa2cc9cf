"""A pipeline without playing all of it: the microbatches that are live, and how long a step takes."""

import random

import pytest

from optimus.pipeline.costs import Costs
from optimus.pipeline.estimates import StageTimes, least_seconds, live_microbatches, pipeline_seconds, stages_of_ranks
from optimus.pipeline.schedule import live_changes
from optimus.pipeline.schedules import make_schedule
from optimus.pipeline.simulation import makespan

ORDERS = [("1f1b", 1), ("zb-h1", 1), ("zbv", 2), ("interleaved-1f1b", 2), ("interleaved-1f1b", 3), ("gpipe", 1)]


@pytest.mark.parametrize(("name", "per_rank"), ORDERS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("times", [1, 2, 3, 5])
def test_what_ranks_keep_is_what_the_schedule_keeps(name: str, per_rank: int, ranks: int, times: int) -> None:
    microbatches = ranks * times + (name != "interleaved-1f1b")
    plan = make_schedule(name, ranks, microbatches, per_rank)
    for rank, kept in enumerate(live_microbatches(name, ranks, microbatches, per_rank)):
        now, most, seen = dict.fromkeys(plan.stages_of(rank), 0), 0, set()
        for stage, change in live_changes(plan.actions[rank]):
            now[stage] += change
            most = max(most, sum(now.values()))
            seen.add(tuple(now.values()))
        assert max(map(sum, kept)) == most
        assert set(kept) <= seen


@pytest.mark.parametrize(("name", "per_rank"), ORDERS)
@pytest.mark.parametrize("blocking", [False, True])
def test_a_step_takes_as_long_as_its_schedule(name: str, per_rank: int, blocking: bool) -> None:
    """With uneven stages; of many microbatches the middle is not played, where transfers are not waited for there."""
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
