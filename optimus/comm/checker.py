"""Proves that the rounds of all ranks carry out a collective.

A `check_*` function raises `ValueError` for wrong rounds.
"""

from collections.abc import Sequence

from optimus.comm.schedules import Round


def check_gather(ranks: Sequence[Sequence[Round]]) -> None:
    """Proves an all-gather: every rank receives each block of the other ranks once."""
    have = [{rank} for rank in range(len(ranks))]
    _check(ranks, have, [set(range(len(ranks)))] * len(ranks))


def check_exchange(ranks: Sequence[Sequence[Round]]) -> None:
    """Proves an all-to-all: every rank gets its blocks from all ranks."""
    every = range(len(ranks))
    have = [{rank * len(ranks) + target for target in every} for rank in every]
    _check(ranks, have, [{source * len(ranks) + rank for source in every} for rank in every])


def check_reduction(ranks: Sequence[Sequence[Round]]) -> None:
    """Proves a reduce-scatter: every rank's block gets every addend once, and all messages that a rank receives in a
    round contain the same blocks."""
    every = range(len(ranks))
    sums = [{block: {rank} for block in every} for rank in every]
    for number in range(max(map(len, ranks))):
        before = [{block: set(sum_) for block, sum_ in theirs.items()} for theirs in sums]
        for rank, peer, blocks in _messages(ranks, number):
            for block in blocks:
                _require(
                    not before[rank][block] & sums[peer][block], f"{rank} to {peer}: block {block} is counted twice"
                )
                sums[peer][block] |= before[rank][block]
        for rank in every:
            rounds = ranks[rank][number : number + 1]
            received = {message.blocks for each in rounds for message in each.receives}
            _require(len(received) <= 1, f"round {number}: {rank} receives different blocks")
    _require(all(len(sums[rank][rank]) == len(ranks) for rank in every), "an addend is missing")


def _check(ranks: Sequence[Sequence[Round]], have: list[set[int]], wanted: Sequence[set[int]]) -> None:
    for number in range(max(map(len, ranks))):
        before = [set(theirs) for theirs in have]
        for rank, peer, blocks in _messages(ranks, number):
            _require(set(blocks) <= before[rank], f"round {number}: {rank} sends {peer} what it does not have")
            _require(not set(blocks) & have[peer], f"round {number}: {rank} sends {peer} what it has")
            have[peer] |= set(blocks)
    _require(all(needed <= theirs for needed, theirs in zip(wanted, have)), "a block is missing")


def _messages(ranks: Sequence[Sequence[Round]], number: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """Returns (sender, receiver, blocks) of each message of a round."""
    rounds = [(rank, rounds[number]) for rank, rounds in enumerate(ranks) if number < len(rounds)]
    sent = [(rank, *message) for rank, each in rounds for message in each.sends]
    awaited = [(message.peer, rank, message.blocks) for rank, each in rounds for message in each.receives]
    _require(len(set(sent)) == len(sent), f"round {number}: a message is sent twice")
    _require(sorted(sent) == sorted(awaited), f"round {number}: the messages sent are not those awaited")
    for rank, peer, blocks in sent:
        _require(len(set(blocks)) == len(blocks), f"round {number}: {rank} sends {peer} a block twice")
    return sent


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
