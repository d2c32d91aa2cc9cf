"""Context parallelism: the ranks of a group split every sequence, and attend to the whole sequence.

In `RingSequence`, keys and values travel around the ranks (ring attention, Liu et al. 2023). In `UlyssesSequence`,
all-to-alls turn splits of the sequence into splits of the heads, and back (DeepSpeed-Ulysses, Jacobs et al. 2023).

Legend: n ranks, B batch, L positions of a whole sequence, S = L / n positions of this rank, N heads, M heads of keys
and values, D head size. With documents, the inputs of `attend` have B = 1, and dim S has this rank's positions of all
sequences.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optimus.autograd import once_differentiable
from optimus.comm import Group, Groups, Result
from optimus.comm.functional import all_to_all_rows, cached, shift_async
from optimus.errors import UserError
from optimus.kernels.attention import (
    PLAIN,
    AttentionBlock,
    Scoring,
    add_attention_sink,
    blocks_before,
    blocks_of,
    capped,
    no_attention,
    sink_gradient,
)
from optimus.kernels.documents import Documents
from optimus.model.sequence import SequenceSplit
from optimus.parallel.options import StageOptions

if TYPE_CHECKING:
    from typing_extensions import Self  # `typing` has it from Python 3.11 on

Seen = Callable[[int], list[AttentionBlock]]  # maps rank r to the blocks of this rank's queries and r's keys


class RingSequence(SequenceSplit):
    """A `SequenceSplit` by ring attention: rank i has the pieces i and 2n - 1 - i of 2n pieces of every sequence
    (zig-zag order).

    In the forward pass, each rank sends 2 (n - 1) B S M D numbers.
    """

    def __init__(self, group: Group, documents: Documents | None = None) -> None:
        super().__init__(documents)
        self.parts = group.size
        self._group = group
        self._seen = cache(partial(_seen, group.rank, group.size, documents))

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Returns the positions of this rank's two pieces.

        Raises:
            UserError: the length is not a multiple of 2n.
        """
        _check(length, 2 * self.parts, "context_method ring")
        pieces = torch.arange(length, device=device).view(2 * self.parts, -1)
        return torch.cat([pieces[self._group.rank], pieces[-1 - self._group.rank]])

    def attend(self, q_BSND: Tensor, k_BSMD: Tensor, v_BSMD: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        """Computes causal attention over all ranks' positions (see `SequenceSplit`).

        All ranks must call this method.
        """
        seen = partial(self._seen, q_BSND.shape[1], scoring.window, scoring.cap)
        return _Ring.apply(q_BSND, k_BSMD, v_BSMD, scoring.sink_N, self._group, seen)

    def for_documents(self, documents: Documents) -> "Self":
        return type(self)(self._group, documents)


class UlyssesSequence(SequenceSplit):
    """A `SequenceSplit` by all-to-all: rank i has the i-th of n pieces; during attention, the i-th of n groups of
    heads.

    N and M must be multiples of n. In the forward pass, each rank sends 2 B S (N + M) D (n - 1) / n numbers.
    """

    def __init__(self, group: Group, documents: Documents | None = None) -> None:
        super().__init__(documents)
        self.parts = group.size
        self._group, self._unsharded = group, SequenceSplit(documents)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Returns the positions of this rank's piece.

        Raises:
            UserError: the length is not a multiple of n.
        """
        _check(length, self.parts, "context_method ulysses")
        return torch.arange(length, device=device).view(self.parts, -1)[self._group.rank]

    def attend(self, q_BSND: Tensor, k_BSMD: Tensor, v_BSMD: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        """Computes causal attention over all ranks' positions (see `SequenceSplit`).

        All ranks must call this method.
        """
        if scoring.sink_N is not None:
            scoring = scoring._replace(sink_N=scoring.sink_N.chunk(self.parts)[self._group.rank])
        if self._documents is None:
            q, k, v = self._to_heads(q_BSND, k_BSMD, v_BSMD)
            return self._to_sequence(self._unsharded.attend(q, k, v, scoring))
        sequences = self._documents.sequences
        apart = (t[0].unflatten(0, (sequences, -1)) for t in (q_BSND, k_BSMD, v_BSMD))
        q, k, v = (t.flatten(0, 1)[None] for t in self._to_heads(*apart))
        y_BLND = self._unsharded.attend(q, k, v, scoring)[0].unflatten(0, (sequences, -1))
        return self._to_sequence(y_BLND).flatten(0, 1)[None]

    def for_documents(self, documents: Documents) -> "Self":
        return type(self)(self._group, documents)

    def _to_heads(self, *tensors_BSND: Tensor) -> tuple[Tensor, ...]:
        """Returns each tensor [B, S, N or M, D] for this rank's heads and the whole sequence, [B, L, heads / n, D]."""
        per_rank = [t.unflatten(2, (self.parts, -1)).permute(2, 0, 1, 3, 4) for t in tensors_BSND]
        came = self._exchange(torch.cat(per_rank, 3)).permute(1, 0, 2, 3, 4).flatten(1, 2)
        return came.split([t.shape[3] for t in per_rank], 2)

    def _to_sequence(self, y_BLND: Tensor) -> Tensor:
        came = self._exchange(y_BLND.unflatten(1, (self.parts, -1)).transpose(0, 1))
        return came.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _exchange(self, x: Tensor) -> Tensor:
        return all_to_all_rows(x, [1] * self.parts, [1] * self.parts, self._group)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BSND: Tensor, k_BSMD: Tensor, v_BSMD: Tensor, sink_N: Tensor | None, group: Group, seen: Seen
    ) -> Tensor:
        out_BSND, lse_BNS = cached(lambda: _ring(q_BSND, k_BSMD, v_BSMD, sink_N, group, seen), group)
        ctx.save_for_backward(q_BSND, k_BSMD, v_BSMD, out_BSND, lse_BNS, sink_N)
        ctx.group, ctx.seen = group, seen
        return out_BSND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *saved, sink_N = ctx.saved_tensors
        sink_grad_N = sink_gradient(grads[0], saved[3], saved[4], sink_N)
        return *_ring_backward(ctx.group, ctx.seen, grads[0], *saved), sink_grad_N, None, None


