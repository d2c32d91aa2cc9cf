"""Attention blocks, and their merged results, equal the definition in float64 on every path."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from optimus.kernels import attention
from optimus.kernels.attention import (
    Scoring,
    attention_block,
    attention_block_backward,
    attention_reference,
    blocks_before,
    blocks_of,
    causal_attention,
    merge_block,
)
from optimus.testing.memory import tracking

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float64: 1e-12}  # relative, in Frobenius norm
PATHS = {
    "cpu": attention._Path(attention._cpu, attention._cpu_backward),
    "plain": attention._Path(attention._plain, attention._plain_backward),
}
SHAPES = [(1, 1, 1, 8), (2, 7, 3, 6), (1, 70, 2, 16), (2, 600, 1, 32)]  # B, P, N, D


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def inputs(shape: tuple[int, int, int, int], queries: int, dtype: torch.dtype) -> list[Tensor]:
    """Returns q, k, v and the output's gradient; v and the gradient are views of larger tensors, as in the model."""
    batch, keys, heads, size = shape
    q, k = normal(batch, queries, heads, size, dtype=dtype), normal(batch, keys, heads, size, dtype=dtype)
    v = normal(batch, keys, 3, heads, size, dtype=dtype)[:, :, 1]
    return [q, k, v, normal(batch, queries, heads, size + 1, dtype=dtype)[..., 1:]]


def expected(q: Tensor, k: Tensor, v: Tensor, out_grad: Tensor, causal: bool) -> list[Tensor]:
    """Returns (attention, log-sum-exp, gradients of q, k, v) in float64."""
    parameters = [t.double().requires_grad_() for t in (q, k, v)]
    out, lse = attention_reference(*parameters, causal)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, parameters, out_grad.double())]


def assert_close(found: Tensor, wanted: Tensor, scale: Tensor, dtype: torch.dtype, parts: int = 1) -> None:
    """Asserts closeness within the tolerance of `parts` accumulated roundings to `dtype`."""
    assert found.shape == wanted.shape
    assert (found.double() - wanted).norm() <= parts * TOLERANCE[dtype] * scale.norm()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [False, True])
