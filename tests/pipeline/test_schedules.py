"""Every schedule passes `check`, runs on threads, and has the bubble and the memory of its paper."""

import sys
from itertools import accumulate
from pathlib import Path
from queue import Empty, Queue
from threading import Thread

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers.plugin_tables import tables_restored
from optimus.errors import UserError
from optimus.pipeline import Costs, check, make_schedule, simulate
from optimus.pipeline.estimates import Live, live_microbatches
from optimus.pipeline.replay import ScheduleError
from optimus.pipeline.schedule import Action, Kind, Schedule, barriers, live_changes, partner
from optimus.pipeline.schedules import Sizes, schedules
from optimus.pipeline.schedules.interleaved import interleaved
from optimus.pipeline.transfers import with_transfers
from optimus.plugins import load_plugins

SIZES = [(1, 1), (1, 4), (2, 2), (2, 5), (3, 3), (3, 7), (4, 4), (4, 8), (4, 13), (7, 21), (8, 8), (8, 64)]


def live_activations(schedule: Schedule) -> list[list[int]]:
    """Returns the live activations of all stages of each rank, after each of its actions."""
    return [list(accumulate(change for _, change in live_changes(actions))) for actions in schedule.actions]


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Returns the peak live activations of each rank of a valid schedule."""
    check(schedule)
    return tuple(map(max, live_activations(schedule)))


@given(
    name=st.sampled_from(sorted(schedules())),
    ranks=st.integers(1, 9),
    microbatches=st.integers(1, 24),
    stages_per_rank=st.integers(2, 4),
    warmup_factor=st.floats(1, 4),
)
@settings(max_examples=80, deadline=None)
def test_check_passes_on_any_size(
    name: str, ranks: int, microbatches: int, stages_per_rank: int, warmup_factor: float
) -> None:
    assume(name != "interleaved-1f1b" or microbatches >= ranks)
    schedule = make_schedule(
        name,
        ranks,
        microbatches,
        stages_per_rank if name == "interleaved-1f1b" else None,
        warmup_factor if name == "1f1b" else 1.0,
    )
    assert [lives[-1] for lives in live_activations(schedule)] == [0] * ranks
    assert list(peak_activations(schedule)) == simulate(schedule).peak_activations
    messages = sum(action.kind.sends for actions in schedule.actions for action in actions)
    assert messages == 2 * microbatches * sum(
        schedule.rank_of(stage) != schedule.rank_of(stage + 1) for stage in range(schedule.stages - 1)
    )


@pytest.mark.parametrize("name", schedules())
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 4), (3, 7), (4, 8)])
def test_threads_run_it_with_sends_that_wait_for_their_receives(name: str, ranks: int, microbatches: int) -> None:
    """A minimal executor. Messages carry their identity, which receivers compare with the expected one."""
    schedule = make_schedule(name, ranks, microbatches)
    pairs = [(source, target) for source in range(ranks) for target in range(ranks)]
    content: dict[tuple[int, int], Queue[Action]] = {pair: Queue() for pair in pairs}
    taken: dict[tuple[int, int], Queue[None]] = {pair: Queue() for pair in pairs}
    ends: list[str] = []

    def run(rank: int) -> None:
        try:
            for action in schedule.actions[rank]:
                if action.kind.sends:
                    channel = rank, schedule.peer(action)
                    content[channel].put(action)
                    taken[channel].get(timeout=120)
                elif not action.kind.computes:
                    channel = schedule.peer(action), rank
                    found = content[channel].get(timeout=120)
                    taken[channel].put(None)
                    assert partner(found) == action
            ends.append("done")
        except Empty:
            ends.append(f"rank {rank} hangs")

    threads = [Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == ["done"] * ranks


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_bubble_and_memory_of_gpipe_and_1f1b(ranks: int, microbatches: int) -> None:
    """Bubble and memory do not depend on the ratio of forward and backward times."""
    costs = Costs(forward=1.0, backward_input=1.5, backward_weights=0.25)
    for name in ("gpipe", "1f1b"):
        timeline = simulate(make_schedule(name, ranks, microbatches), costs)
        assert timeline.bubble == pytest.approx((ranks - 1) / microbatches)
        assert timeline.bubbles == pytest.approx([(ranks - 1) / microbatches] * ranks)
    assert peak_activations(make_schedule("gpipe", ranks, microbatches)) == (microbatches,) * ranks
    expected = tuple(min(ranks - rank, microbatches) for rank in range(ranks))
    assert peak_activations(make_schedule("1f1b", ranks, microbatches)) == expected


@pytest.mark.parametrize("stages_per_rank", [2, 3, 5])
@pytest.mark.parametrize(("ranks", "rounds"), [(1, 2), (2, 1), (2, 4), (3, 2), (4, 2), (8, 3)])
def test_bubble_and_memory_of_interleaving(ranks: int, rounds: int, stages_per_rank: int) -> None:
    schedule = make_schedule("interleaved-1f1b", ranks, ranks * rounds, stages_per_rank)
    assert simulate(schedule).bubble == pytest.approx((ranks - 1) / (stages_per_rank * ranks * rounds))
    most = ranks * rounds * stages_per_rank
    expected = [min(most, (stages_per_rank + 1) * ranks - 2 * rank - 1) for rank in range(ranks)]
    assert list(peak_activations(schedule)) == expected


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (4, 5), (4, 7), (8, 9)])
def test_interleaving_with_a_round_that_is_not_whole(ranks: int, microbatches: int) -> None:
    """An incomplete round is valid, and takes less time than a complete one."""
    timeline = simulate(interleaved(Sizes(ranks, microbatches, 2)))
    whole = simulate(interleaved(Sizes(ranks, -(-microbatches // ranks) * ranks, 2)))
    assert (ranks - 1) / (2 * microbatches) < timeline.bubble < (ranks - 1) / microbatches
    assert timeline.makespan < whole.makespan


@pytest.mark.parametrize(("ranks", "microbatches"), [size for size in SIZES if size[0] > 1])
def test_zero_bubble_schedules(ranks: int, microbatches: int) -> None:
    usual = simulate(make_schedule("1f1b", ranks, microbatches))
    for name, share, memory in (("zb-h1", 3, ranks), ("zbv", 6, 2 * ranks)):
        schedule = make_schedule(name, ranks, microbatches)
        timeline = simulate(schedule)
        assert timeline.bubble == pytest.approx((ranks - 1) / (share * microbatches))
        assert timeline.bubble < usual.bubble
        # the maximum of 1F1B; a stage of zbv has half the size
        assert max(peak_activations(schedule)) == min(memory, memory // ranks * microbatches)


@pytest.mark.parametrize("ranks", [2, 5, 8, 12])
def test_zbv_reaches_its_bubble_for_every_number_from_the_ranks(ranks: int) -> None:
    for microbatches in range(ranks, 3 * ranks + 2):
        assert simulate(make_schedule("zbv", ranks, microbatches)).makespan == 6 * microbatches + ranks - 1


def test_a_deeper_warm_up_keeps_more_and_hides_links() -> None:
    usual, deep = make_schedule("1f1b", 4, 32), make_schedule("1f1b", 4, 32, warmup_factor=2.0)
    assert peak_activations(usual) == (4, 3, 2, 1)
    assert peak_activations(deep) == (8, 6, 4, 2)
    assert peak_activations(make_schedule("1f1b", 4, 32, warmup_factor=1.5)) == (6, 4, 3, 1)
    assert simulate(deep).bubble == simulate(usual).bubble
    links = Costs(link=0.3)
    assert simulate(deep, links).bubble < 0.5 * simulate(usual, links).bubble


def test_what_1f1b_is() -> None:
    """The actions of the last of two stages, written out: a send and a receive of the steady state are adjacent."""
    words = [f"{action.kind} {action.microbatch}" for action in make_schedule("1f1b", 2, 3).actions[1]]
    assert words == [
        "receive_forward 0", "forward 0", "receive_forward 1", "backward 0", "send_backward 0", "forward 1", "backward 1",
        "send_backward 1", "receive_forward 2", "forward 2", "backward 2", "send_backward 2",
    ]  # fmt: skip


def test_placement() -> None:
    loop, v = make_schedule("interleaved-1f1b", 4, 4, 3), make_schedule("zbv", 4, 4)
    assert [loop.stages_of(rank) for rank in range(4)] == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    assert [v.stages_of(rank) for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    # Stages 3 and 4, where the v turns, are both on rank 3.
    assert not [action for action in v.actions[3] if action.kind is Kind.SEND_FORWARD and action.stage == 3]


def test_an_order_that_cannot_proceed() -> None:
    """An order with backward before forward on the last stage is refused."""
    orders = [[Action(kind, rank, 0) for kind in (Kind.BACKWARD, Kind.FORWARD)] for rank in range(2)]
    with pytest.raises(ScheduleError, match=r"schedule x: rank 0 waits at backward\(stage 0, microbatch 0\)"):
        with_transfers(Schedule("x", 2, 1, ()).in_order(orders))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"name": "1f1"}, "schedule '1f1' does not exist; did you mean '1f1b'?"),
        ({"name": "best"}, "valid: 1f1b, gpipe, interleaved-1f1b, v-half, v-min, zb-h1, zbv"),
        ({"ranks": 0}, "0 ranks; give at least one"),
        ({"microbatches": 0}, "0 microbatches; give at least one"),
        ({"stages_per_rank": 0}, "0 stages per rank; give at least one"),
        ({"stages_per_rank": 2}, "the number of stages per rank cannot be 2; use 1, or schedule interleaved-1f1b"),
        ({"name": "zbv", "stages_per_rank": 3}, "the number of stages per rank cannot be 3; use 2"),
        ({"name": "interleaved-1f1b", "stages_per_rank": 1}, "nothing to interleave; use 2"),
        (
            {"name": "interleaved-1f1b", "microbatches": 3},
            "the number of microbatches, 3, is below the number of ranks, 4; use at least 4",
        ),
        ({"name": "gpipe", "warmup_factor": 2.0}, "a warm-up factor other than 1 is an option of 1f1b only"),
        ({"warmup_factor": 0.5}, "warm-up factor 0.5 is too small to fill the pipeline; use at least 1"),
    ],
)
def test_what_cannot_be(words: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        make_schedule(**{"name": "1f1b", "ranks": 4, "microbatches": 8, **words})  # type: ignore[arg-type]
    assert message in str(caught.value)


# ---- The table ----


@pytest.mark.parametrize("vocabulary", [0, 1, 2])
@pytest.mark.parametrize("name", [name for name, row in schedules().items() if row.live])
def test_a_row_says_what_its_order_keeps(name: str, vocabulary: int) -> None:
    live = schedules()[name].live
    assert live is not None
    for ranks, microbatches in SIZES[2:]:
        sizes = Sizes(ranks, microbatches, ahead=barriers(vocabulary))
        peaks = peak_activations(make_schedule(name, ranks, microbatches, vocabulary=vocabulary))
        assert peaks == tuple(min(microbatches, live(sizes, rank)) for rank in range(ranks))


MADE_UP = """
from optimus.pipeline.schedules import ScheduleRow
from optimus.pipeline.schedules.gpipe import gpipe
from optimus.pipeline.schedules.one_f_one_b import one_f_one_b

