"""Softmax attention over blocks of keys, from which attention over any longer sequence can be put together.

The softmax over two sets of keys follows from those over each and their log-sum-exps (Rabe and Staats 2021; the blocks of
ring attention, Liu et al. 2023), and so does its gradient, in which each block needs the log-sum-exp of all. Scores are
q . k / sqrt(D), log-sum-exps are natural and in fp32 (float64 stays so); no path ever holds more than one block of scores.

Legend: B batch, S queries, P keys, N heads, D head size.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from optimus.autograd import once_differentiable
from optimus.kernels.backend import compute_dtype

Gradients = tuple[Tensor, Tensor, Tensor]

_BLOCK_ELEMENTS = 1 << 22  # scores of one block, in the path that makes them itself


def causal_attention(q_BSND: Tensor, k_BPND: Tensor, v_BPND: Tensor) -> Tensor:
    """Attention of the last S of P positions over all positions up to their own, [B, S, N, D]."""
    new, seen = q_BSND.shape[1], k_BPND.shape[1]
    if 1 < new < seen:
        return _Continued.apply(q_BSND, k_BPND, v_BPND)
    q, k, v = _heads_first(q_BSND, k_BPND, v_BPND)
    return F.scaled_dot_product_attention(q, k, v, is_causal=new > 1).transpose(1, 2)


def attention_block(q_BSND: Tensor, k_BPND: Tensor, v_BPND: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(attention of all queries over all keys [B, S, N, D], log-sum-exp of the scores [B, N, S]); autograd sees neither.

    `causal`: S is P, and query i has the keys up to i only.
    """
    q, k, v = _heads_first(q_BSND, k_BPND, v_BPND)
    out, lse_BNS = _path(q, k, v, causal).forward(q, k, v, causal)
    return out.transpose(1, 2), lse_BNS


def attention_block_backward(
    out_grad_BSND: Tensor,
    q_BSND: Tensor,
    k_BPND: Tensor,
    v_BPND: Tensor,
    out_BSND: Tensor,
    lse_BNS: Tensor,
    causal: bool,
) -> Gradients:
    """What these keys and values contribute to the gradient of q, and their own gradients, each in its tensor's type.

    `out_BSND` and `lse_BNS` are those over all keys of the queries, of which the block has some.
    """
    q, k, v, out, out_grad = _heads_first(q_BSND, k_BPND, v_BPND, out_BSND, out_grad_BSND)
    q_grad, k_grad, v_grad = _path(q, k, v, causal).backward(out_grad, q, k, v, out, lse_BNS, causal)
    return q_grad.transpose(1, 2), k_grad.transpose(1, 2), v_grad.transpose(1, 2)


def merge_block(out_BSND: Tensor, lse_BNS: Tensor, block_BSND: Tensor, block_lse_BNS: Tensor) -> None:
    """Make `out_BSND` and `lse_BNS`, in place, those over their own keys and a further block's. `out_BSND` is fp32."""
    weight_BNS = torch.sigmoid(block_lse_BNS - lse_BNS)
    out_BSND.lerp_(block_BSND.to(out_BSND.dtype), weight_BNS.transpose(1, 2)[..., None])
    lse_BNS.copy_(torch.logaddexp(lse_BNS, block_lse_BNS))


def attention_reference(q_BSND: Tensor, k_BPND: Tensor, v_BPND: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The definition of (attention, log-sum-exp), for tests; if causal, of the last S of P positions."""
    q, k, v = (t.to(compute_dtype(t.dtype)) for t in _heads_first(q_BSND, k_BPND, v_BPND))
    scores_BNSP = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        new, seen = scores_BNSP.shape[-2:]
        hidden_SP = torch.ones(new, seen, dtype=torch.bool, device=q.device).triu(seen - new + 1)
        scores_BNSP = scores_BNSP.masked_fill(hidden_SP, -math.inf)
    out = scores_BNSP.softmax(-1) @ v
    return out.transpose(1, 2).to(q_BSND.dtype), scores_BNSP.logsumexp(-1)


class _Continued(torch.autograd.Function):
    """The last S of P positions, 1 < S < P: a block of the keys before them, and a causal one. No mask is held."""

    @staticmethod
    def forward(ctx: Any, q_BSND: Tensor, k_BPND: Tensor, v_BPND: Tensor) -> Tensor:
        before = k_BPND.shape[1] - q_BSND.shape[1]
        block, lse_BNS = attention_block(q_BSND, k_BPND[:, before:], v_BPND[:, before:], True)
        out_BSND = block.to(lse_BNS.dtype)
        merge_block(out_BSND, lse_BNS, *attention_block(q_BSND, k_BPND[:, :before], v_BPND[:, :before], False))
        out_BSND = out_BSND.to(q_BSND.dtype)
        ctx.save_for_backward(q_BSND, k_BPND, v_BPND, out_BSND, lse_BNS)
        return out_BSND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        q_BSND, k_BPND, v_BPND, out_BSND, lse_BNS = ctx.saved_tensors
        before = k_BPND.shape[1] - q_BSND.shape[1]
        found = [
            attention_block_backward(grads[0], q_BSND, k_BPND[:, part], v_BPND[:, part], out_BSND, lse_BNS, causal)
            for part, causal in ((slice(before), False), (slice(before, None), True))
        ]
        (q_before, k_before, v_before), (q_new, k_new, v_new) = found
        return q_before + q_new, torch.cat([k_before, k_new], 1), torch.cat([v_before, v_new], 1)


def _heads_first(*tensors_BSND: Tensor) -> list[Tensor]:
    """[B, N, S, D] each, with its last dim in order: the CPU's operator takes that for granted."""
    return [(t if t.stride(-1) == 1 else t.contiguous()).transpose(1, 2) for t in tensors_BSND]


# ---- The paths. Everything below has heads first: q [B, N, S, D], k and v [B, N, P, D] ----


class _Path(NamedTuple):
    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]  # (q, k, v, causal)
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], Gradients
    ]  # (out_grad, q, k, v, out, lse, causal)