def _ring(
    q_BSND: Tensor, k_BSMD: Tensor, v_BSMD: Tensor, sink_N: Tensor | None, group: Group, seen: Seen
) -> tuple[Tensor, Tensor]:
    """Returns (attention [B, S, N, D], log-sum-exp of the scores [B, N, S]) over all ranks' positions."""
    out_BSND, lse_BNS = no_attention(q_BSND)
    for source, (k, v) in _going_round(torch.stack([k_BSMD, v_BSMD]), group):
        for block in seen(source):
            block.attend(out_BSND, lse_BNS, q_BSND, k, v)
    add_attention_sink(out_BSND, lse_BNS, sink_N)
    return out_BSND.to(q_BSND.dtype), lse_BNS


def _ring_backward(
    group: Group,
    seen: Seen,
    out_grad_BSND: Tensor,
    q_BSND: Tensor,
    k_BSMD: Tensor,
    v_BSMD: Tensor,
    out_BSND: Tensor,
    lse_BNS: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v."""
    wide = lse_BNS.dtype
    q_grad = torch.zeros_like(q_BSND, dtype=wide)
    arriving = Result(partial(q_grad.new_zeros, (2, *k_BSMD.shape)))
    for source, (k, v) in _going_round(torch.stack([k_BSMD, v_BSMD]), group):
        blocks = seen(source)
        found = [block.backward(out_grad_BSND, q_BSND, k, v, out_BSND, lse_BNS) for block in blocks]
        kv_grad = arriving.wait()
        for block, (q_part, k_part, v_part) in zip(blocks, found):
            q_grad[:, block.queries] += q_part
            kv_grad[0, :, block.keys] += k_part
            kv_grad[1, :, block.keys] += v_part
        arriving = shift_async(kv_grad, group)
    k_grad, v_grad = arriving.wait()
    return q_grad.to(q_BSND.dtype), k_grad.to(k_BSMD.dtype), v_grad.to(v_BSMD.dtype)


def _going_round(tensor: Tensor, group: Group) -> Iterator[tuple[int, Tensor]]:
    """Yields (rank, the rank's tensor) for every rank, starting with this rank.

    The next tensor arrives while the caller uses the current tensor.
    """
    here = tensor
    for step in range(group.size - 1):
        arriving = shift_async(here, group)
        yield (group.rank - step) % group.size, here
        here = arriving.wait()
    yield (group.rank + 1) % group.size, here


def _seen(
    rank: int,
    ranks: int,
    documents: Documents | None,
    length: int,
    window: int | None,
    cap: float | None,
    source: int,
) -> list[AttentionBlock]:
    """Returns the blocks by which the `length` positions of `rank` attend to the positions of rank `source`.

    A query's causal block precedes the query's other blocks.
    """
    half = length // 2
    if documents is None:
        if window is None:
            first, second, all_positions = slice(half), slice(half, length), slice(length)
            if source == rank:
                block = AttentionBlock(all_positions, all_positions, "causal")
            else:
                block = (
                    AttentionBlock(all_positions, first, "none")
                    if source < rank
                    else AttentionBlock(second, all_positions, "none")
                )
            return capped([block], cap)
        documents = Documents([ranks * length], 1)
    half //= documents.sequences
    mine, theirs = ([(0, each), (half, 2 * ranks - 1 - each)] for each in (rank, source))  # pairs (start, piece)
    # The pairs of a piece with itself have the causal blocks, which must come first.
    pairs = sorted(product(mine, theirs), key=lambda pair: pair[0][1] != pair[1][1])
    return capped((block for pair in pairs for block in _seen_in_piece(*pair, half, ranks, documents, window)), cap)


def _seen_in_piece(
    mine: tuple[int, int], theirs: tuple[int, int], size: int, ranks: int, documents: Documents, window: int | None
) -> Iterator[AttentionBlock]:
    """Yields the blocks by which the piece `mine` of every sequence attends to the piece `theirs` of the same sequence.

    Pieces have `size` tokens. `mine` and `theirs` are (the piece's offset in the rank's part of a sequence, the piece's
    index in the sequence).
    """
    (at, piece), (there, other) = mine, theirs
    if other > piece:
        return
    for start, end in documents.spans:
        sequence = start // (2 * ranks * size)
        before = sequence * 2 * ranks * size  # number of tokens of earlier sequences
        (first, last), (begin, stop) = (
            (max(start - before, each * size), min(end - before, (each + 1) * size)) for each in (piece, other)
        )
        if first >= last or begin >= stop:
            continue
        here = 2 * size * sequence
        moves = here + at + first - piece * size, here + there + begin - other * size
        if piece == other:
            blocks = blocks_of(last - first, last - first, window)
        else:
            blocks = blocks_before(last - first, stop - begin, first - begin, window)
        yield from (block.moved(*moves) for block in blocks)


def _check(length: int, multiple: int, method: str) -> None:
    if length % multiple != 0:
        raise UserError(
            f"{method} cannot divide sequences of {length} tokens: choose a multiple of {multiple}, such as "
            f"{length + -length % multiple}"
        )


def sequence_split(groups: Groups, options: StageOptions) -> SequenceSplit:
    """Returns the split of sequences over the context-parallel ranks of `groups`."""
    group = groups.along("cp")
    if group.size == 1:
        return SequenceSplit()
    return RingSequence(group) if options.context_method == "ring" else UlyssesSequence(group)
