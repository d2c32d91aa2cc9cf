"""Counts this process's calls to `torch.distributed`, and the payload bytes of these calls.

Calls of the form `dist.all_reduce(...)` count inside the context of `counting`. Calls through names imported earlier do
not count (`from torch.distributed import all_reduce`). DDP's reducer and functional collectives do not count.
"""

import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

# Maps a function to (its name in the counts, its parameters with the payload).
_COUNTED: dict[str, tuple[str, tuple[str, ...]]] = {
    "all_reduce": ("all_reduce", ("tensor",)),
    "reduce": ("reduce", ("tensor",)),
    "broadcast": ("broadcast", ("tensor",)),
    "all_gather": ("all_gather", ("tensor_list",)),
    "all_gather_into_tensor": ("all_gather_into_tensor", ("output_tensor",)),
    "all_gather_single": ("all_gather_into_tensor", ("output_tensor",)),  # the new name since torch 2.13
    "reduce_scatter": ("reduce_scatter", ("input_list",)),
    "reduce_scatter_tensor": ("reduce_scatter_tensor", ("input",)),
    "reduce_scatter_single": ("reduce_scatter_tensor", ("input",)),  # the new name since torch 2.13
    "all_to_all": ("all_to_all", ("input_tensor_list", "output_tensor_list")),
    "all_to_all_single": ("all_to_all_single", ("input", "output")),
    "gather": ("gather", ("tensor",)),
    "scatter": ("scatter", ("tensor",)),
    "send": ("send", ("tensor",)),
    "isend": ("send", ("tensor",)),
    "recv": ("recv", ("tensor",)),
    "irecv": ("recv", ("tensor",)),
    "barrier": ("barrier", ()),
}


@dataclass
class Traffic:
    """Calls and payload bytes of this process, by collective or point-to-point operation.

    The payload is the output of all_gather, the input of reduce_scatter, and input plus output of all_to_all. For other
    calls, the payload is this rank's tensor; a barrier has no payload.
    """

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    # The bytes of point-to-point sends, by the receiver's global rank.
    sent_to: Counter[int] = field(default_factory=Counter)


@contextmanager
def counting() -> Iterator[Traffic]:
    """Counts the calls of the functions in `_COUNTED` inside the context."""
    traffic = Traffic()
    counter = _Counter(traffic)
    originals = {name: getattr(dist, name) for name in _COUNTED if hasattr(dist, name)}
    wrapped = {name: counter.wrap(original, *_COUNTED[name]) for name, original in originals.items()}
    try:
        _bind(wrapped)
        yield traffic
    finally:
        _bind(originals)


def _bind(named: dict[str, Callable[..., Any]]) -> None:
    for name, function in named.items():
        setattr(dist, name, function)
        setattr(distributed_c10d, name, function)  # P2POp accepts only the functions of `distributed_c10d`


class _Counter:
    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.lock = threading.Lock()
        self.thread_state = threading.local()  # .inside: True while this thread is within a counted call

    def wrap(self, function: Callable[..., Any], key: str, payload: tuple[str, ...]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if getattr(self.thread_state, "inside", False):
                return function(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            with self.lock:
                self.traffic.calls[key] += 1
                self.traffic.bytes[key] += sum(_bytes(given[name]) for name in payload)
                if key == "send":
                    self.traffic.sent_to[_receiver(given)] += _bytes(given["tensor"])
            self.thread_state.inside = True
            try:
                return function(*args, **kwargs)
            finally:
                self.thread_state.inside = False

        return counted


def _receiver(arguments: dict[str, Any]) -> int:
    if (rank := arguments.get("dst")) is not None:
        return int(rank)
    group = arguments.get("group") or dist.group.WORLD
    assert group is not None
    return dist.get_global_rank(group, arguments["group_dst"])


def _bytes(payload: Tensor | list[Tensor]) -> int:
    tensors = [payload] if isinstance(payload, Tensor) else payload
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
