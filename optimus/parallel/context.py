"""Context parallelism: every sequence is divided over the ranks of a group, and attention is exact over all of it.

`RingSequence`: keys and values go round the ranks while each computes with those it has (ring attention, Liu et al. 2023).
The work is even because a rank has a piece of the beginning and its mirror image from the end (the zig-zag order).
`UlyssesSequence`: an all-to-all makes parts of the sequence into parts of the heads and another one makes them parts of the
sequence again (DeepSpeed-Ulysses, Jacobs et al. 2023).

Legend: n ranks, B batch, L positions of a whole sequence, S = L / n of this rank, N heads, M heads of keys and values, D
head size.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from optimus.autograd import once_differentiable
from optimus.comm import Group
from optimus.comm.functional import cached, exchange_rows
from optimus.errors import UserError
from optimus.kernels.attention import attention_block, attention_block_backward, causal_attention, merge_block


class RingSequence:
    """Rank i has pieces i and 2n - 1 - i of 2n. A `Sequence`.

    Each rank sends n - 1 times its keys and values in the forward pass, 2 (n - 1) B S M D numbers; in the backward pass it
    does so again and sends n times their gradients, 2 n B S M D numbers in fp32. The transfers to the next rank overlap
    with the attention to what is here. Saved are q, k, v and the output, and one number per query and head.
    """

    def __init__(self, group: Group) -> None:
        self.parts = group.size
        self._group = group

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Those of the two pieces; see `Sequence`.

        Raises:
            UserError: the length is no multiple of 2n.
        """
        _check(length, 2 * self.parts, "context_method ring")
        pieces = torch.arange(length, device=device).view(2 * self.parts, -1)
        return torch.cat([pieces[self._group.rank], pieces[-1 - self._group.rank]])

    def attend(self, q_BSND: Tensor, k_BSMD: Tensor, v_BSMD: Tensor, window: int | None = None) -> Tensor:
        """Causal attention over all ranks' positions; all must call it. See `Sequence`."""
        if window is not None:
            raise NotImplementedError("config.combinations refuses windows in a ring")
        return _Ring.apply(q_BSND, k_BSMD, v_BSMD, self._group)


class UlyssesSequence:
    """Rank i has the i-th of n pieces; during attention, the i-th of n parts of the heads. A `Sequence`.

    N and M must be multiples of n. Given to an all-to-all in the forward pass are q, k and v in one, and the output:
    2 B S (N + M) D numbers, of which (n - 1) / n leave the rank; and as many in the backward pass.
    """

    def __init__(self, group: Group) -> None:
        self.parts = group.size
        self._group = group

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Those of the piece; see `Sequence`.

        Raises:
            UserError: the length is no multiple of n.
        """
        _check(length, self.parts, "context_method ulysses")
        return torch.arange(length, device=device).view(self.parts, -1)[self._group.rank]

    def attend(self, q_BSND: Tensor, k_BSMD: Tensor, v_BSMD: Tensor, window: int | None = None) -> Tensor:
        """Causal attention over all ranks' positions; all must call it. See `Sequence`."""
        q, k, v = self._to_heads(q_BSND, k_BSMD, v_BSMD)
        return self._to_sequence(causal_attention(q, k, v, window))

    def _to_heads(self, *tensors_BSND: Tensor) -> tuple[Tensor, ...]:
        """This rank's heads of the whole sequence, each [B, L, N / n, D]."""
        per_rank = [t.unflatten(2, (self.parts, -1)).permute(2, 0, 1, 3, 4) for t in tensors_BSND]
        came = self._exchange(torch.cat(per_rank, 3)).permute(1, 0, 2, 3, 4).flatten(1, 2)
        return came.split([t.shape[3] for t in per_rank], 2)

    def _to_sequence(self, y_BLND: Tensor) -> Tensor:
        """All heads of this rank's positions, [B, S, N, D], from this rank's of the whole sequence [B, L, N / n, D]."""
        came = self._exchange(y_BLND.unflatten(1, (self.parts, -1)).transpose(0, 1))
        return came.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _exchange(self, x: Tensor) -> Tensor:
        """`x[i]` to rank i; what came from rank i is `[i]` of the result."""
        return exchange_rows(x, [1] * self.parts, [1] * self.parts, self._group)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BSND: Tensor, k_BSMD: Tensor, v_BSMD: Tensor, group: Group) -> Tensor:
        out_BSND, lse_BNS = cached(lambda: _ring(q_BSND, k_BSMD, v_BSMD, group), group)
        ctx.save_for_backward(q_BSND, k_BSMD, v_BSMD, out_BSND, lse_BNS)
        ctx.group = group
        return out_BSND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        return *_ring_backward(ctx.group, grads[0], *ctx.saved_tensors), None


