"""Defines in tables the permitted operations on a chunk's data, by status and thread.

The training thread and autograd's threads may change any status, but not at the same time.
"""

import threading
from collections.abc import Callable, Mapping

from torch import Tensor

from optimus.comm import Handle

# For each kind of data and each status: the permitted events, and the status after each event. The first status is the
# initial status.
TRANSITIONS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    # Unsharded parameters. "absent": without memory, or with out-of-date content.
    "parameters": {
        "here": {"use": "here", "free": "absent"},
        "absent": {"fetch": "fetching", "gather": "coming", "approach": "near", "free": "absent"},
        # This rank's parameter shard, stored between uses, is in transfer from other ranks.
        "near": {"gather": "coming", "arrive": "absent"},
        "fetching": {"gather": "coming", "arrive": "here"},  # this rank's shard is in transfer from the host
        "coming": {"arrive": "here"},  # shards are in transfer from other ranks
    },
    # Unsharded gradients of a microbatch or a step; also the accumulated shard, if the shard is a separate buffer.
    "gradients": {
        "here": {"open": "here", "add": "here", "reduce": "leaving", "free": "absent"},
        "absent": {"open": "here", "free": "absent"},
        "leaving": {"free": "absent"},  # the reduction reads the buffer
    },
    # The reduced gradients of a step, or of a microbatch if every microbatch sends gradients to the host.
    "sum": {
        "more": {"add": "more", "last": "last", "send": "summing", "clear": "more"},
        "last": {"add": "last", "last": "last", "send": "summing", "reduce": "summing", "clear": "more"},
        # Reduce-scatters and all-reduces are in progress; no gradient may be added.
        "summing": {"last": "summing", "arrive": "summed", "update on arrival": "using"},
        "using": {"arrive": "used"},  # an update waits for each piece of the gradients, and reads the piece
        "summed": {"last": "summed", "measure": "summed", "leave": "leaving", "update": "used", "clear": "more"},
        "leaving": {"last": "leaving", "measure": "leaving", "arrive": "left"},  # in transfer to the host
        "left": {"last": "left", "again": "more", "measure": "left", "update": "used", "clear": "more"},
        "used": {"measure": "used", "clear": "more", "clear behind": "clearing"},
        # In the next two statuses, the update still reads the gradients.
        "clearing": {"last": "last behind", "clear behind": "clearing", "clear": "more"},
        "last behind": {"last": "last behind", "clear behind": "clearing", "clear": "last"},
    },
    "host gradients": {
        "none": {"copy": "coming", "clear": "none"},
        "coming": {"arrive": "here"},
        "here": {"add": "coming", "read": "here", "clear": "none"},
    },
    # This rank's shard: master weights, optimizer state and compute weights.
    "part": {
        "rest": {
            **dict.fromkeys(("read", "write", "compute", "gather"), "rest"),
            "update": "updating",
            "lend": "lent",
        },
        # Gradients wait in the memory of the compute weights.
        "lent": {"read": "lent", "write": "lent", "compute": "rest", "update": "updating"},
        "updating": {"gather": "updating", "arrive": "rest"},  # the all-gather waits for the update
    },
    # An operation that overlaps with training and reads the state, or the state and the compute weights.
    "copy": {
        "none": {"hold": "state", "hold weights": "weights", "lend": "none", "write": "none"},
        "state": {"lend": "state", "arrive": "none"},
        "weights": {"arrive": "none"},
    },
}
_WITHOUT_MEMORY = "absent", "near"

# Background threads that may change a status, by name prefix. The keys are (data, status).
THREADS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("part", "updating"): ("optimus update", "optimus disk"),
    ("host gradients", "coming"): ("optimus update",),
    ("copy", "none"): ("optimus update",),
    ("copy", "state"): ("optimus update", "optimus checkpoint", "optimus disk"),
    ("copy", "weights"): ("optimus update", "optimus checkpoint", "optimus disk"),
}
_OTHERS = "optimus update", "optimus disk", "optimus checkpoint"


class Status:
    """The status of the data `thing`, a key of `TRANSITIONS`, and the handle `until` of a running operation."""

    def __init__(self, thing: str) -> None:
        self.thing, self._table = thing, TRANSITIONS[thing]
        self.status = next(iter(self._table))
        self.until: Handle | None = None

    def transition(self, event: str, until: Handle | None = None) -> None:
        """Changes the status as `TRANSITIONS` defines for `event`; the event `arrive` first waits for the running
        operation.

        `until` is the handle of an operation that the event begins. Raises `RuntimeError` where the table has no
        transition for the event, and in a thread that may not change this status.
        """
        following, name = self._table[self.status].get(event), threading.current_thread().name
        if following is None:
            raise RuntimeError(
                f"{event}: the status of {self.thing} is {self.status}: the calls are in the wrong order"
            )
        if name.startswith(_OTHERS) and not name.startswith(THREADS.get((self.thing, self.status), ("-",))):
            raise RuntimeError(
                f"{event}: the status of {self.thing} is {self.status}: the thread {name} may not change it"
            )
        if event == "arrive" and self.until is not None:
            self.until.wait()
            self.until = None
        self.status = following
        if until is not None:
            self.until = until

    def finish(self) -> None:
        """Waits for the running operation, if any, and changes the status as for the event `arrive`."""
        if self.until is not None:
            self.transition("arrive")


class ManagedBuffer(Status):
    """The memory of a flat `tensor`, and the status of the tensor's content.

    With `stays`, the memory is permanent. Otherwise `resize` frees the memory when the status requires none, and
    allocates at least `block` bytes when the status requires memory again. The event `open` zeroes the tensor if the
    status before the event required no memory.
    """

    def __init__(
        self,
        thing: str,
        tensor: Tensor,
        resize: Callable[[Tensor, int], None],
        *,
        stays: bool,
        block: int = 0,
    ) -> None:
        super().__init__(thing)
        self._tensor, self._stays, self._resize = tensor, stays, resize
        self._bytes = max(tensor.numel() * tensor.element_size(), block)

    @property
    def has_memory(self) -> bool:
        """True if the status requires memory."""
        return self.status not in _WITHOUT_MEMORY

    def transition(self, event: str, until: Handle | None = None) -> None:
        before = self.has_memory
        super().transition(event, until)
        if not self._stays and before != self.has_memory:
            self._resize(self._tensor, self._bytes if self.has_memory else 0)
        if event == "open" and not before:
            self._tensor.zero_()


class OwnPart(Status):
    """The status of this rank's shard of a chunk, and in `copy` the status of a running copy of the shard."""

    def __init__(self) -> None:
        super().__init__("part")
        self.copy = Status("copy")
        self.behind: Callable[[], None] | None = None  # called once, after the wait for the update

    def transition(self, event: str, until: Handle | None = None) -> None:
        super().transition(event, until)
        if event in ("write", "lend"):  # raises where the status of the copy forbids the event
            self.copy.transition(event)

    def finish_update(self) -> None:
        """Waits for a running update, and then calls `behind`, if set."""
        if self.status == "updating":
            self.transition("arrive")
            if self.behind is not None:
                self.behind()
                self.behind = None
