"""Checks that the rounds of a collective are right; each function raises `AssertionError` for wrong ones."""

from collections.abc import Sequence

from optimus.comm.schedules import Round


def check_gather(ranks: Sequence[Sequence[Round]]) -> None:
    """Asserts that every rank gets every block once, from a rank that has it."""
    have = [{rank} for rank in range(len(ranks))]
    _check(ranks, have, [set(range(len(ranks)))] * len(ranks))


def check_exchange(ranks: Sequence[Sequence[Round]]) -> None:
    """Asserts that every rank gets each other rank's block for it, and sends only blocks that it has."""
    every = range(len(ranks))
    have = [{rank * len(ranks) + target for target in every} for rank in every]
    _check(ranks, have, [{source * len(ranks) + rank for source in every} for rank in every])


def check_reduction(ranks: Sequence[Sequence[Round]]) -> None:
    """Asserts that each rank's block gets every addend once, and that all messages to a rank in one round hold the same
    blocks."""
    every = range(len(ranks))
    sums = [{block: {rank} for block in every} for rank in every]
    for number in range(max(map(len, ranks))):
        before = [{block: set(sum_) for block, sum_ in theirs.items()} for theirs in sums]
        for rank, peer, blocks in _messages(ranks, number):
            for block in blocks:
                assert not before[rank][block] & sums[peer][block], f"{rank} to {peer}: block {block} is counted twice"
                sums[peer][block] |= before[rank][block]
        for rank in every:
            rounds = ranks[rank][number : number + 1]
            assert len({message.blocks for each in rounds for message in each.receives}) <= 1, f"{rank}: other blocks"
    assert all(len(sums[rank][rank]) == len(ranks) for rank in every), "an addend is missing"


def _check(ranks: Sequence[Sequence[Round]], have: list[set[int]], wanted: Sequence[set[int]]) -> None:
    for number in range(max(map(len, ranks))):
        before = [set(theirs) for theirs in have]
        for rank, peer, blocks in _messages(ranks, number):
            assert set(blocks) <= before[rank], f"round {number}: {rank} sends {peer} what it does not have"
            assert not set(blocks) & have[peer], f"round {number}: {rank} sends {peer} what it has"
            have[peer] |= set(blocks)
    assert all(needed <= theirs for needed, theirs in zip(wanted, have)), "a block is missing"


def _messages(ranks: Sequence[Sequence[Round]], number: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """Returns (sender, receiver, blocks) of a round; sender and receiver must agree on each message."""
    rounds = [(rank, rounds[number]) for rank, rounds in enumerate(ranks) if number < len(rounds)]
    sent = [(rank, *message) for rank, each in rounds for message in each.sends]
    awaited = [(message.peer, rank, message.blocks) for rank, each in rounds for message in each.receives]
    assert len(set(sent)) == len(sent), f"round {number}: something is sent twice"
    assert set(sent) == set(awaited), f"round {number}: sent is not what is awaited"
    return sent
