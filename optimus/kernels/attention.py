"""Softmax attention over blocks of keys. The results of several blocks combine into attention over all keys (Rabe
and Staats 2021; ring attention, Liu et al. 2023).

Log-sum-exps use the natural logarithm and are in fp32 (float64 for float64). A sink is an additional key of a head with
a learned score and value 0 (gpt-oss; Xiao et al. 2023).

Legend: B batch, S queries, P keys, N heads, M heads of keys and values (N / M heads share one), D head size, X any
further dims.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from optimus.autograd import once_differentiable
from optimus.kernels.backend import compute_dtype

Gradients = tuple[Tensor, Tensor, Tensor]

_BLOCK_ELEMENTS = 1 << 22  # maximum number of scores of a block of query rows; a block of one row may have more


class Scoring(NamedTuple):
    """Options of the attention scores: window, cap and sinks."""

    window: int | None = None  # number of positions to attend to, including the query's own; None: no limit
    cap: float | None = None  # scores s become cap * tanh(s / cap) (Gemma 2, section 2)
    sink_N: Tensor | None = None


PLAIN = Scoring()


def causal_attention(q_BSND: Tensor, k_BPMD: Tensor, v_BPMD: Tensor, scoring: Scoring = PLAIN) -> Tensor:
    """Computes causal attention of the last S of P positions, [B, S, N, D].

    Consecutive heads share keys and values.
    """
    window, cap, sink_N = scoring
    new = q_BSND.shape[1]
    if new == 1 and window is not None:
        k_BPMD, v_BPMD, window = k_BPMD[:, -window:], v_BPMD[:, -window:], None
    seen = k_BPMD.shape[1]
    blocks = cap is not None or sink_N is not None or 1 < new < seen or (window or seen) < seen
    q, k, v = _heads_first(q_BSND, k_BPMD, v_BPMD)
    grouped = q.shape[1] != k.shape[1]
    if grouped and not blocks and flash_fits(q, k, v, new > 1):
        return F.scaled_dot_product_attention(q, k, v, is_causal=new > 1, enable_gqa=True).transpose(1, 2)
    if blocks or (grouped and new > 1):
        return attend_blocks(q_BSND, k_BPMD, v_BPMD, capped(blocks_of(new, seen, window), cap), sink_N)
    k, v = _for_each_head(q, k, v)
    if q.is_meta:  # torch would choose a path that materializes all scores
        return _cpu(q, k, v, new > 1)[0].transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=new > 1).transpose(1, 2)


def attend_last(q_BND: Tensor, k_BPMD: Tensor, v_BPMD: Tensor, last_B: Tensor, scoring: Scoring = PLAIN) -> Tensor:
    """Computes attention of each row's query, at position `last_B`, over the row's keys up to this position: [B, N, D].

    Masked keys and values must be finite.
    """
    window, cap, sink_N = scoring
    # Heads that share keys become the queries of one head.
    q, k, v = q_BND.unflatten(1, (k_BPMD.shape[2], -1)), k_BPMD.transpose(1, 2), v_BPMD.transpose(1, 2)
    position_P, last_B1 = torch.arange(k.shape[2], device=k.device), last_B[:, None]
    seen_BP = position_P <= last_B1
    if window is not None:
        seen_BP &= position_P > last_B1 - window
    seen = seen_BP[:, None, None]
    if cap is None and sink_N is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).flatten(1, 2)
    wide = compute_dtype(q.dtype)
    scores = (q.to(wide) @ k.to(wide).mT).div_(math.sqrt(q.shape[-1]))
    if cap is not None:
        scores.div_(cap).tanh_().mul_(cap)
    scores.masked_fill_(~seen, -math.inf)
    if sink_N is not None:
        sink = sink_N.to(wide).view(k.shape[1], -1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    p = scores.softmax(-1)[..., : k.shape[2]]
    return (p @ v.to(wide)).flatten(1, 2).to(q.dtype)


def attend_blocks(
    q_BSND: Tensor, k_BPMD: Tensor, v_BPMD: Tensor, blocks: "Sequence[AttentionBlock]", sink_N: Tensor | None = None
) -> Tensor:
    """Computes attention of all queries over the keys of their blocks, [B, S, N, D].

    Every query must be in exactly one causal block, which must precede the query's other blocks. A single block must
    have all queries and all keys.
    """
    return _Blocks.apply(q_BSND, k_BPMD, v_BPMD, sink_N, blocks)


def attention_block(
    q_BSND: Tensor, k_BPMD: Tensor, v_BPMD: Tensor, causal: bool, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (attention of all queries over all keys [B, S, N, D], log-sum-exp of the scores [B, N, S]).

    If `causal`, S must be P, and query i attends to keys up to i.
    """
    q, k, v = _heads_first(q_BSND, k_BPMD, v_BPMD)
    k, v = _for_each_head(q, k, v)
    out, lse_BNS = _path(q, k, v, causal, cap).forward(q, k, v, causal)
    return out.transpose(1, 2), lse_BNS


