"""A sparse layer on a grid of ranks gets each token once and whole, and gives the numbers of one device.

Legend: T rows of the residual stream, H hidden, E experts.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from optimus.comm import Groups
from optimus.comm.functional import local_rows
from optimus.mesh import Mesh
from optimus.model.architecture import ModelConfig
from optimus.model.init import initialize
from optimus.model.moe.layer import MoeLayer
from optimus.model.moe.tokens import TokenSplit
from optimus.parallel.tokens import SplitTokens
from optimus.testing import run_ranks

T, H = 24, 12


class Form(NamedTuple):
    """The ranks of the grid and of context parallelism, and the sharding of the residual stream."""

    rows: int
    columns: int
    parts: int
    sequence: bool
    duplicates: bool = False

    @property
    def mesh(self) -> Mesh:
        return Mesh(cp=self.parts, tp=self.rows * self.columns, tp_in=self.columns)


FORMS = [
    Form(2, 1, 1, False),
    Form(2, 1, 1, True),
    Form(2, 1, 1, False, duplicates=True),
    Form(1, 2, 1, False),
    Form(2, 2, 1, True),
    Form(2, 2, 1, False),
    Form(1, 1, 2, False),
    Form(2, 1, 2, True),
    Form(2, 1, 2, False, duplicates=True),
    Form(1, 2, 2, False),
    Form(3, 1, 1, True),
]


def residual_stream(x_TH: Tensor, form: Form, groups: Groups) -> Tensor:
    """Returns this rank's part of the residual stream."""
    rows, columns, parts = (groups.along(axis) for axis in ("tp_out", "tp_in", "cp"))
    own = local_rows(x_TH, parts)
    own = local_rows(own, rows) if form.sequence else own
    return own.chunk(columns.size, 1)[columns.rank].contiguous()


def split_of(form: Form, groups: Groups) -> SplitTokens:
    rows, columns, parts = (groups.along(axis) for axis in ("tp_out", "tp_in", "cp"))
    return SplitTokens(rows, columns, parts, sequence=form.sequence, duplicates=form.duplicates)


def taken(form: Form) -> tuple[Tensor, bool]:
    """Returns the rows that this rank works on, and whether `restore_rows` gives the original rows back."""
    groups = Groups(form.mesh)
    x_TH = torch.arange(float(T * H)).view(T, H)
    own, split = residual_stream(x_TH, form, groups), split_of(form, groups)
    return split.take(own), split.restore_rows(split.take(own)).equal(own)


@pytest.mark.parametrize("form", FORMS)
def test_every_token_once_and_whole(form: Form) -> None:
    results = run_ranks(taken, form.mesh.size, form)
    assert all(there_and_back for _, there_and_back in results)
    copies = form.rows if form.duplicates else 1
    tokens = torch.cat([rows for rows, _ in results])
    whole = torch.arange(float(T * H)).view(T, H)
    assert tokens[tokens[:, 0].argsort()].equal(whole.repeat_interleave(copies, 0))
    assert {len(rows) for rows, _ in results} == {T * copies // form.mesh.size}  # the ranks have equal shares


def layer_of(tokens: TokenSplit | None = None) -> MoeLayer:
    sizes = {"hidden": H, "heads": 1, "intermediate": 8, "experts": 4, "experts_per_token": 2}
    layer = MoeLayer(ModelConfig.model_validate({"family": "olmoe", "layers": 1, "vocab": 8, **sizes}))
    layer.tokens = tokens or TokenSplit()
    initialize(layer, 0, 0.5)
    return layer


def inputs() -> tuple[Tensor, Tensor]:
    """Returns x and the gradient of the layer's output."""
    x_TH, y_grad_TH = torch.randn(2, T, H, generator=torch.Generator().manual_seed(0))
    return x_TH, y_grad_TH


def backward(layer: MoeLayer, x: Tensor, y_grad: Tensor, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (y, gradient of x, [balance loss, z-loss]); `share` is a context-parallel rank's weight in the losses."""
    y, stats = layer(x)
    losses = torch.stack([stats.balance_loss(), stats.z_loss()])
    ((y * y_grad).sum() + 5 * share * losses.sum()).backward()
    assert x.grad is not None
    return y.detach(), x.grad, losses.detach()


def layer_on_a_grid(form: Form) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns (this rank's tensor, its part of one device's) by name. Experts are whole on every rank."""
    x_TH, y_grad_TH = inputs()
    alone, groups = layer_of(), Groups(form.mesh)
    right = backward(alone, x_TH.clone().requires_grad_(), y_grad_TH, 1.0)
    rows, columns, sequences = (groups.along(axis) for axis in ("tp_out", "tp_in", "cp"))
    split = SplitTokens(rows, columns, sequences, sequence=form.sequence, duplicates=form.duplicates)
    layer = layer_of(split)
    own, own_grad = (residual_stream(value, form, groups) for value in (x_TH, y_grad_TH))
    y, x_grad, losses = backward(layer, own.requires_grad_(), own_grad, 1 / form.parts)
    found = {
        "y": (y, residual_stream(right[0], form, groups)),
        "x_grad": (x_grad, residual_stream(right[1], form, groups)),
        "losses": (losses, right[2]),
    }
    summed = groups.along("cp") if form.duplicates else groups.along("cp", "tp_in", "tp_out")
    for (name, ours), theirs in zip(layer.named_parameters(), alone.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        summed.all_reduce(ours.grad)
        found[name] = ours.grad, theirs.grad
    return found


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_has_the_numbers_of_one_device(form: Form) -> None:
    for found in run_ranks(layer_on_a_grid, form.mesh.size, form):
        for name, (ours, theirs) in found.items():
            assert ours.shape == theirs.shape, name
            assert (ours - theirs).norm() / theirs.norm() < 1e-5, name