def _ring(q_BSND: Tensor, k_BSMD: Tensor, v_BSMD: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """(attention [B, S, N, D], log-sum-exp of the scores [B, N, S]) over all ranks' positions."""
    round_trip = _going_round(torch.stack([k_BSMD, v_BSMD]), group)
    _, (k, v) = next(round_trip)
    own, lse_BNS = attention_block(q_BSND, k, v, causal=True)
    out_BSND = own.to(lse_BNS.dtype)
    for source, (k, v) in round_trip:
        rows, keys, causal = _seen(group.rank, source, q_BSND.shape[1])
        block, block_lse = attention_block(q_BSND[:, rows], k[:, keys], v[:, keys], causal)
        merge_block(out_BSND[:, rows], lse_BNS[:, :, rows], block, block_lse)
    return out_BSND.to(q_BSND.dtype), lse_BNS


def _ring_backward(
    group: Group,
    out_grad_BSND: Tensor,
    q_BSND: Tensor,
    k_BSMD: Tensor,
    v_BSMD: Tensor,
    out_BSND: Tensor,
    lse_BNS: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v. Those of k and v follow their keys and values round the ring, a step behind them."""
    wide = lse_BNS.dtype
    q_grad = torch.zeros_like(q_BSND, dtype=wide)
    arrive: Callable[[], Tensor] = partial(q_grad.new_zeros, (2, *k_BSMD.shape))
    for source, (k, v) in _going_round(torch.stack([k_BSMD, v_BSMD]), group):
        rows, keys, causal = _seen(group.rank, source, q_BSND.shape[1])
        given = out_grad_BSND[:, rows], q_BSND[:, rows], k[:, keys], v[:, keys], out_BSND[:, rows], lse_BNS[:, :, rows]
        q_part, k_part, v_part = attention_block_backward(*given, causal)
        q_grad[:, rows] += q_part
        kv_grad = arrive()
        kv_grad[0, :, keys] += k_part
        kv_grad[1, :, keys] += v_part
        arrive = _start_shift(kv_grad, group)
    k_grad, v_grad = arrive()
    return q_grad.to(q_BSND.dtype), k_grad.to(k_BSMD.dtype), v_grad.to(v_BSMD.dtype)


def _going_round(own: Tensor, group: Group) -> Iterator[tuple[int, Tensor]]:
    """(rank, its tensor) of every rank, beginning with `own`; the next one is on its way while one is used."""
    here = own
    for step in range(group.size - 1):
        arrive = _start_shift(here, group)
        yield (group.rank - step) % group.size, here
        here = arrive()
    yield (group.rank + 1) % group.size, here


def _start_shift(x: Tensor, group: Group) -> Callable[[], Tensor]:
    """Begin to send `x` to the next rank; the result gives that of the previous one."""
    came = torch.empty_like(x)
    finish = group.start_shift(x, came)
    return lambda: (finish(), came)[1]


def _seen(rank: int, source: int, length: int) -> tuple[slice, slice, bool]:
    """(queries of `rank` that see keys of `source`, those keys, whether causally), as all others see or are seen by none.

    A rank's first piece comes before those of higher ranks, and its second, their mirror image, after them.
    """
    first, second, whole = slice(0, length // 2), slice(length // 2, None), slice(None)
    if source == rank:
        return whole, whole, True
    return (whole, first, False) if source < rank else (second, whole, False)


def _check(length: int, multiple: int, method: str) -> None:
    if length % multiple != 0:
        raise UserError(
            f"sequences of {length} tokens cannot be divided by {method}: it wants a multiple of {multiple}, as "
            f"{length + -length % multiple}"
        )
