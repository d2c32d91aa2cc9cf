"""Collectives and messages of device tensors over Gloo, staged through host memory.

A call that sends a device tensor waits for the current stream. `Handle.wait` enqueues the copy of the result to the
device on the current stream.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from optimus.comm.group import Group
from optimus.comm.handle import Handle


class HostStagedGroup(Group):
    """A group over Gloo that accepts device tensors."""

    def all_reduce_async(self, tensor: Tensor, beside: bool = True) -> Handle:
        if self._stays(tensor):
            return super().all_reduce_async(tensor, beside)
        host = _copy(tensor)
        return _then(super().all_reduce_async(host, beside), tensor, host)

    def reduce_scatter_async(
        self, tensor: Tensor, out: Tensor, lengths: Sequence[int] | None = None, beside: bool = True
    ) -> Handle:
        if self._stays(tensor):
            return super().reduce_scatter_async(tensor, out, lengths, beside)
        host = _pinned_like(out)
        return _then(super().reduce_scatter_async(_copy(tensor), host, lengths, beside), out, host)

    def all_gather_async(
        self, tensor: Tensor, part: Tensor, lengths: Sequence[int] | None = None, beside: bool = True
    ) -> Handle:
        if self._stays(tensor):
            return super().all_gather_async(tensor, part, lengths, beside)
        host = _pinned_like(tensor)
        return _then(super().all_gather_async(host, _copy(part), lengths, beside), tensor, host)

    def all_to_all_async(
        self, rows: Tensor, send: Sequence[int] | None = None, receive: Sequence[int] | None = None
    ) -> tuple[Tensor, Handle]:
        if self._stays(rows):
            return super().all_to_all_async(rows, send, receive)
        host, handle = super().all_to_all_async(_copy(rows), send, receive)
        out = torch.empty_like(host, device=rows.device)
        return out, _then(handle, out, host)

    def shift_async(self, tensor: Tensor, out: Tensor) -> Handle:
        if self._stays(tensor):
            return super().shift_async(tensor, out)
        host = _pinned_like(out)
        return _then(super().shift_async(_copy(tensor), host), out, host)

    def broadcast_async(self, tensor: Tensor, first: int) -> Handle:
        if self._stays(tensor):
            return super().broadcast_async(tensor, first)
        host = _copy(tensor) if self.rank == first else _pinned_like(tensor)
        return _then(super().broadcast_async(host, first), tensor, host)

    def reduce_async(self, tensor: Tensor, target: int) -> Handle:
        if self._stays(tensor):
            return super().reduce_async(tensor, target)
        host = _copy(tensor)
        return _then(super().reduce_async(host, target), tensor, host)

    def send_async(self, tensor: Tensor, to: int, what: str = "send") -> Handle:
        return super().send_async(tensor if self._stays(tensor) else _copy(tensor), to, what)

    def recv_async(self, tensor: Tensor, source: int, what: str = "receive") -> Handle:
        if self._stays(tensor):
            return super().recv_async(tensor, source, what)
        host = _pinned_like(tensor)
        return _then(super().recv_async(host, source, what), tensor, host)

    def _stays(self, tensor: Tensor) -> bool:
        return self.size == 1 or tensor.device.type == "cpu"


def _copy(tensor: Tensor) -> Tensor:
    """Copies `tensor` to pinned host memory."""
    return _pinned_like(tensor).copy_(tensor.detach())


def _pinned_like(tensor: Tensor) -> Tensor:
    """Allocates contiguous pinned host memory with the shape and type of `tensor`."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def _then(handle: Handle, tensor: Tensor, host: Tensor) -> Handle:
    """Returns a handle that waits for `handle`, then copies `host` to `tensor`."""

    @torch.no_grad()
    def finish() -> None:
        handle.wait()
        tensor.copy_(host, non_blocking=True)

    return Handle(finish)