def attention_block_backward(
    out_grad_BSND: Tensor,
    q_BSND: Tensor,
    k_BPMD: Tensor,
    v_BPMD: Tensor,
    out_BSND: Tensor,
    lse_BNS: Tensor,
    causal: bool,
    cap: float | None = None,
) -> Gradients:
    """Returns a block's contributions to the gradients of its queries, keys and values.

    `out_BSND` and `lse_BNS` must be over all keys of the queries, not only over the block's keys.
    """
    q, k, v, out, out_grad = _heads_first(q_BSND, k_BPMD, v_BPMD, out_BSND, out_grad_BSND)
    shared = k.shape[1]
    k, v = _for_each_head(q, k, v)
    q_grad, k_grad, v_grad = _path(q, k, v, causal, cap).backward(out_grad, q, k, v, out, lse_BNS, causal)
    if shared != q.shape[1]:
        k_grad, v_grad = (t.unflatten(1, (shared, -1)).sum(2) for t in (k_grad, v_grad))
    return q_grad.transpose(1, 2), k_grad.transpose(1, 2), v_grad.transpose(1, 2)


def merge_block(out_BSND: Tensor, lse_BNS: Tensor, block_BSND: Tensor, block_lse_BNS: Tensor) -> None:
    """Merges another block's attention and log-sum-exp into `out_BSND` (fp32 or float64) and `lse_BNS`, in place."""
    weight_BNS = torch.sigmoid(block_lse_BNS - lse_BNS)
    out_BSND.lerp_(block_BSND.to(out_BSND.dtype), weight_BNS.transpose(1, 2)[..., None])
    lse_BNS.copy_(torch.logaddexp(lse_BNS, block_lse_BNS))


def add_attention_sink(out_BSND: Tensor, lse_BNS: Tensor, sink_N: Tensor | None) -> None:
    """Merges the sinks, if given, into `out_BSND` and `lse_BNS`, in place."""
    if sink_N is not None:
        sink_N1 = sink_N[:, None].to(lse_BNS.dtype)
        out_BSND.mul_(torch.sigmoid(lse_BNS - sink_N1).transpose(1, 2)[..., None])
        lse_BNS.copy_(torch.logaddexp(lse_BNS, sink_N1))


def sink_gradient(out_grad_BSND: Tensor, out_BSND: Tensor, lse_BNS: Tensor, sink_N: Tensor | None) -> Tensor | None:
    """Returns the gradient [N] of the sinks, None without sinks. `out_BSND` and `lse_BNS` must include the sinks."""
    if sink_N is None:
        return None
    owed_BNS = torch.linalg.vecdot(out_grad_BSND.to(lse_BNS.dtype), out_BSND.to(lse_BNS.dtype)).transpose(1, 2)
    return (sink_N[:, None] - lse_BNS).exp_().mul_(owed_BNS).sum((0, 2)).neg_().to(sink_N.dtype)


