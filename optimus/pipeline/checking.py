"""Proves that a schedule is complete, in order and free of deadlock."""

from collections.abc import Iterator

from optimus.pipeline.replay import ScheduleError
from optimus.pipeline.schedule import VOCABULARY, Action, Kind, Schedule, partner


def check(schedule: Schedule) -> None:
    """Proves that a schedule is correct:

    - Every rank has each of its actions exactly once, and no other action.
    - Each action comes after the actions that it needs on its rank.
    - A rank receives the messages of another rank in the order in which that rank sends them.
    - All ranks finish, even if every send lasts until the receiving rank reaches the receive.

    Raises `ScheduleError` for an incorrect schedule.
    """
    for rank in range(schedule.ranks):
        _check_complete(schedule, rank)
        _check_order(schedule, rank)
    _check_channels(schedule)
    _check_rendezvous(schedule)


def _fail(schedule: Schedule, rank: int, text: str) -> ScheduleError:
    return ScheduleError(f"schedule {schedule.name}: rank {rank} {text}")


def _expected(schedule: Schedule, rank: int) -> Iterator[Action]:
    backward = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHTS) if schedule.splits_backward else (Kind.BACKWARD,)
    if schedule.splits_vocabulary:
        yield from (Action(kind, rank, number) for kind in VOCABULARY for number in range(schedule.microbatches))
    for stage in schedule.stages_of(rank):
        for microbatch in range(schedule.microbatches):
            for kind in (Kind.FORWARD, *backward):
                action = Action(kind, stage, microbatch)
                transfers = (schedule.receive_for(action), schedule.send_of(action))
                yield from (found for found in (action, *transfers) if found is not None)


def _check_complete(schedule: Schedule, rank: int) -> None:
    expected, seen = dict.fromkeys(_expected(schedule, rank)), set()
    for action in schedule.actions[rank]:
        if action not in expected:
            raise _fail(schedule, rank, f"has {action}, which does not belong to this rank")
        if action in seen:
            raise _fail(schedule, rank, f"has {action} twice")
        seen.add(action)
    for action in expected:
        if action not in seen:
            raise _fail(schedule, rank, f"lacks {action}")


def _needs(schedule: Schedule, action: Action) -> Iterator[Action]:
    """Yields the actions that must come before `action` on the same rank."""
    kind, stage, microbatch = action
    if kind.sends:
        yield schedule.made_for(action)
    elif kind.computes:
        received = schedule.receive_for(action)
        if received is not None:
            yield received
        rank = schedule.rank_of(stage)
        yield from (needed for needed in schedule.inputs_of(action) if schedule.rank_of(needed.stage) == rank)
        if kind is not Kind.FORWARD and not kind.is_vocabulary:
            yield Action(Kind.FORWARD, stage, microbatch)
    if microbatch:
        yield Action(kind, stage, microbatch - 1)


def _check_order(schedule: Schedule, rank: int) -> None:
    done: set[Action] = set()
    for action in schedule.actions[rank]:
        for needed in _needs(schedule, action):
            if needed not in done:
                raise _fail(schedule, rank, f"has {action} before {needed}")
        done.add(action)


def _check_channels(schedule: Schedule) -> None:
    """Checks that the nth receive from a rank matches that rank's nth send to the receiver."""
    sent: dict[tuple[int, int], list[Action]] = {}
    received: dict[tuple[int, int], list[Action]] = {}
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind.sends:
                sent.setdefault((rank, schedule.peer(action)), []).append(action)
            elif not action.kind.computes:
                received.setdefault((schedule.peer(action), rank), []).append(action)
    for (source, target), sends in sent.items():
        for number, (send, receive) in enumerate(zip(sends, received[source, target])):
            if partner(send) != receive:
                text = f"sends message {number} to rank {target} by {send}, but rank {target} receives it by {receive}"
                raise _fail(schedule, source, text)


def _check_rendezvous(schedule: Schedule) -> None:
    done: set[Action] = set()
    position = [0] * schedule.ranks

    def current(rank: int) -> Action | None:
        actions = schedule.actions[rank]
        return actions[position[rank]] if position[rank] < len(actions) else None

    ready = set(range(schedule.ranks))
    while ready:
        rank = ready.pop()
        while (action := current(rank)) is not None:
            if action.kind.computes:
                received = schedule.input_of(action)
                if not all(needed in done for needed in schedule.inputs_of(action) if needed != received):
                    break
                done.add(action)
                if schedule.splits_vocabulary:  # any rank may wait for this action
                    ready.update(range(schedule.ranks))
            else:
                peer = schedule.peer(action)
                if current(peer) != partner(action):
                    break
                position[peer] += 1
                ready.add(peer)
            position[rank] += 1
    stuck = [
        f"rank {rank} waits at {action} for {'other ranks' if action.kind.computes else f'rank {schedule.peer(action)}'}"
        for rank in range(schedule.ranks)
        if (action := current(rank)) is not None
    ]
    if stuck:
        raise ScheduleError(f"schedule {schedule.name}: deadlock: {'; '.join(stuck)}")
