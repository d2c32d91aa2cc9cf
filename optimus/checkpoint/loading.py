"""Fills the state from slices of a checkpoint."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from optimus.checkpoint.factors import is_factor
from optimus.checkpoint.slices import TensorSlice, full_slices, slices
from optimus.comm import Group
from optimus.errors import UserError
from optimus.state.chunk import Chunk
from optimus.state.model_state import ModelState

Send = Literal["broadcast", "allreduce", "none"]
Read = Callable[[Iterable[TensorSlice]], None]


def _check_pruned(chunk: Chunk, dense: Tensor, first: int) -> None:
    """Raises `UserError` if pruned weights in `dense`, which starts at element `first` of the chunk, are not zero."""
    assert chunk.plan.mask is not None
    extent = chunk.plan.shard if len(dense) < chunk.plan.size else slice(0, chunk.plan.mask.unpruned)
    compressed = chunk.elements.compressed(dense, extent, first)
    if int(dense.count_nonzero()) != int(compressed.count_nonzero()):
        raise UserError(
            f"weights of {chunk.plan.slots[0].name} ... are not zero where the checkpoint's masks prune them: the masks "
            "belong to other weights. Use a checkpoint as it was written"
        )


class _Transfer(NamedTuple):
    """A buffer of a chunk to fill, with the key prefix `kind`.

    Rank `reader` of `group` reads and sends the buffer, unless every rank reads its own shard. With `pruned`, `fill`
    raises `UserError` for pruned weights that are not zero.
    """

    chunk: Chunk
    kind: str
    group: Group
    reader: int
    pruned: bool

    @property
    def reads(self) -> bool:
        return self.group.rank == self.reader

    def fill(self, dense: Tensor, read: Read, first: int = 0) -> None:
        """Reads elements of the chunk into `dense`, which starts at element `first` of the chunk."""
        read(slices(self.chunk.plan, self.kind, dense, first=first))
        if self.pruned and self.kind == "model" and self.chunk.elements.prunes:
            _check_pruned(self.chunk, dense, first)


def load_slices(
    state: ModelState,
    read: Read,
    *,
    full: bool,
    send: Send = "broadcast",
    pruned: bool = False,
    factors: bool = False,
) -> int:
    """Fills the weights and the modules' buffers, and with `full` the state of the update rules.

    Without `full`, initializes the state of the update rules. One rank reads a chunk and sends the chunk to the ranks
    with the same parameters by broadcast or all-reduce (the Optimus paper, section 4: model broadcasting). With `send`
    "none", every rank reads its own shard. Without `factors`, sets low-rank factors to zero.

    Returns the number of ranks that have read chunks. All ranks must call this function. Raises `UserError` on all
    ranks if `read` raises `UserError` on one rank. With `pruned`, also raises `UserError` if weights are not zero where
    the state is pruned.
    """
    device, world = state.chunks[0].parameter.device, state.groups.world
    if not factors:
        read = partial(_all_but_factors, read)
    transfers = _transfers(state, full, pruned)
    failure = _read_local(transfers, read) if send == "none" else _read_and_send(transfers, read, send)
    world.agree(_read_buffers(state, read, send) or failure)
    for chunk in state.chunks:
        if not full:
            chunk.begin()
        chunk.refresh_compute_copy()
    readers = torch.tensor(float(send == "none" or any(each.reads for each in transfers)), device=device)
    world.all_reduce(readers)
    return int(readers)


def _all_but_factors(read: Read, slices: Iterable[TensorSlice]) -> None:
    read(each for each in slices if not is_factor(each.key))


def _transfers(state: ModelState, full: bool, pruned: bool) -> list[_Transfer]:
    turns: Counter[tuple[str, ...]] = Counter()
    found = []
    for chunk in state.chunks:
        replicas = state.groups.along(*chunk.plan.partial_axes)
        reader = turns[chunk.plan.partial_axes] % replicas.size
        turns[chunk.plan.partial_axes] += 1
        kinds = ["model", *(chunk.plan.rule.kinds if full else ())]
        found += [_Transfer(chunk, kind, replicas, reader, pruned) for kind in kinds]
    return found


def _read_local(transfers: Sequence[_Transfer], read: Read) -> UserError | None:
    try:
        for each in transfers:
            with each.chunk.states(change=True) as parts:
                part = parts[each.kind]
                dense = each.chunk.dense_part(part).zero_()
                each.fill(dense, read, each.chunk.dense_extent.start)
                each.chunk.fill_part(part, dense)
    except UserError as error:
        return error
    return None


def _read_and_send(transfers: Sequence[_Transfer], read: Read, send: Send) -> UserError | None:
    """Reads this rank's buffers and sends all buffers to their groups. Returns an error of this rank's reads, or None.

    After a failure, a rank continues to send, so that the other ranks do not block.
    """
    failure = None
    with ThreadPoolExecutor(1) as pool:
        waiting = deque(each for each in transfers if each.reads)
        ahead: deque[Future[UserError | None]] = deque()
        buffers: deque[Tensor] = deque()

        def read_next() -> None:
            if waiting:
                each = waiting.popleft()
                buffers.append(_zeros_for(each))
                ahead.append(pool.submit(_read_chunk, each, buffers[-1], read))

        read_next()
        for each in transfers:
            if each.reads:
                failure = ahead.popleft().result() or failure
                dense = buffers.popleft()
                read_next()
            else:
                dense = _zeros_for(each)
            if send == "broadcast":
                each.group.broadcast(dense, each.reader)
            else:
                each.group.all_reduce(dense.view(torch.int32))  # a sum of floats would lose the sign of zeros
            with each.chunk.states(change=True) as parts:
                each.chunk.fill_part(parts[each.kind], dense)
    return failure


def _read_buffers(state: ModelState, read: Read, send: Send) -> UserError | None:
    """Reads the modules' buffers on the stage's first rank and sends the buffers to the stage's other ranks; with
    `send` "none", reads the buffers on each rank."""
    failure = None
    if send == "none" or not state.buffers or state.team.rank == 0:
        try:
            read(full_slices(state.buffers.items()))
        except UserError as error:
            failure = error
    for buffer in state.buffers.values() if send != "none" else ():
        state.team.broadcast(buffer)
    return failure


def _zeros_for(transfer: _Transfer) -> Tensor:
    dtype = transfer.chunk.plan.model_dtype if transfer.kind == "model" else torch.float32
    return torch.zeros(transfer.chunk.plan.size, dtype=dtype, device=transfer.chunk.parameter.device)


def _read_chunk(transfer: _Transfer, dense: Tensor, read: Read) -> UserError | None:
    try:
        transfer.fill(dense, read)
    except UserError as error:
        return error
    return None