def attention_reference(
    q_BSND: Tensor,
    k_BPMD: Tensor,
    v_BPMD: Tensor,
    causal: bool,
    window: int | None = None,
    cap: float | None = None,
    sink_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Reference implementation for tests: (attention, log-sum-exp).

    If `causal`, the queries are the last S of P positions.
    """
    q, k, v = (t.to(compute_dtype(t.dtype)) for t in _heads_first(q_BSND, k_BPMD, v_BPMD))
    k, v = _for_each_head(q, k, v)
    scores_BNSP = q @ k.mT / math.sqrt(q.shape[-1])
    if cap is not None:
        scores_BNSP = cap * (scores_BNSP / cap).tanh()
    if causal:
        new, seen = scores_BNSP.shape[-2:]
        hidden_SP = torch.ones(new, seen, dtype=torch.bool, device=q.device).triu(seen - new + 1)
        if window is not None:
            hidden_SP |= torch.ones_like(hidden_SP).tril(seen - new - window)
        scores_BNSP = scores_BNSP.masked_fill(hidden_SP, -math.inf)
    if sink_N is not None:
        sink_BNS1 = sink_N.to(q.dtype)[:, None, None].expand(*scores_BNSP.shape[:-1], 1)
        scores_BNSP, v = torch.cat([scores_BNSP, sink_BNS1], -1), F.pad(v, (0, 0, 0, 1))
    out = scores_BNSP.softmax(-1) @ v
    return out.transpose(1, 2).to(q_BSND.dtype), scores_BNSP.logsumexp(-1)


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BSND: Tensor,
        k_BPMD: Tensor,
        v_BPMD: Tensor,
        sink_N: Tensor | None,
        blocks: "Sequence[AttentionBlock]",
    ) -> Tensor:
        ctx.blocks = blocks
        if len(blocks) == 1:
            out_BSND, lse_BNS = attention_block(q_BSND, k_BPMD, v_BPMD, True, blocks[0].cap)
        else:
            out_BSND, lse_BNS = no_attention(q_BSND, _merged(blocks))
            for block in blocks:
                block.attend(out_BSND, lse_BNS, q_BSND, k_BPMD, v_BPMD)
        add_attention_sink(out_BSND, lse_BNS, sink_N)
        out_BSND = out_BSND.to(q_BSND.dtype)
        ctx.save_for_backward(q_BSND, k_BPMD, v_BPMD, out_BSND, lse_BNS, sink_N)
        return out_BSND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *saved, sink_N = ctx.saved_tensors  # read only once: recomputation can unpack saved tensors only once
        sink_grad_N = sink_gradient(grads[0], saved[3], saved[4], sink_N)
        if len(ctx.blocks) == 1:
            given = [grads[0], *saved, True, ctx.blocks[0].cap]
            return *attention_block_backward(*given), sink_grad_N, None
        wide = saved[-1].dtype if _merged(ctx.blocks) else saved[0].dtype
        found = [torch.zeros_like(t, dtype=wide) for t in saved[:3]]
        for block in ctx.blocks:
            parts = block.backward(grads[0], *saved)
            for total, part, rows in zip(found, parts, (block.queries, block.keys, block.keys), strict=True):
                total[:, rows] += part
        return *(total.to(saved[0].dtype) for total in found), sink_grad_N, None


def _merged(blocks: "Sequence[AttentionBlock]") -> bool:
    return any(block.mask != "causal" for block in blocks)


class AttentionBlock(NamedTuple):
    """A slice of queries, and a slice of keys that the queries attend to according to `mask`.

    With `causal`, query i attends to keys up to i; with `window`, to keys from i on. A `causal` or `window` block has
    as many keys as queries. A window block with reversed queries and keys is a causal block.
    """

    queries: slice
    keys: slice
    mask: Literal["none", "causal", "window"]
    cap: float | None = None

    def moved(self, queries: int, keys: int) -> "AttentionBlock":
        """Returns a copy of the block, shifted by `queries` query positions and `keys` key positions."""
        rows, seen = slice(self.queries.start + queries, self.queries.stop + queries), self.keys
        return self._replace(queries=rows, keys=slice(seen.start + keys, seen.stop + keys))

    def attend(self, out_BSND: Tensor, lse_BNS: Tensor, q_BSND: Tensor, k_BPMD: Tensor, v_BPMD: Tensor) -> None:
        """Merges the attention over this block's keys into `out_BSND` and `lse_BNS`.

        A causal block overwrites the results of its queries, and must be the first block of its queries.
        """
        q, k, v = self._rows(self.queries, q_BSND), self._rows(self.keys, k_BPMD), self._rows(self.keys, v_BPMD)
        out, lse = attention_block(q, k, v, self.mask != "none", self.cap)
        if self.mask == "window":
            out, lse = out.flip(1), lse.flip(2)
        if self.mask == "causal":
            out_BSND[:, self.queries], lse_BNS[:, :, self.queries] = out, lse
        else:
            merge_block(out_BSND[:, self.queries], lse_BNS[:, :, self.queries], out, lse)

    def backward(
        self, out_grad_BSND: Tensor, q_BSND: Tensor, k_BPMD: Tensor, v_BPMD: Tensor, out_BSND: Tensor, lse_BNS: Tensor
    ) -> Gradients:
        """Returns the block's contributions to the gradients; see `attention_block_backward`."""
        out_grad, q, out = (self._rows(self.queries, t) for t in (out_grad_BSND, q_BSND, out_BSND))
        k, v = self._rows(self.keys, k_BPMD), self._rows(self.keys, v_BPMD)
        lse = self._rows(self.queries, lse_BNS.mT).mT
        q_grad, k_grad, v_grad = attention_block_backward(out_grad, q, k, v, out, lse, self.mask != "none", self.cap)
        if self.mask == "window":
            return q_grad.flip(1), k_grad.flip(1), v_grad.flip(1)
        return q_grad, k_grad, v_grad

    def _rows(self, rows: slice, t_BSX: Tensor) -> Tensor:
        return t_BSX[:, rows].flip(1) if self.mask == "window" else t_BSX[:, rows]


def capped(blocks: "Iterable[AttentionBlock]", cap: float | None) -> "list[AttentionBlock]":
    """Returns a list of `blocks`, with `cap` if given."""
    return list(blocks) if cap is None else [block._replace(cap=cap) for block in blocks]


def no_attention(q_BSND: Tensor, merged: bool = True) -> tuple[Tensor, Tensor]:
    """Allocates (attention, log-sum-exp [B, N, S]), uninitialised, in fp32 (float64 for float64).

    If not `merged`, the attention has the dtype of q.
    """
    wide = compute_dtype(q_BSND.dtype)
    out_BSND = torch.empty_like(q_BSND, dtype=wide if merged else None, memory_format=torch.contiguous_format)
    return out_BSND, out_BSND.new_empty(len(q_BSND), *q_BSND.shape[2:0:-1], dtype=wide)


def blocks_of(new: int, seen: int, window: int | None) -> Iterator[AttentionBlock]:
    """Yields the blocks of causal attention for the last `new` of `seen` positions.

    The causal block of a query comes before the query's other blocks.
    """
    before = seen - new
    if window is None or window >= seen:
        yield AttentionBlock(slice(0, new), slice(before, seen), "causal")
        if before:
            yield AttentionBlock(slice(0, new), slice(0, before), "none")
        return
    starts = [before, *range((before // window + 1) * window, seen, window)]
    for start, end in zip(starts, [*starts[1:], seen], strict=True):
        yield AttentionBlock(slice(start - before, end - before), slice(start, end), "causal")
        first_full = max(0, end - window)
        if first_full < start:
            yield AttentionBlock(slice(start - before, end - before), slice(first_full, start), "none")
        if start >= window and end - start > 1:
            yield AttentionBlock(
                slice(start - before, end - 1 - before), slice(start - window + 1, first_full), "window"
            )


def _for_each_head(q: Tensor, *shared: Tensor) -> list[Tensor]:
    """Repeats tensors [B, M, P, D] for the heads of q: [B, N, P, D]."""
    times = q.shape[1] // shared[0].shape[1]
    return [t if times == 1 else t.repeat_interleave(times, 1) for t in shared]


def _heads_first(*tensors_BSND: Tensor) -> list[Tensor]:
    """Transposes each tensor to [B, N, S, D] with a contiguous last dim, which the CPU operator assumes."""
    return [(t if t.stride(-1) == 1 else t.contiguous()).transpose(1, 2) for t in tensors_BSND]


def blocks_before(new: int, seen: int, distance: int, window: int | None) -> Iterator[AttentionBlock]:
    """Yields the blocks of `new` queries over `seen` earlier keys.

    The first key is `distance` positions before the first query.
    """
    reach = new if window is None else min(window - distance, new)  # query i attends to key j if i - j < reach
    if reach > 0:
        yield AttentionBlock(slice(0, reach), slice(0, seen), "none")
    first, last = max(reach, 0), min(new, seen + reach - 1)  # queries that attend to some, not all keys
    if first < last:
        triangle = slice(first - reach + 1, last - reach + 1)
        yield AttentionBlock(slice(first, last), triangle, "window")
        if triangle.stop < seen:
            yield AttentionBlock(slice(first, last), slice(triangle.stop, seen), "none")


# ---- In the functions below, heads come first: q [B, N, S, D], k and v [B, N or M, P, D] ----


class _Path(NamedTuple):
    forward: Callable[..., tuple[Tensor, Tensor]]  # arguments (q, k, v, causal)
    backward: Callable[..., Gradients]  # arguments (out_grad, q, k, v, out, lse, causal)


def flash_fits(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Returns True if the device has flash attention for these tensors, without padding of the head size."""
    if q.device.type != "cuda" or q.shape[-1] % 8 != 0:
        return False
    return bool(can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, causal, q.shape[1] != k.shape[1])))


def _path(q: Tensor, k: Tensor, v: Tensor, causal: bool, cap: float | None) -> _Path:
    if cap is not None:
        return _Path(partial(_plain, cap=cap), partial(_plain_backward, cap=cap))
    if q.device.type in ("cpu", "meta"):
        return _Path(_cpu, _cpu_backward)
    if flash_fits(q, k, v, causal):
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
    no_seed = q.new_empty(2, dtype=torch.uint64 if torch.version.hip is None else torch.int64)
    lengths = q.shape[2], k.shape[2]
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    lse_BNS = lse_BNS.contiguous()
    return backward(out_grad, q, k, v, out, lse_BNS, None, None, *lengths, 0.0, causal, no_seed, no_seed)


def _plain(q: Tensor, k: Tensor, v: Tensor, causal: bool, cap: float | None = None) -> tuple[Tensor, Tensor]:
    wide = compute_dtype(q.dtype)
    out, lse_BNS = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=wide)
    k, v = k.to(wide), v.to(wide)
    for rows, keys in _query_blocks(q, k, causal):
        scores = _scores(q[:, :, rows].to(wide), k[:, :, keys], rows, causal, cap)
        top = scores.amax(-1, keepdim=True)
        total = scores.sub_(top).exp_().sum(-1, keepdim=True)
        lse_BNS[:, :, rows] = (top + total.log()).squeeze(-1)
        out[:, :, rows] = (scores @ v[:, :, keys]).div_(total)
    return out, lse_BNS


def _plain_backward(
    out_grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse_BNS: Tensor,
    causal: bool,
    cap: float | None = None,
) -> Gradients:
    wide, types = compute_dtype(q.dtype), (k.dtype, v.dtype)
    q_grad, k, v = torch.empty_like(q), k.to(wide), v.to(wide)
    k_grad, v_grad = torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys in _query_blocks(q, k, causal):
        q_rows, g_rows = q[:, :, rows].to(wide), out_grad[:, :, rows].to(wide)
        scores = _scores(q_rows, k[:, :, keys], rows, causal, cap)
        # The derivative of the cap; 0 where scores are masked (minus infinity).
        slope = None if cap is None else (scores / cap).square_().clamp_(max=1).neg_().add_(1)
        p = scores.sub_(lse_BNS[:, :, rows, None]).exp_()
        v_grad[:, :, keys] += p.mT @ g_rows
        owed = (g_rows * out[:, :, rows]).sum(-1, keepdim=True)
        scores_grad = (g_rows @ v[:, :, keys].mT).sub_(owed).mul_(p).div_(math.sqrt(q.shape[-1]))
        if slope is not None:
            scores_grad.mul_(slope)
        q_grad[:, :, rows] = scores_grad @ k[:, :, keys]
        k_grad[:, :, keys] += scores_grad.mT @ q_rows
    return q_grad, k_grad.to(types[0]), v_grad.to(types[1])


def _query_blocks(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    (batch, heads, new, _), seen = q.shape, k.shape[2]
    rows = max(1, _BLOCK_ELEMENTS // max(1, batch * heads * seen))
    for start in range(0, new, rows):
        end = min(start + rows, new)
        yield slice(start, end), slice(0, end if causal else seen)


def _scores(q_rows: Tensor, k: Tensor, rows: slice, causal: bool, cap: float | None) -> Tensor:
    scores = (q_rows @ k.mT).div_(math.sqrt(q_rows.shape[-1]))
    if cap is not None:
        scores.div_(cap).tanh_().mul_(cap)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=k.device).triu_(rows.start + 1)
        scores.masked_fill_(hidden, -math.inf)
    return scores
