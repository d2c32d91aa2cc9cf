"""Keeping code that is not ours from leaving the ranks out of step."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from optimus.comm import CollectiveError
from optimus.errors import UserError


class RefuseCollectives(TorchDispatchMode):
    """Inside, this thread may begin no collective, neither ours nor one of torch's own: the others would not answer. Raises
    `UserError`, which says `why`."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self._why = why

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            raise UserError(f"it calls the collective {func.overloadpacket.__name__.rstrip('_')}, but {self._why}")
        return func(*args, **(kwargs or {}))


class RollCall:
    """Ranks wait for each other by the store, where a collective would meet another one of ranks that are out of step."""

    def __init__(self, name: str, ranks: int, seconds: float) -> None:
        self._name, self._ranks, self._seconds = name, ranks, seconds
        self._calls = 0

    def __call__(self, share: float = 1.0) -> None:
        """Return when all ranks have called so often. Raises `CollectiveError` after this share of the seconds."""
        if self._ranks == 1:
            return
        store, self._calls = dist.distributed_c10d._get_default_store(), self._calls + 1
        here, before = (f"roll call {self._name} {number}" for number in (self._calls, self._calls - 1))
        if store.add(here, 1) == self._ranks:
            for key in (before, f"{before} done"):  # nobody waits there any more
                store.delete_key(key)
            store.set(f"{here} done", "")
            return
        try:
            store.wait([f"{here} done"], timedelta(seconds=share * self._seconds))
        except RuntimeError as error:
            raise CollectiveError(f"not all ranks have come back from it within {share * self._seconds:g} s") from error
