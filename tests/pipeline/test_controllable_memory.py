"""V-Half and V-Min have the memory and the bubbles of their paper (Qi et al. 2024, section 4)."""

from itertools import accumulate

import pytest

from optimus.pipeline import Costs, check, make_schedule, simulate
from optimus.pipeline.schedules import Sizes
from optimus.pipeline.schedules.controllable_memory import INTERVAL, V_HALF, V_MIN, BuildingBlock, controllable

# For each schedule the paper's live activations, in microbatches on both stages of a rank, and its idle time of a rank,
# in passes of a stage: bubbles of p / 2m and 2p / 3m of the 6m passes of a rank. 1F1B has p microbatches and p / m.
PAPER = {
    "v-half": (lambda p: (p + 2) // 2, lambda p: 3 * p),
    "v-min": (lambda p: (p + 4) // 3, lambda p: 4 * p),
}
FIGURES = {  # live activations of one stage, and idle time in passes of a stage, for any number of microbatches from p on
    "v-half": {4: (6, 5), 8: (10, 17), 16: (18, 41)},
    "v-min": {4: (4, 12), 8: (8, 29), 16: (12, 64)},
}


@pytest.mark.parametrize("ranks", [4, 8, 16])
@pytest.mark.parametrize("name", PAPER)
def test_memory_and_bubble_are_those_of_the_paper(name: str, ranks: int) -> None:
    live, idle = (figure(ranks) for figure in PAPER[name])
    expected, waited = FIGURES[name][ranks]
    for microbatches in (ranks, 2 * ranks, 4 * ranks):
        timeline = simulate(make_schedule(name, ranks, microbatches))
        assert timeline.peak_activations == [expected] * ranks == [2 * live] * ranks
        assert timeline.makespan - INTERVAL * microbatches == waited <= idle
        assert timeline.bubble == pytest.approx(waited / (INTERVAL * microbatches))


@pytest.mark.parametrize("ranks", range(1, 12))
@pytest.mark.parametrize("name", PAPER)
def test_any_size_stays_within_the_limit(name: str, ranks: int) -> None:
    live, idle = (figure(ranks) for figure in PAPER[name])
    for microbatches in range(1, 2 * ranks + 2):
        schedule = make_schedule(name, ranks, microbatches)
        check(schedule)
        timeline = simulate(schedule)
        assert max(timeline.peak_activations) <= 2 * min(live, microbatches)
        assert microbatches < ranks or timeline.makespan - INTERVAL * microbatches <= idle


@pytest.mark.parametrize("block", [V_HALF, V_MIN], ids=["v-half", "v-min"])
@pytest.mark.parametrize("ranks", [*range(1, 20), 64])
def test_building_blocks_repeat_within_the_limit(block: BuildingBlock, ranks: int) -> None:
    """No two passes of a rank coincide, every pass follows its input, and the passes without their weight gradients
    need no more live activations than the limit."""
    starts = [block.starts(rank, ranks) for rank in range(ranks)]
    for own in starts:
        assert len({time % INTERVAL for time in own}) == 4
        times = [
            (start + INTERVAL * number, change) for start, change in zip(own, (1, 1, -1, -1)) for number in range(99)
        ]
        assert max(accumulate(change for _, change in sorted(times))) <= 2 * block.live(ranks)
    forward, second_forward, second_backward, backward = zip(*starts)
    chain = [*forward, *second_forward[::-1], *second_backward, *backward[::-1]]
    assert chain == sorted(set(chain))


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize(("name", "block"), [("v-half", V_HALF), ("v-min", V_MIN)])
def test_barriers_of_the_vocabulary_add_microbatches(name: str, block: BuildingBlock, ahead: int) -> None:
    """Each barrier adds the activations of one microbatch (Yeung et al. 2024, section 5.2)."""
    for ranks in (2, 4, 7):
        made = controllable(name, block, Sizes(ranks, 4 * ranks, 2, ahead=ahead))
        assert max(simulate(made).peak_activations) == 2 * (PAPER[name][0](ranks) + ahead)


def test_half_the_memory_of_1f1b_is_faster_than_1f1b() -> None:
    """On 16 ranks, with a stage of 1F1B as long as two stages of V-Half, and passes of unequal lengths."""
    usual = simulate(make_schedule("1f1b", 16, 64), Costs(2.0, 2.4, 1.8))
    half = simulate(make_schedule("v-half", 16, 64), Costs(1.0, 1.2, 0.9))
    assert half.makespan < usual.makespan
    assert max(half.peak_activations) / 2 == 9 < 0.6 * max(usual.peak_activations)
