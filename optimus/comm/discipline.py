"""Guards that keep users' code from bringing the ranks out of step."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from optimus.comm import CollectiveError
from optimus.comm.observer import cause_of
from optimus.errors import UserError

_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")  # namespaces of torch's collective operators


class RefuseCollectives(TorchDispatchMode):
    """Raises a `UserError` for a collective that this thread begins inside the context. The message ends with `why`."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self._why = why

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _COLLECTIVES:
            raise UserError(f"it calls the collective {func.overloadpacket.__name__.rstrip('_')}, but {self._why}")
        return func(*args, **(kwargs or {}))


class RollCall:
    """A barrier of all ranks through the store.

    No backend takes part, because a backend could pair the barrier with another collective of a rank out of step.
    """

    def __init__(self, name: str, ranks: int, seconds: float) -> None:
        self._name, self._ranks, self._seconds = name, ranks, seconds
        self._calls = 0

    def __call__(self, share: float = 1.0) -> None:
        """Waits until all ranks have called. Raises `CollectiveError` after `share` times `seconds`, and if the store
        fails."""
        if self._ranks == 1:
            return
        try:
            self._meet(timedelta(seconds=share * self._seconds))
        except RuntimeError as error:
            if "timeout" not in str(error).lower():  # not every store has a type of error for timeouts
                raise CollectiveError(f"roll call {self._name}: the store failed: {cause_of(error)}") from error
            raise CollectiveError(f"not all ranks have returned within {share * self._seconds:g} s") from error

    def _meet(self, limit: timedelta) -> None:
        store, self._calls = dist.distributed_c10d._get_default_store(), self._calls + 1
        here, before = (f"roll call {self._name} {number}" for number in (self._calls, self._calls - 1))
        if store.add(here, 1) == self._ranks:
            for key in (before, f"{before} done"):  # no rank waits for the previous call
                store.delete_key(key)
            store.set(f"{here} done", "")
            return
        store.wait([f"{here} done"], limit)
