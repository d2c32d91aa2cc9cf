"""Embedding, logits and loss with a split vocabulary equal those of the whole weight on one device.

Legend: T rows, H hidden, V vocabulary.
"""

import pytest
import torch
from torch import Tensor, nn

from optimus.comm import Groups
from optimus.comm.functional import local_rows
from optimus.kernels.linear_cross_entropy import block_rows
from optimus.mesh import Mesh
from optimus.model.vocabulary import Vocabulary
from optimus.parallel.vocabulary import SplitVocabulary, tokens_along
from optimus.testing import run_ranks

T, H, V = 24, 12, 37
GRIDS = [(2, 1), (1, 2), (4, 1), (2, 2), (3, 1)]


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns tokens, targets (some left out), rows of the residual stream and a weight with widely spread logits."""
    generator = torch.Generator().manual_seed(0)
    tokens_T = torch.randint(V, (T,), generator=generator)
    target_T = torch.randint(V, (T,), generator=generator)
    target_T[::5] = -1
    x_TH, w_VH = (torch.randn(n, H, generator=generator) for n in (T, V))
    return tokens_T, target_T, x_TH, 3 * w_VH


def whole(cap: float | None) -> dict[str, Tensor]:
    tokens_T, target_T, x_TH, w_VH = inputs()
    vocabulary, weight = Vocabulary(), nn.Parameter(w_VH)
    x_TH.requires_grad_()
    loss = vocabulary.loss(x_TH, weight, target_T, 7.0, cap)
    x_grad, w_grad = torch.autograd.grad(loss, [x_TH, weight])
    embedded = vocabulary.embed(tokens_T, weight)
    (embedding_grad,) = torch.autograd.grad(embedded, weight, x_TH.detach())
    tied = vocabulary.loss(vocabulary.embed(tokens_T, weight), weight, target_T, 7.0, cap)
    (tied_grad,) = torch.autograd.grad(tied, weight)
    logits = vocabulary.logits(x_TH.detach(), weight)
    found = {"loss": loss, "x_grad": x_grad, "w_grad": w_grad, "embedded": embedded, "logits": logits}
    return {k: v.detach() for k, v in {**found, "embedding_grad": embedding_grad, "tied_grad": tied_grad}.items()}


def on_a_rank(grid: tuple[int, int], sequence: bool, cap: float | None) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns (this rank's tensor, its part of one device's) by name."""
    groups = Groups(Mesh(tp=grid[0] * grid[1], tp_in=grid[1]))
    parts, columns = groups.along("tp_out"), groups.along("tp_in")

    def stream(x: Tensor) -> Tensor:
        own = x.chunk(columns.size, 1)[columns.rank].contiguous()
        return local_rows(own, parts) if sequence else own

    tokens = tokens_along(groups, V, "tp_out")

    def part(w: Tensor) -> Tensor:
        return w[tokens[parts.rank]].chunk(columns.size, 1)[columns.rank].contiguous()

    tokens_T, target_T, x_TH, w_VH = inputs()
    vocabulary = SplitVocabulary(parts, columns, tokens, sequence)
    weight, x = nn.Parameter(part(w_VH)), stream(x_TH).requires_grad_()
    loss = vocabulary.loss(x, weight, target_T, 7.0, cap)
    x_grad, w_grad = torch.autograd.grad(loss, [x, weight])
    embedded = vocabulary.embed(tokens_T, weight)
    (embedding_grad,) = torch.autograd.grad(embedded, weight, stream(x_TH))
    tied = vocabulary.loss(vocabulary.embed(tokens_T, weight), weight, target_T, 7.0, cap)
    (tied_grad,) = torch.autograd.grad(tied, weight)
    with torch.no_grad():
        logits = vocabulary.logits(vocabulary.join(x), weight)
        unbatched = vocabulary.logits(x_TH.view(2, T // 2, H), weight)
    right = whole(cap)
    return {
        "loss": (loss.detach(), right["loss"]),
        "x_grad": (x_grad, stream(right["x_grad"])),
        "w_grad": (w_grad, part(right["w_grad"])),
        "embedded": (embedded.detach(), stream(right["embedded"])),
        "embedding_grad": (embedding_grad, part(right["embedding_grad"])),
        "tied_grad": (tied_grad, part(right["tied_grad"])),
        "logits": (logits, right["logits"]),
        "logits of sequences": (unbatched, right["logits"].view(2, T // 2, V)),
    }


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(("sequence", "cap"), [(False, None), (True, None), (True, 8.0)])
def test_same_as_one_device(grid: tuple[int, int], sequence: bool, cap: float | None) -> None:
    for found in run_ranks(on_a_rank, grid[0] * grid[1], grid, sequence, cap):
        for name, (ours, theirs) in found.items():
            assert ours.shape == theirs.shape, name
            assert (ours - theirs).norm() / theirs.norm() < 1e-5, name


def split_over_two(vocab: int) -> tuple[slice, SplitVocabulary]:
    """Returns this rank's tokens of a vocabulary split over two ranks, and the split vocabulary."""
    groups = Groups(Mesh(tp=2))
    tokens = tokens_along(groups, vocab, "tp_out")
    return tokens[groups.rank], SplitVocabulary(groups.along("tp_out"), groups.along("tp_in"), tokens, sequence=False)


def large_logits() -> tuple[float, float]:
    """Returns the losses of a split and of a whole vocabulary whose parts differ by more than fp32's exponentials span."""
    tokens, vocabulary = split_over_two(V)
    w_VH = torch.cat([torch.full((V // 2, H), 20.0), torch.full((V - V // 2, H), -20.0)])
    x_TH, target_T = torch.ones(2, H), torch.tensor([0, V - 1])
    ours = vocabulary.loss(x_TH, nn.Parameter(w_VH[tokens]), target_T, 2.0)
    return ours.item(), Vocabulary().loss(x_TH, nn.Parameter(w_VH), target_T, 2.0).item()


def test_parts_of_very_different_size() -> None:
    for ours, theirs in run_ranks(large_logits, 2):
        assert ours == pytest.approx(theirs, rel=1e-6)
        assert theirs > 200  # the targets of half the rows have no probability


def at_the_border_of_a_block() -> tuple[float, float, float]:
    """Returns (loss, loss of one device, relative error of the weight's gradient) where one part needs more blocks.

    The logits of the rows exceed one block in the larger part of the vocabulary and fit into one in the smaller part.
    """
    vocab, rows = 2049, 2048
    tokens, vocabulary = split_over_two(vocab)
    assert block_rows(1025) < rows <= block_rows(1024)
    generator = torch.Generator().manual_seed(0)
    x_TH, w_VH = (torch.randn(n, 4, generator=generator) for n in (rows, vocab))
    target_T = torch.randint(vocab, (rows,), generator=generator)
    part, whole = nn.Parameter(w_VH[tokens]), nn.Parameter(w_VH)
    ours = vocabulary.loss(x_TH, part, target_T, 2.0)
    theirs = Vocabulary().loss(x_TH, whole, target_T, 2.0)
    (gradient,), (right,) = torch.autograd.grad(ours, part), torch.autograd.grad(theirs, whole)
    return ours.item(), theirs.item(), float((gradient - right[tokens]).norm() / right[tokens].norm())


def test_parts_meet_after_as_many_blocks() -> None:
    for ours, theirs, error in run_ranks(at_the_border_of_a_block, 2):
        assert ours == pytest.approx(theirs, rel=1e-6)
        assert error < 1e-5
