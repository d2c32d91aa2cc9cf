"""Which blocks of a model each stage of a pipeline holds."""

from collections.abc import Sequence

from optimus.errors import UserError


def divide(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> list[range]:
    """Blocks of each stage, in order, so that the most expensive stage is as cheap as it can be.

    `costs` are those of the blocks; `first` and `last` those of what the first and the last stage hold besides
    (embedding, output layer). Of equal divisions the one that is even takes precedence. Every stage has a block at least.

    Raises:
        UserError: there are fewer blocks than stages.
    """
    blocks = len(costs)
    if blocks < stages:
        raise UserError(
            f"a model of {blocks} blocks cannot be divided into {stages} pipeline stages: use at most {blocks} "
            "(parallel.pipeline times parallel.stages_per_rank)"
        )
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def stage_cost(stage: int, start: int, end: int) -> float:
        return sums[end] - sums[start] + first * (stage == 0) + last * (stage == stages - 1)

    # best[n]: (the largest cost, sum of the squares, ends) of the first stages over the first n blocks
    best: list[tuple[float, float, tuple[int, ...]] | None] = [(0.0, 0.0, ()), *([None] * blocks)]
    for stage in range(stages):
        following: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (blocks + 1)
        for end in range(stage + 1, blocks - (stages - stage - 1) + 1):
            options = []
            for start in range(stage, end):
                before = best[start]
                if before is not None:
                    cost = stage_cost(stage, start, end)
                    options.append((max(before[0], cost), before[1] + cost * cost, (*before[2], end)))
            following[end] = min(options)
        best = following
    found = best[blocks]
    assert found is not None
    return [range(start, end) for start, end in zip((0, *found[2]), found[2])]
