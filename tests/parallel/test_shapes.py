"""Runs on shapes alone count live bytes, have real integers, and draw experts as often as the load asks for."""

import pytest
import torch

from optimus.mesh import Mesh
from optimus.parallel.shapes import ShapeGroups, Shapes


def shape(*sizes: int) -> torch.Tensor:
    return torch.empty(sizes, device="meta")


def test_bytes_are_those_of_tensors_that_are_alive() -> None:
    with Shapes() as shapes:
        x = shape(4, 8)
        y = x + 1
        assert shapes.alive == 2 * 4 * 8 * 4
        view, total = y.view(8, 4), torch.sum(y)
        assert shapes.alive == 2 * 4 * 8 * 4 + 4
        y.mul_(2)
        del x, y
        assert shapes.alive == 4 * 8 * 4 + 4
        del view, total
        assert shapes.alive == 0


def test_what_is_ignored_is_not_counted() -> None:
    weight = torch.nn.Parameter(shape(8, 8))
    with Shapes() as shapes:
        shapes.ignore(weight)
        x = shape(2, 8)
        y = x @ weight.T
        assert shapes.alive == x.nbytes + y.nbytes


def test_operations_that_are_known_give_the_same() -> None:
    """Cached operations give the same shapes, strides and dtypes the second time."""
    first, second = Shapes(), Shapes()
    with first:
        made = [shape(3, 5).T.to(torch.bfloat16), torch.cat([shape(2, 2), shape(1, 2)]), shape(4, 4).softmax(-1)]
    with second:
        again = [shape(3, 5).T.to(torch.bfloat16), torch.cat([shape(2, 2), shape(1, 2)]), shape(4, 4).softmax(-1)]
    for one, two in zip(made, again, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (two.shape, two.stride(), two.dtype)
    assert first.history == second.history


def test_integers_have_values() -> None:
    with Shapes():
        lengths = torch.arange(4, device="meta")
        rows = torch.zeros(int(lengths.sum()), 3)
        assert rows.is_meta
        assert lengths.tolist() == [0, 1, 2, 3]
        assert lengths.float().is_meta
        assert rows[lengths].shape == (4, 3)


@pytest.mark.parametrize(("load", "busy"), [(1.0, 1), (1.5, 4), (3.0, 2)])
def test_choices_are_drawn(load: float, busy: int) -> None:
    with Shapes(load, busy, repeats=2):
        _, chosen = shape(8192, 16).topk(2)
    assert all(len(set(row)) == 2 for row in chosen.tolist()[:50])
    assert chosen[:4096].equal(chosen[4096:])
    share = (chosen < busy).float().mean().item()
    assert share == pytest.approx(load * busy / 16, rel=0.1)


def test_other_ranks_have_what_this_one_has() -> None:
    group = ShapeGroups(Mesh(dp=4)).along("dp")
    assert (group.size, group.rank) == (4, 0)
    counts = torch.tensor([3, 1, 2, 0])
    assert group.all_to_all(counts, [1] * 4, [1] * 4).tolist() == [3] * 4
    rows = torch.arange(6)
    assert group.all_to_all(rows, [3, 1, 2, 0], [3] * 4).tolist() == [0, 1, 2] * 4
    gathered = torch.empty(8, dtype=torch.int64)
    group.all_gather(gathered, torch.tensor([5, 6]))
    assert gathered.tolist() == [5, 6] * 4
    assert group.all_gather_object("mine") == ["mine"] * 4
    assert group.all_to_all(shape(6, 2), [3, 1, 2, 0], [3] * 4).shape == (12, 2)
