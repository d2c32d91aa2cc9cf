"""Every collective is right for tensors around every size threshold, in every type that is sent."""

import random

import pytest
import torch
from torch import Tensor

from helpers.sweep import in_turns
from optimus.comm import Groups
from optimus.comm.algorithms import LONG_SUM
from optimus.comm.group import Group
from optimus.kernels.row_sum import TILE
from optimus.mesh import Mesh
from optimus.testing import run_ranks

CASES = [
    (2, torch.int32),
    (3, torch.int32),
    (2, torch.int64),
    (2, torch.bfloat16),
    (3, torch.bfloat16),
    (3, torch.float32),
]


def sizes(ranks: int, dtype: torch.dtype) -> list[int]:
    """Returns element counts, multiples of the ranks, around each threshold of the whole tensor and of a rank's shard."""
    near = random.Random(ranks)
    long = LONG_SUM // dtype.itemsize
    edges = [long, long // ranks * ranks, long + near.randrange(TILE), TILE * ranks, 3 * TILE * ranks]
    return sorted({(edge // ranks + off) * ranks for edge in edges for off in (-1, 0, 1)} | {ranks})


def of(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Returns numbers whose sums are exact: integers of all bits, and floats that are small whole numbers."""
    generator = torch.Generator().manual_seed(1000 * rank + size % 997)
    if dtype.is_floating_point:
        return torch.randint(-8, 8, (size,), generator=generator, dtype=torch.int8).to(dtype)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, (size,), generator=generator, dtype=dtype)


def wrong(ranks: int, dtype: torch.dtype) -> list[str]:
    """Returns the collectives, with their sizes, whose results differ from those of one process."""
    group = Groups(Mesh(dp=ranks)).world
    return [
        f"{name} of {size} elements"
        for size in sizes(ranks, dtype)
        for name, (found, right) in tried(group, [of(rank, size, dtype) for rank in range(ranks)]).items()
        if not torch.equal(found, right)
    ]


def tried(group: Group, given: list[Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns (result on this rank, right result) of each collective for the ranks' tensors."""
    n, rank, own = group.size, group.rank, given[group.rank]
    part = own.numel() // n
    here = slice(rank * part, (rank + 1) * part)
    total = given[0].clone()
    for other in given[1:]:
        total += other  # integers wrap around, as in the collectives
    summed, odd, rooted, told = (own.clone() for _ in range(4))
    scattered, gathered, came = own.new_empty(part), torch.empty_like(own), torch.empty_like(own)
    odd = torch.cat([odd, odd[:1]])  # a size that the ranks do not divide
    group.all_reduce(summed)
    group.all_reduce(odd)
    group.reduce_scatter_async(own, scattered).wait()
    within = own.clone()
    group.reduce_scatter_async(within, within[here]).wait()
    group.all_gather(gathered, own[here])
    group.shift_async(own, came).wait()
    group.broadcast(told, n - 1)
    group.reduce_async(rooted, n - 1).wait()
    exchanged = group.all_to_all(own, [part] * n, [part] * n)
    return {
        "all_reduce": (summed, total),
        "all_reduce of no multiple": (odd, torch.cat([total, total[:1]])),
        "reduce_scatter": (scattered, total[here]),
        "reduce_scatter in place": (within[here], total[here]),
        "all_gather": (gathered, torch.cat([tensor[r * part : (r + 1) * part] for r, tensor in enumerate(given)])),
        "shift": (came, given[rank - 1]),
        "broadcast": (told, given[n - 1]),
        "reduce": (rooted if rank == n - 1 else total, total),
        "all_to_all": (exchanged, torch.cat([tensor[here] for tensor in given])),
    }


@pytest.mark.parametrize(("ranks", "dtype"), in_turns([*CASES], 4, always=2))
def test_collectives_are_exact_at_every_size(ranks: int, dtype: torch.dtype) -> None:
    assert run_ranks(wrong, ranks, ranks, dtype) == [[]] * ranks


def test_the_sizes_lie_on_both_sides_of_every_threshold() -> None:
    for ranks, dtype in CASES:
        found = sizes(ranks, dtype)
        assert {size * dtype.itemsize >= LONG_SUM for size in found} == {True, False}
        assert {TILE - 1, TILE, TILE + 1} <= {size // ranks for size in found}
        assert LONG_SUM // dtype.itemsize // ranks * ranks in found