def test_a_block(
    path: str, shape: tuple[int, int, int, int], causal: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_path", lambda *_: PATHS[path])
    monkeypatch.setattr(attention, "_BLOCK_ELEMENTS", 1 << 12)
    q, k, v, out_grad = inputs(shape, shape[1] if causal else shape[1] // 2 + 1, dtype)
    out, lse = attention_block(q, k, v, causal)
    assert out.dtype == dtype
    assert lse.dtype == (dtype if dtype == torch.float64 else torch.float32)
    found = attention_block_backward(out_grad, q, k, v, out, lse, causal)
    assert all(gradient.dtype == dtype for gradient in found)
    wanted = expected(q, k, v, out_grad, causal)
    for a, b in zip((out, lse, *found), wanted, strict=True):
        # A single key has a zero gradient.
        scale = b if b.norm() > 1e-9 else wanted[-1]
        assert_close(a, b, scale, dtype)


@pytest.mark.parametrize("path", PATHS)
def test_an_empty_batch(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_path", lambda *_: PATHS[path])
    q, k, v, out_grad = (torch.empty(0, 3, 2, 8) for _ in range(4))
    out, lse = attention_block(q, k, v, True)
    found = attention_block_backward(out_grad, q, k, v, out, lse, True)
    assert [t.shape for t in (out, lse, *found)] == [q.shape, (0, 2, 3), q.shape, k.shape, v.shape]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("path", PATHS)
def test_blocks_add_up(path: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three merged blocks of keys, the last for the last queries only, equal attention to all keys. Inputs and outputs
    are views."""
    monkeypatch.setattr(attention, "_path", lambda *_: PATHS[path])
    q, k, v, out_grad = inputs((2, 24, 3, 8), 10, dtype)
    k[:, 3] *= 3  # makes some queries attend mostly to this key
    blocks = [(slice(None), slice(0, 9)), (slice(None), slice(9, 17)), (slice(6, None), slice(17, 24))]
    out, lse = torch.zeros_like(q, dtype=torch.promote_types(dtype, torch.float32)), None
    for rows, keys in blocks:
        block, block_lse = attention_block(q[:, rows], k[:, keys], v[:, keys], False)
        if lse is None:
            out, lse = block.to(out.dtype), block_lse
        else:
            merge_block(out[:, rows], lse[:, :, rows], block, block_lse)
    assert lse is not None
    out, grads = out.to(dtype), [torch.zeros_like(t, dtype=out.dtype) for t in (q, k, v)]
    for rows, keys in blocks:
        given = q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[:, :, rows]
        for total, part, where in zip(
            grads, attention_block_backward(out_grad[:, rows], *given, False), (rows, keys, keys), strict=True
        ):
            total[:, where] += part

    first, last = slice(0, 6), slice(6, None)
    above, below = (
        expected(q[:, rows], k[:, :seen], v[:, :seen], out_grad[:, rows], False)
        for rows, seen in ((first, 17), (last, 24))
    )
    for i, total in enumerate((out, *grads)):
        if i < 2:
            wanted = torch.cat([above[(0, 2)[i]], below[(0, 2)[i]]], 1)
        else:
            wanted = below[i + 1].clone()
            wanted[:, :17] += above[i + 1]
        assert_close(total, wanted, wanted, dtype)
    assert_close(lse, torch.cat([above[1], below[1]], -1), below[1], dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_strides_do_not_matter(dtype: torch.dtype) -> None:
    given = inputs((2, 7, 3, 8), 7, dtype)
    q, k, v, out_grad = (t.transpose(1, 3).contiguous().transpose(1, 3) for t in given)
    out, lse = attention_block(q, k, v, True)
    found = attention_block_backward(out_grad, q, k, v, out, lse, True)
    for a, b in zip((out, lse, *found), expected(*given, True), strict=True):
        assert_close(a, b, b, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (4, 9), (8, 9), (9, 9)])
def test_the_last_positions_of_a_sequence(queries: int, keys: int, dtype: torch.dtype) -> None:
    q, k, v, out_grad = inputs((2, keys, 3, 8), queries, dtype)
    parameters = [t.detach().requires_grad_() for t in (q, k, v)]
    out = causal_attention(*parameters)
    found = torch.autograd.grad(out, parameters, out_grad)
    wanted = expected(q, k, v, out_grad, True)
    for a, b in zip((out, *found), (wanted[0], *wanted[2:]), strict=True):
        assert_close(a, b, b if b.norm() > 1e-9 else wanted[-1], dtype)


def peak(run: Callable[[], object]) -> int:
    with tracking() as allocations:
        run()
    return allocations.peak


@pytest.mark.parametrize(("queries", "keys"), [(4096, 4096), (2048, 4096), (1, 4096)])
def test_no_mask_and_no_scores_are_held(queries: int, keys: int) -> None:
    """Memory stays below 8 times the keys, in training and with a cache; the scores alone would take 128 times."""
    q, k, v = (normal(1, n, 1, 32, dtype=torch.float32).requires_grad_() for n in (queries, keys, keys))
    assert peak(lambda: causal_attention(q, k, v).sum().backward()) < 8 * k.nbytes


def test_the_plain_path_holds_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_BLOCK_ELEMENTS", 1 << 15)
    q, k, v, out_grad = (t.transpose(1, 2) for t in inputs((1, 1024, 2, 8), 1024, torch.float32))
    out, lse = attention._plain(q, k, v, True)
    assert peak(lambda: attention._plain(q, k, v, True)) < 2 * q.nbytes + 2 * (4 << 15)
    assert peak(lambda: attention._plain_backward(out_grad, q, k, v, out, lse, True)) < 8 * q.nbytes + 3 * (4 << 15)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_flash_path_of_accelerators_gives_what_is_said(dtype: torch.dtype) -> None:
    """The flash operators return the expected shapes and types, checked on fake tensors."""
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 3, n, 16, dtype=dtype, device="cuda") for n in (4, 8, 8))
        out, lse = attention._flash(q, k, v, False)
        assert (out.shape, out.dtype) == (q.shape, dtype)
        assert (lse.shape, lse.dtype) == ((2, 3, 4), torch.float32)
        found = attention._flash_backward(out, q, k, v, out, lse, False)
        assert [(t.shape, t.dtype) for t in found] == [(t.shape, dtype) for t in (q, k, v)]


def test_other_devices_take_the_plain_path() -> None:
    q, k, v = (torch.empty(2, n, 3, 16, device="meta", dtype=torch.bfloat16) for n in (4, 8, 8))
    out, lse = attention_block(q, k, v, False)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (2, 3, 4), torch.float32)
    found = attention_block_backward(out, q, k, v, out, lse, False)
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in (q, k, v)]


@pytest.mark.parametrize("window", [None, 1, 2, 5, 8, 24, 30])
@pytest.mark.parametrize(("new", "heads"), [(24, (6, 2)), (24, (3, 3)), (9, (4, 1)), (17, (4, 2)), (1, (4, 2))])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_windows_and_shared_keys(window: int | None, new: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Attention of the last `new` of 24 positions equals the definition: pieces that begin or end inside a window,
    single queries, windows of one."""
    q, out_grad = normal(2, new, heads[0], 8, dtype=dtype), normal(2, new, heads[0], 8, dtype=dtype)
    k, v = (normal(2, 24, heads[1], 8, dtype=dtype) for _ in range(2))
    given, wanted = ([t.to(kind).requires_grad_() for t in (q, k, v)] for kind in (dtype, torch.float64))
    out, want = causal_attention(*given, Scoring(window)), attention_reference(*wanted, True, window)[0]
    assert_close(out, want, want, dtype)
    found = torch.autograd.grad(out, given, out_grad)
    for a, b in zip(found, torch.autograd.grad(want, wanted, out_grad.double()), strict=True):
        assert_close(a, b, b if b.norm() > 1e-9 else out_grad, dtype, parts=3)


@pytest.mark.parametrize(("cap", "sinks"), [(2.0, False), (None, True), (2.0, True)])
@pytest.mark.parametrize("window", [None, 1, 5, 24])
@pytest.mark.parametrize(("new", "heads"), [(24, (6, 2)), (24, (3, 3)), (9, (4, 1)), (1, (4, 2)), (1, (3, 3))])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_capped_scores_and_sinks(
    window: int | None, new: int, heads: tuple[int, int], cap: float | None, sinks: bool, dtype: torch.dtype
) -> None:
    """Large scores, so that many are near the cap, and sinks that take nearly the whole softmax, equal the definition."""
    q, out_grad = 3 * normal(2, new, heads[0], 8, dtype=dtype), normal(2, new, heads[0], 8, dtype=dtype)
    k, v = normal(2, 24, 2, heads[1], 8, dtype=dtype).unbind(2)
    leaves = [q, k, v, *([3 * normal(heads[0], dtype=dtype)] if sinks else [])]
    given, wanted = ([t.to(kind).requires_grad_() for t in leaves] for kind in (dtype, torch.float64))
    out = causal_attention(*given[:3], Scoring(window, cap, *given[3:]))
    want = attention_reference(*wanted[:3], True, window, cap, *wanted[3:])[0]
    assert_close(out, want, want, dtype)
    found = torch.autograd.grad(out, given, out_grad)
    for a, b in zip(found, torch.autograd.grad(want, wanted, out_grad.double()), strict=True):
        assert_close(a, b, b if b.norm() > 1e-9 else out_grad, dtype, parts=3)


@pytest.mark.parametrize(("new", "seen", "window"), [(9, 9, None), (4, 9, None), (64, 64, 7), (13, 64, 7), (5, 64, 7)])
def test_blocks_cover_each_pair_once(new: int, seen: int, window: int | None) -> None:
    pairs: dict[tuple[int, int], int] = {}
    for block in blocks_of(new, seen, window):
        for i, query in enumerate(range(new)[block.queries]):
            for j, key in enumerate(range(seen)[block.keys]):
                if block.mask == "none" or (j <= i if block.mask == "causal" else j >= i):
                    pairs[query, key] = pairs.get((query, key), 0) + 1
    reach = window or seen
    wanted = {(i, j) for i in range(new) for j in range(seen) if 0 <= i + seen - new - j < reach}
    assert pairs == dict.fromkeys(wanted, 1)


@pytest.mark.parametrize("window", [None, 1, 4, 7, 8, 9, 12, 15, 16, 23, 24, 40])
@pytest.mark.parametrize(
    ("new", "seen", "distance"),
    [(8, 8, 8), (8, 8, 16), (1, 1, 1), (1, 1, 3), (2, 2, 4), (3, 8, 8), (8, 3, 3), (8, 3, 9), (1, 7, 7), (7, 1, 2)],
)
def test_blocks_of_positions_before(new: int, seen: int, distance: int, window: int | None) -> None:
    pairs: dict[tuple[int, int], int] = {}
    for block in blocks_before(new, seen, distance, window):
        queries, keys = range(new)[block.queries], range(seen)[block.keys]
        assert queries
        assert keys
        assert block.mask == "none" or len(queries) == len(keys)
        for i, query in enumerate(queries):
            for j, key in enumerate(keys):
                if block.mask == "none" or j >= i:
                    pairs[query, key] = pairs.get((query, key), 0) + 1
    reach = window or 3 * new + distance
    wanted = {(i, j) for i in range(new) for j in range(seen) if i + distance - j < reach}
    assert pairs == dict.fromkeys(wanted, 1)


@pytest.mark.parametrize("queries", [7, 1])
def test_shared_keys_are_left_to_the_fused_kernels_where_the_device_has_them(
    queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "flash_fits", lambda *_: True)
    monkeypatch.delattr(attention, "attend_blocks")
    q, k, v = (normal(2, n, heads, 8, dtype=torch.float64) for n, heads in ((queries, 6), (7, 2), (7, 2)))
    wanted = attention_reference(q, k, v, queries > 1)[0]
    assert_close(causal_attention(q, k, v), wanted, wanted, torch.float64)
