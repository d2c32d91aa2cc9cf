"""The ranks that hold the same parameters. One process is a group of one, and needs no process group."""

import torch
import torch.distributed as dist
from torch import Tensor


class Group:
    """All ranks of the job, or this process alone where `torch.distributed` is not initialised."""

    def __init__(self) -> None:
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def average(self, tensor: Tensor) -> None:
        """Replace `tensor` on every rank by its mean over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
            tensor.div_(self.size)

    def broadcast(self, tensor: Tensor) -> None:
        """Replace `tensor` on every rank by rank 0's, in place."""
        if self.size > 1:
            dist.broadcast(tensor, src=0)

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank, so that all ranks take the same turn."""
        if self.size == 1:
            return flag
        one = torch.tensor([int(flag)])
        dist.all_reduce(one, op=dist.ReduceOp.MAX)
        return bool(one.item())

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier()