def _path(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> _Path:
    if q.device.type == "cpu":
        return _Path(_cpu, _cpu_backward)
    params = SDPAParams(q, k, v, None, 0.0, causal, False)
    if q.device.type == "cuda" and q.shape[-1] % 8 == 0 and can_use_flash_attention(params):  # others it wants padded
        return _Path(_flash, _flash_backward)
    return _Path(_plain, _plain_backward)


def _cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def _cpu_backward(
    out_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_BNS: Tensor, causal: bool
) -> Gradients:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(out_grad, q, k, v, out, lse_BNS, 0.0, causal)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse_BNS, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out, lse_BNS


def _flash_backward(
    out_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_BNS: Tensor, causal: bool
) -> Gradients:
    no_seed = q.new_empty(2, dtype=torch.uint64 if torch.version.hip is None else torch.int64)  # there is no dropout
    lengths = q.shape[2], k.shape[2]
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    lse_BNS = lse_BNS.contiguous()
    return backward(out_grad, q, k, v, out, lse_BNS, None, None, *lengths, 0.0, causal, no_seed, no_seed)


def _plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    wide = compute_dtype(q.dtype)
    out, lse_BNS = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=wide)
    k, v = k.to(wide), v.to(wide)
    for rows, keys in _query_blocks(q, k, causal):
        scores = _scores(q[:, :, rows].to(wide), k[:, :, keys], rows, causal)
        top = scores.amax(-1, keepdim=True)
        total = scores.sub_(top).exp_().sum(-1, keepdim=True)
        lse_BNS[:, :, rows] = (top + total.log()).squeeze(-1)
        out[:, :, rows] = (scores @ v[:, :, keys]).div_(total)
    return out, lse_BNS


def _plain_backward(
    out_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_BNS: Tensor, causal: bool
) -> Gradients:
    wide, types = compute_dtype(q.dtype), (k.dtype, v.dtype)
    q_grad, k, v = torch.empty_like(q), k.to(wide), v.to(wide)
    k_grad, v_grad = torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys in _query_blocks(q, k, causal):
        q_rows, g_rows = q[:, :, rows].to(wide), out_grad[:, :, rows].to(wide)
        p = _scores(q_rows, k[:, :, keys], rows, causal).sub_(lse_BNS[:, :, rows, None]).exp_()
        v_grad[:, :, keys] += p.mT @ g_rows
        owed = (g_rows * out[:, :, rows]).sum(-1, keepdim=True)
        scores_grad = (g_rows @ v[:, :, keys].mT).sub_(owed).mul_(p).div_(math.sqrt(q.shape[-1]))
        q_grad[:, :, rows] = scores_grad @ k[:, :, keys]
        k_grad[:, :, keys] += scores_grad.mT @ q_rows
    return q_grad, k_grad.to(types[0]), v_grad.to(types[1])


def _query_blocks(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Queries whose scores are made at once, and the keys that they see."""
    (batch, heads, new, _), seen = q.shape, k.shape[2]
    rows = max(1, _BLOCK_ELEMENTS // (batch * heads * seen))
    for start in range(0, new, rows):
        end = min(start + rows, new)
        yield slice(start, end), slice(0, end if causal else seen)


def _scores(q_rows: Tensor, k: Tensor, rows: slice, causal: bool) -> Tensor:
    scores = (q_rows @ k.mT).div_(math.sqrt(q_rows.shape[-1]))
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=k.device).triu_(rows.start + 1)
        scores.masked_fill_(hidden, -math.inf)
    return scores
