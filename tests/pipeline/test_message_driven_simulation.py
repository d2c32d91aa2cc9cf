"""Simulations of message-driven pipelines, whose ranks run what has arrived."""

from collections.abc import Callable
from itertools import pairwise
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.pipeline import falling_caps
from optimus.errors import UserError
from optimus.pipeline import Costs, make_schedule, simulate
from optimus.pipeline.message_driven_simulation import simulate_message_driven
from optimus.pipeline.ready import Preference
from optimus.pipeline.schedule import Kind
from optimus.pipeline.timeline import Timeline

MICROBATCHES, DRAWS = 64, 8
Run = Callable[[int, Costs], Timeline]


def driven(factor: float, prefer: Preference) -> Run:
    return lambda stages, costs: simulate_message_driven(
        stages, MICROBATCHES, costs, caps=falling_caps(stages, factor), prefer=prefer
    )


RUNS: dict[str, Run] = {
    "1F1B, warm-up x2": lambda stages, costs: simulate(
        make_schedule("1f1b", stages, MICROBATCHES, warmup_factor=2.0), costs
    ),
    "cap x1, backward first": driven(1, "backward"),
    "cap x1, forward first": driven(1, "forward"),
    "cap x2, backward first": driven(2, "backward"),
    "cap x2, forward first": driven(2, "forward"),
    "one limit 2p": lambda stages, costs: simulate_message_driven(
        stages, MICROBATCHES, costs, caps=2 * stages, prefer="arrival"
    ),
}


@pytest.mark.parametrize(
    ("stages", "jitter", "link", "expected"),
    [
        (4, 0.0, 0.0, (1.00, 1.00, 1.00, 1.00, 1.00, 1.00)),
        (4, 0.0, 0.3, (1.14, 1.00, 1.00, 1.14, 1.14, 1.14)),
        (4, 0.2, 0.1, (1.13, 0.95, 0.98, 1.10, 1.14, 1.13)),
        (4, 0.2, 0.3, (1.19, 0.96, 0.98, 1.16, 1.20, 1.19)),
        (8, 0.2, 0.1, (1.15, 0.91, 0.96, 1.11, 1.16, 1.14)),
    ],
)
def test_speed_against_1f1b(stages: int, jitter: float, link: float, expected: tuple[float, ...]) -> None:
    """Speeds equal those of an independent simulation (64 microbatches, means of 20 draws)."""
    usual = make_schedule("1f1b", stages, MICROBATCHES)
    ratios: dict[str, list[float]] = {name: [] for name in RUNS}
    for seed in range(DRAWS if jitter else 1):
        costs = Costs(jitter=jitter, link=link, seed=seed)
        base = simulate(usual, costs).makespan
        for name, run in RUNS.items():
            ratios[name].append(base / run(stages, costs).makespan)
    for (name, found), value in zip(ratios.items(), expected):
        assert mean(found) == pytest.approx(value, rel=0.02), name


@given(
    ranks=st.integers(1, 5),
    stages_per_rank=st.integers(1, 3),
    microbatches=st.integers(1, 9),
    cap=st.integers(1, 6),
    prefer=st.sampled_from(["forward", "backward", "arrival"]),
    link=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 9),
)
@settings(max_examples=80, deadline=None)
def test_everything_is_computed_once_when_it_can_be(
    ranks: int, stages_per_rank: int, microbatches: int, cap: int, prefer: Preference, link: float, seed: int
) -> None:
    """No cap and no preference leads to a deadlock, to more live activations than the cap, or to a premature
    computation."""
    costs = Costs(link=link, jitter=0.3, seed=seed)
    timeline = simulate_message_driven(
        ranks, microbatches, costs, caps=cap, prefer=prefer, stages_per_rank=stages_per_rank
    )
    stages = ranks * stages_per_rank
    times = {event[1:4]: (event.start, event.end) for events in timeline.computations for event in events}
    assert len(times) == 2 * stages * microbatches == sum(map(len, timeline.computations))
    for microbatch in range(microbatches):
        for stage in range(stages):
            if stage:
                wait = link if ranks > 1 else 0.0
                ahead, behind = (Kind.FORWARD, stage - 1, microbatch), (Kind.BACKWARD, stage, microbatch)
                assert times[Kind.FORWARD, stage, microbatch][0] >= times[ahead][1] + wait
                assert times[Kind.BACKWARD, stage - 1, microbatch][0] >= times[behind][1] + wait
    last = stages - 1
    assert all(times[Kind.BACKWARD, last, k][0] >= times[Kind.FORWARD, last, k][1] for k in range(microbatches))
    for events in timeline.computations:
        assert all(event.end <= following.start for event, following in pairwise(events))
    assert max(timeline.peak_activations) <= cap * stages_per_rank


def test_cap_per_stage_is_kept() -> None:
    caps = [6, 5, 3, 2]
    timeline = simulate_message_driven(4, 20, Costs(jitter=0.4), caps=caps)
    assert timeline.peak_activations == caps


def test_the_limit_of_the_dissertation_is_the_number_of_stages() -> None:
    timeline = simulate_message_driven(4, 20)
    assert timeline.peak_activations[0] == 4
    assert timeline.events == simulate_message_driven(4, 20, caps=4).events


@pytest.mark.parametrize(
    ("caps", "message"),
    [
        (0, "cap 0 admits no microbatch; give at least 1"),
        ([2, 2, 0, 1], "admits no microbatch"),
        ([4, 3, 2], "3 caps for 4 stages; give one per stage"),
    ],
)
def test_caps_that_cannot_be(caps: int | list[int], message: str) -> None:
    with pytest.raises(UserError) as caught:
        simulate_message_driven(4, 8, caps=caps)
    assert message in str(caught.value)
