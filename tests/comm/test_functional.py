"""Differentiable collectives equal the same operation on the rows of all ranks in one process."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from optimus.comm import Group, Groups
from optimus.comm.functional import (
    all_gather_rows,
    all_gather_uneven_rows,
    all_reduce_autograd,
    all_to_all_rows,
    columns_to_rows,
    copy_to_group,
    join_rows,
    reduce_from_group,
    reduce_scatter_rows,
    reduce_scatter_uneven_rows,
    rows_to_columns,
    split_rows,
)
from optimus.mesh import Mesh
from optimus.testing import run_ranks

H = 3


def rows(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns small whole numbers, whose sums are exact in any type and order."""
    return torch.randint(-8, 8, (count, H), generator=torch.Generator().manual_seed(rank)).to(dtype)


def sent(ranks: int) -> list[list[int]]:
    """Returns the numbers of rows sent from rank i to rank j; some are zero, and the last rank sends none."""
    return [[(i + 2 * j) % 3 if i < ranks - 1 else 0 for j in range(ranks)] for i in range(ranks)]


def run(operation: Callable[[Tensor], Tensor], x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Returns (output, gradient of x) for an output gradient that depends on `seed`; asserts that x does not change."""
    x.requires_grad_()
    before = x.detach().clone()
    y = operation(x)
    grad = rows(seed, len(y), x.dtype)
    kept = grad.clone()
    (x_grad,) = torch.autograd.grad(y, x, grad)
    assert x.equal(before)
    assert grad.equal(kept)
    return y.detach(), x_grad


def on_a_rank(mesh: Mesh, axis: str, tokens: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    groups = Groups(mesh)
    group, rank = groups.along(axis), groups.rank
    send = sent(group.size)
    there, back = send[group.rank], [row[group.rank] for row in send]
    return [
        run(lambda x: all_gather_rows(x, group), rows(rank, tokens, dtype), 100 + rank),
        run(lambda x: reduce_scatter_rows(x, group), rows(rank, tokens * group.size, dtype), 100 + rank),
        run(lambda x: all_to_all_rows(x, there, back, group), rows(rank, sum(there), dtype), 100 + rank),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("mesh", "axis"), [(Mesh(dp=2), "dp"), (Mesh(dp=3), "dp"), (Mesh(dp=4, ep=2), "ep"), (Mesh(dp=4, ep=2), "edp")]
)
@pytest.mark.parametrize("tokens", [0, 5])
def test_values_and_gradients(mesh: Mesh, axis: str, tokens: int, dtype: torch.dtype) -> None:
    results = run_ranks(on_a_rank, mesh.size, mesh, axis, tokens, dtype)
    for ranks in mesh.groups((axis,)):
        n = len(ranks)
        gathered, summed, exchanged = ([results[rank][i] for rank in ranks] for i in range(3))

        whole = torch.cat([rows(rank, tokens, dtype) for rank in ranks])
        whole_grad = sum(rows(100 + rank, n * tokens, dtype) for rank in ranks)
        total = sum(rows(rank, n * tokens, dtype) for rank in ranks)
        total_grad = torch.cat([rows(100 + rank, tokens, dtype) for rank in ranks])
        assert isinstance(whole_grad, Tensor)
        assert isinstance(total, Tensor)
        for place in range(n):
            own = slice(place * tokens, (place + 1) * tokens)
            assert gathered[place][0].equal(whole)
            assert gathered[place][1].equal(whole_grad[own])
            assert summed[place][0].equal(total[own])
            assert summed[place][1].equal(total_grad)

        send = sent(n)
        parts = [rows(rank, sum(send[i]), dtype).split(send[i]) for i, rank in enumerate(ranks)]
        back = [[send[i][j] for i in range(n)] for j in range(n)]
        grads = [rows(100 + rank, sum(back[j]), dtype).split(back[j]) for j, rank in enumerate(ranks)]
        for place in range(n):
            assert exchanged[place][0].equal(torch.cat([part[place] for part in parts]))
            assert exchanged[place][1].equal(torch.cat([grad[place] for grad in grads]))


def test_a_group_of_one_is_the_identity() -> None:
    x, alone = torch.ones(2, H), Group([0], 0)
    assert all_gather_rows(x, alone) is x
    assert reduce_scatter_rows(x, alone) is x
    assert all_to_all_rows(x, [2], [2], alone) is x


def without_gradients() -> bool:
    group = Groups(Mesh(dp=2)).world
    x = torch.ones(2, H, requires_grad=True)
    with torch.no_grad():
        results = [all_gather_rows(x, group), reduce_scatter_rows(x, group), all_to_all_rows(x, [1, 1], [1, 1], group)]
    return any(result.requires_grad for result in results)


def test_no_grad_makes_no_graph() -> None:
    assert not any(run_ranks(without_gradients, 2))


# ---- Shared tensors, columns, and different numbers of rows ----


def shared_on_a_rank(ranks: int) -> dict[str, tuple[Tensor, Tensor]]:
    group = Groups(Mesh(dp=ranks)).world
    rank, uneven = group.rank, [3, 0, 2, 1][:ranks]
    shared, own = rows(0, 2 * ranks), rows(rank, 2)
    columns = rows(rank, 2 * ranks).repeat(1, 2)
    seed = 100 + rank
    return {
        "split": run(lambda x: split_rows(x, group), shared, seed),
        "join": run(lambda x: join_rows(x, group), own, 100),
        "over": run(lambda x: all_reduce_autograd(x, group), own, seed),
        "to_shared": run(lambda x: reduce_from_group(x, group), own, 100),
        "from_shared": run(lambda x: copy_to_group(x, group), shared, seed),
        "gather": run(lambda x: all_gather_uneven_rows(x, uneven, group), rows(rank, uneven[rank]), seed),
        "sum": run(lambda x: reduce_scatter_uneven_rows(x, uneven, group), rows(rank, sum(uneven)), seed),
        "there_and_back": run_columns(group, columns),
    }


def run_columns(group: Group, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (the rows gathered from columns, the gradient of x for an output gradient equal to these rows)."""
    x.requires_grad_()
    y = columns_to_rows(x, group)
    assert rows_to_columns(y, group).equal(x)
    (x_grad,) = torch.autograd.grad(y, x, y.detach())
    return y.detach(), x_grad


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shared_tensors_columns_and_uneven_rows(ranks: int) -> None:
    """The gradient of a tensor shared by all ranks is the same on every rank, and covers all uses of the tensor."""
    results = run_ranks(shared_on_a_rank, ranks, ranks)
    everyone, uneven = range(ranks), [3, 0, 2, 1][:ranks]
    own, shared = [rows(rank, 2) for rank in everyone], rows(0, 2 * ranks)
    own_grads = [rows(100 + rank, 2) for rank in everyone]
    total, total_grad = torch.stack(own).sum(0), torch.stack(own_grads).sum(0)
    wide = torch.cat([rows(rank, 2 * ranks).repeat(1, 2) for rank in everyone], 1)
    parts = [rows(rank, uneven[rank]) for rank in everyone]
    wholes = torch.stack([rows(rank, sum(uneven)) for rank in everyone]).sum(0)
    gather_grad = torch.stack([rows(100 + rank, sum(uneven)) for rank in everyone]).sum(0)
    sum_grad = torch.cat([rows(100 + rank, uneven[rank]) for rank in everyone])
    for rank, found in enumerate(results):
        mine, ends = slice(2 * rank, 2 * rank + 2), slice(sum(uneven[:rank]), sum(uneven[: rank + 1]))
        right = {
            "split": (shared[mine], torch.cat(own_grads)),
            "join": (torch.cat(own), rows(100, 2 * ranks)[mine]),
            "over": (total, total_grad),
            "to_shared": (total, rows(100, 2)),
            "from_shared": (shared, torch.stack([rows(100 + other, 2 * ranks) for other in everyone]).sum(0)),
            "gather": (torch.cat(parts), gather_grad[ends]),
            "sum": (wholes[ends], sum_grad),
            "there_and_back": (wide[mine], rows(rank, 2 * ranks).repeat(1, 2)),
        }
        for name, (value, grad) in found.items():
            assert value.equal(right[name][0]), name
            assert grad.equal(right[name][1]), name
