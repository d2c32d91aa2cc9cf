"""What may happen to what a chunk keeps, in which order and in which threads: one table. Other orders raise.

A status is changed by the thread that trains, or autograd's, which are never at work at once. What others do meanwhile, a
thread, a stream or a collective, is under way until it has arrived: to let it arrive is to wait for it.
"""

import threading
from collections.abc import Callable, Mapping

from torch import Tensor

from optimus.comm import Handle

# Of each thing: by status, what may happen, and the status that follows. The first status is what it begins with.
TRANSITIONS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    # Whole parameters. Absent: without memory, or memory whose content is out of date.
    "parameters": {
        "here": {"use": "here", "free": "absent"},
        "absent": {"fetch": "fetching", "gather": "coming", "approach": "near", "free": "absent"},
        "near": {"gather": "coming", "arrive": "absent"},  # a larger part than this rank's is on its way, not all
        "fetching": {"gather": "coming", "arrive": "here"},  # this rank's part is on its way from the host
        "coming": {"arrive": "here"},  # their parts are on their way from other ranks
    },
    # Whole gradients, of a microbatch or a step; and what is kept of them, where it is apart. They are opened at zero.
    "gradients": {
        "here": {"open": "here", "add": "here", "reduce": "leaving", "free": "absent"},
        "absent": {"open": "here", "free": "absent"},
        "leaving": {"free": "absent"},  # the other ranks are given their parts
    },
    # The sum of the gradients of a step; of a microbatch, where each sends its own to the host.
    "sum": {
        "more": {"add": "more", "last": "last", "send": "summing", "clear": "more"},
        "last": {"add": "last", "last": "last", "send": "summing", "reduce": "summing", "clear": "more"},
        "summing": {"last": "summing", "arrive": "summed"},  # over all ranks, without further gradients
        "summed": {"last": "summed", "measure": "summed", "leave": "leaving", "update": "used", "clear": "more"},
        "leaving": {"last": "leaving", "measure": "leaving", "arrive": "left"},  # for the host
        "left": {"last": "left", "again": "more", "measure": "left", "update": "used", "clear": "more"},
        "used": {"clear": "more", "clear behind": "clearing"},
        "clearing": {"last": "last behind", "clear behind": "clearing", "clear": "more"},  # when the update has read it
        "last behind": {"last": "last behind", "clear behind": "clearing", "clear": "last"},
    },
    # What the host has of the gradients of a step.
    "host gradients": {
        "none": {"copy": "coming", "clear": "none"},
        "coming": {"arrive": "here"},
        "here": {"add": "coming", "read": "here", "clear": "none"},
    },
    # This rank's part: its weights, what is kept beside them, and what is computed with.
    "part": {
        "rest": {
            **dict.fromkeys(("read", "write", "compute", "gather"), "rest"),
            "update": "updating",
            "lend": "lent",
        },
        # Gradients wait in the place of what is computed with.
        "lent": {"read": "lent", "write": "lent", "compute": "rest", "update": "updating"},
        "updating": {"gather": "updating", "arrive": "rest"},  # gathered behind it
    },
    # A copy that is made beside the training: of the state, or of what is computed with, too.
    "copy": {
        "none": {"hold": "state", "hold weights": "weights", "lend": "none", "write": "none"},
        "state": {"lend": "state", "arrive": "none"},
        "weights": {"arrive": "none"},
    },
}
_WITHOUT_MEMORY = "absent", "near"

# By thing and status, which threads may touch what it has, by the beginnings of their names; all else those that train
# alone. A copy is waited for by whoever writes next, which may be the thread that updates.
THREADS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("part", "updating"): ("optimus update", "optimus disk"),
    ("host gradients", "coming"): ("optimus update",),
    ("copy", "none"): ("optimus update",),
    ("copy", "state"): ("optimus update", "optimus checkpoint", "optimus disk"),
    ("copy", "weights"): ("optimus update", "optimus checkpoint", "optimus disk"),
}
_OTHERS = "optimus update", "optimus disk", "optimus checkpoint"


class Status:
    """The status of one thing of the table, and what waits for what is under way, `until` it has arrived."""

    def __init__(self, thing: str) -> None:
        self.thing, self._table = thing, TRANSITIONS[thing]
        self.status = next(iter(self._table))
        self.until: Handle | None = None

    def go(self, event: str, until: Handle | None = None) -> None:
        """Take the way of the table; `arrive` waits. Raises `RuntimeError` where there is none, and in a thread that is not
        named for it."""
        following, name = self._table[self.status].get(event), threading.current_thread().name
        if following is None:
            raise RuntimeError(f"{event}: {self.thing} is {self.status}: a mistake in the order of the calls")
        if name.startswith(_OTHERS) and not name.startswith(THREADS.get((self.thing, self.status), ("-",))):
            raise RuntimeError(f"{event}: {self.thing} that is {self.status} is nothing for the thread {name}")
        if event == "arrive" and self.until is not None:
            self.until.wait()
            self.until = None
        self.status = following
        if until is not None:
            self.until = until

    def finish(self) -> None:
        """Wait for what is under way, if there is anything."""
        if self.until is not None:
            self.go("arrive")


class ManagedBuffer(Status):
    """A buffer as it is: the memory of a `tensor` of the whole chunk, and where its content is.

    Unless it `stays`, its memory is freed while it is absent (by `resize`); views of it are valid again when it has memory.
    It is given at least `block` bytes: blocks of one size fit into one another's places.
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
        """Whether there is any for its content."""
        return self.status not in _WITHOUT_MEMORY

    def go(self, event: str, until: Handle | None = None) -> None:
        before = self.has_memory
        super().go(event, until)
        if not self._stays and before != self.has_memory:
            self._resize(self._tensor, self._bytes if self.has_memory else 0)
        if event == "open" and not before:
            self._tensor.zero_()


class OwnPart(Status):
    """This rank's part of a chunk: it is updated, and copied beside the training."""

    def __init__(self) -> None:
        super().__init__("part")
        self.copy = Status("copy")
        self.behind: Callable[[], None] | None = None  # what is done when the update has been waited for

    def go(self, event: str, until: Handle | None = None) -> None:
        super().go(event, until)
        if event in ("write", "lend"):  # which a copy of it must allow
            self.copy.go(event)

    def finish_update(self) -> None:
        """Wait for an update that is under way."""
        if self.status == "updating":
            self.go("arrive")
            if self.behind is not None:
                self.behind()
                self.behind = None
