"""Attention within documents, on every path, equals the float64 definition of each document alone."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from optimus.kernels import documents as kernels
from optimus.kernels.attention import AttentionBlock, Scoring, attention_reference, causal_attention
from optimus.kernels.documents import Documents, document_attention
from optimus.testing.memory import tracking

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float64: 1e-12}  # relative, in Frobenius norm
LENGTHS = [[24], [8, 8, 8], [1] * 24, [5, 7, 12], [1, 9, 1, 1, 12], [23, 1], [1, 23]]


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def inputs(tokens: int, heads: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Returns q, k, v and the output's gradient; k and v are views of one tensor, as in the model."""
    q, out_grad = normal(1, tokens, heads[0], 8, dtype=dtype), normal(1, tokens, heads[0], 9, dtype=dtype)[..., 1:]
    k, v = normal(1, tokens, 2, heads[1], 8, dtype=dtype).unbind(2)
    return [q, k, v, out_grad]


def alone(lengths: list[int], given: list[Tensor], window: int | None, cap: float | None) -> list[Tensor]:
    """Returns (attention, gradients of q, k, v) of each document alone, concatenated."""
    found = []
    for q, k, v, out_grad in zip(*(t.double().split(lengths, 1) for t in given), strict=True):
        parameters = [t.detach().requires_grad_() for t in (q, k, v)]
        out, _ = attention_reference(*parameters, True, window, cap)
        found.append([out.detach(), *torch.autograd.grad(out, parameters, out_grad)])
    return [torch.cat(parts, 1) for parts in zip(*found, strict=True)]


def assert_alone(
    lengths: list[int], heads: tuple[int, int], window: int | None, dtype: torch.dtype, cap: float | None = None
) -> None:
    given = inputs(sum(lengths), heads, dtype)
    leaves = [t.detach().requires_grad_() for t in given[:3]]
    out = document_attention(*leaves, Documents(lengths, 1), Scoring(window, cap))
    found = [out, *torch.autograd.grad(out, leaves, given[3])]
    for a, b in zip(found, alone(lengths, given, window, cap), strict=True):
        assert (a.shape, a.dtype) == (b.shape, dtype)
        # A single key has a zero gradient.
        scale = b.norm() if b.norm() > 1e-9 else given[3].norm()
        assert (a.double() - b).norm() <= 3 * TOLERANCE[dtype] * scale


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 1, 4, 9])
@pytest.mark.parametrize(("heads", "cap"), [((2, 2), None), ((4, 2), None), ((4, 2), 1.5)])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_documents_are_what_they_are_alone(
    lengths: list[int], heads: tuple[int, int], cap: float | None, window: int | None, dtype: torch.dtype
) -> None:
    assert_alone(lengths, heads, window, dtype, cap)


def varlen_attn(
    q_TND: Tensor,
    k_TMD: Tensor,
    v_TMD: Tensor,
    offsets: Tensor,
    offsets_of_keys: Tensor,
    longest: int,
    longest_keys: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """Stands in for torch's function of this name, by its documentation, on machines without an accelerator."""
    borders = offsets.tolist()
    assert offsets.dtype == torch.int32
    assert borders == offsets_of_keys.tolist()
    assert longest == longest_keys == max(end - start for start, end in pairwise(borders))
    assert enable_gqa == (q_TND.shape[1] != k_TMD.shape[1])
    before, after = window_size
    assert after == 0
    parts = [[t[None, start:end] for t in (q_TND, k_TMD, v_TMD)] for start, end in pairwise(borders)]
    window = None if before < 0 else before + 1
    return torch.cat([attention_reference(*part, True, window)[0][0] for part in parts])


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize("lengths", [[5, 7, 12], [1, 9, 1, 1, 12]], ids=str)
def test_flash_attention_of_other_lengths(
    lengths: list[int], heads: tuple[int, int], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "flash_fits", lambda *_: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    assert_alone(lengths, heads, window, torch.float64)


def test_torchs_flash_attention_takes_what_it_is_given() -> None:
    """torch's function accepts our arguments and returns the expected shapes and types, checked on fake tensors."""
    with FakeTensorMode():
        q, k, v = (torch.empty(12, heads, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = kernels._varlen(q, k, v, Documents([5, 7], 1), 4)
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
        found = torch.autograd.grad(out.float().sum(), leaves)
        assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in leaves]


def scores(blocks: list[AttentionBlock]) -> int:
    """Returns the number of scores that the blocks compute, without those above a causal block's diagonal."""
    sizes = [(b.queries.stop - b.queries.start, b.keys.stop - b.keys.start, b.mask) for b in blocks]
    return sum(new * seen if mask == "none" else new * (new + 1) // 2 for new, seen, mask in sizes)


@pytest.mark.parametrize("window", [None, 3, 8])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_no_score_across_a_border_is_computed(lengths: list[int], window: int | None) -> None:
    blocks = list(kernels._blocks(Documents(lengths, 1), window))
    assert scores(blocks) == sum(min(i, window or i) for length in lengths for i in range(1, length + 1))
    document_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    for block in blocks:
        assert len({*document_T[block.queries].tolist(), *document_T[block.keys].tolist()}) == 1


def test_documents_of_one_length_are_a_batch() -> None:
    """Documents of equal length give the bits of a batch."""
    q, k, v, _ = inputs(24, (4, 2), torch.float32)
    found = document_attention(q, k, v, Documents([6] * 4, 2))
    assert found.equal(causal_attention(*(t.view(4, 6, -1, 8) for t in (q, k, v))).view(1, 24, 4, 8))


def test_no_mask_and_no_scores_are_held() -> None:
    """Memory stays below 9 times the keys; the scores of one document alone would take 48 times."""
    q, k, v = (normal(1, 4096, 1, 32, dtype=torch.float32).requires_grad_() for _ in range(3))
    with tracking() as allocations:
        document_attention(q, k, v, Documents([1536, 2560], 1)).sum().backward()
    assert allocations.peak < 9 * k.nbytes


def test_where_documents_are() -> None:
    documents = Documents([3, 1, 4], 2)
    assert documents.spans == [(0, 3), (3, 4), (4, 8)]
    assert documents.positions().tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert documents.offsets(torch.device("cpu")).tolist() == [0, 3, 4, 8]