ROWS = [
    ScheduleRow("made-up", gpipe, live=lambda sizes, rank: sizes.microbatches),
    ScheduleRow("deep", one_f_one_b, deepens=True),
]
"""


def test_a_schedule_is_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A schedule in one file is made, checked, simulated and planned without any other change."""
    (tmp_path / "made_up.py").write_text(MADE_UP)
    monkeypatch.syspath_prepend(tmp_path)
    with tables_restored():
        load_plugins(["made_up"])
        schedule = make_schedule("made-up", 3, 5)
        assert peak_activations(schedule) == (5, 5, 5)
        assert simulate(schedule).bubble == pytest.approx(2 / 5)
        assert live_microbatches("made-up", 3, 5, 1) == ((Live((5,), (0,)),),) * 3
        deep = live_microbatches("deep", 3, 20, 1, warmup_factor=3.0)  # without a closed form
        assert deep == live_microbatches("1f1b", 3, 20, 1, warmup_factor=3.0)
        assert deep != live_microbatches("deep", 3, 20, 1)
    sys.modules.pop("made_up")


BROKEN = """
from optimus.pipeline.schedules import ScheduleRow
from optimus.pipeline.schedules.gpipe import gpipe

def fails(*_):
    raise ValueError("one\\ntwo")

ROWS = [ScheduleRow("made", fails), ScheduleRow("text", lambda sizes: "F B"), ScheduleRow("lives", gpipe, live=fails)]
"""


def test_the_code_of_a_row_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken_rows.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    with tables_restored():
        load_plugins(["broken_rows"])
        for name, message in (
            ("made", "its function make failed (ValueError: one two): correct its code"),
            ("text", "its function make returns a str: return a Schedule"),
        ):
            with pytest.raises(UserError) as caught:
                make_schedule(name, 2, 4)
            assert str(caught.value) == f"schedule {name}: {message}"
        with pytest.raises(UserError, match=r"schedule lives: its function live failed \(ValueError: one two\)"):
            live_microbatches("lives", 2, 4, 1)
    sys.modules.pop("broken_rows")
