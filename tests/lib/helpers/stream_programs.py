"""Programs of ranks on streams: recorded from the real code in one process, checked for races, run in random orders.

Communicators behave as NCCL's: each has a queue on each rank; a group call begins when the stream that calls has come
so far, and ends when all peers have begun their calls; messages pair by their order between two ranks, without tags.

A recorded step does nothing until it runs in `Programs.run`.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from optimus.comm import scratch
from optimus.comm.carriers import SideStreams

Call = Callable[[], object]


class Message(NamedTuple):
    """A message of a group call."""

    sends: bool
    tensor: Tensor
    peer: int
    number: int  # of the messages from the sender to the receiver in the communicator


class Step(NamedTuple):
    """A step of a queue: work on tensors (`reads` and `writes`), or the start or end of a group call."""

    rank: int
    queue: str
    what: str
    call: Call | None = None
    reads: tuple[Tensor, ...] = ()
    writes: tuple[Tensor, ...] = ()
    messages: tuple[Message, ...] = ()
    after: tuple[int, ...] = ()  # steps of other queues of the rank that come before


class DeadlockError(AssertionError):
    """Steps wait for each other."""


class RaceError(AssertionError):
    """Two steps use the same memory in an order that nothing determines."""


class Stream:
    """A stream of a recorded rank, in the place of a `torch.Stream`; events are the numbers of steps."""

    def __init__(self, recorder: "Recorder", name: str) -> None:
        self._recorder, self.name = recorder, name
        self.stream_id = name

    def __enter__(self) -> "Stream":
        self._recorder.entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._recorder.entered.pop()

    def record_event(self) -> int:
        return self._recorder.add(Step(self._recorder.rank, self.name, "event"))

    def wait_event(self, event: int) -> None:
        self._recorder.add(Step(self._recorder.rank, self.name, "wait", after=(event,)))

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())


class RecordedStreams(SideStreams):
    """Side streams of a recorded rank."""

    def __init__(self, recorder: "Recorder", name: str) -> None:
        super().__init__()
        self._recorder, self._name = recorder, name

    def after_current(self, device: torch.device) -> Any:
        stream = Stream(self._recorder, f"stream {self._name}")
        stream.wait_stream(self._recorder.current)
        return stream


class _Work:
    def __init__(self, recorder: "Recorder", end: int) -> None:
        self._recorder, self._end = recorder, end

    def wait(self) -> None:
        """Makes the current stream wait, as a work of NCCL does."""
        self._recorder.current.wait_event(self._end)


class Recorder(TorchDispatchMode):
    """Records the work of one rank inside `recording`."""

    def __init__(self, rank: int, steps: list[Step]) -> None:
        super().__init__()
        self.rank, self.steps = rank, steps
        self.entered = [Stream(self, "compute")]
        self.counted: Counter[str] = Counter()
        self.paused = False
        self._numbers: Counter[tuple[str, bool, int]] = Counter()

    @property
    def current(self) -> Stream:
        return self.entered[-1]

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Runs the work inside the context at once."""
        self.paused = True
        yield
        self.paused = False

    def add(self, step: Step) -> int:
        self.steps.append(step)
        return len(self.steps) - 1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = function._schema
        views = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
        if self.paused or views or function.namespace != "aten" or "empty" in str(function):
            return function(*args, **kwargs)
        reads, writes = [], []
        for number, argument in enumerate(schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            if isinstance(value, Tensor):
                written = argument.alias_info is not None and argument.alias_info.is_write
                (writes if written else reads).append(value)
                if written and "copy_" not in str(function) and argument.name == "self":
                    reads.append(value)
        if writes:
            found, call = writes[0], lambda: function(*args, **kwargs)
        else:
            found = function(*args, **kwargs)  # for the new tensor; its numbers come when the step runs
            if not isinstance(found, Tensor):  # such as a dtype
                return found
            writes, call = [found], lambda: found.copy_(function(*args, **kwargs))
        self.add(Step(self.rank, self.current.name, str(function), call, tuple(reads), tuple(writes)))
        return found

    # ---- In the place of torch.distributed ----

    def group_call(self, calls: Sequence[Any]) -> list[_Work]:
        """Records a group call on the queue of its communicator."""
        group, queue = calls[0].group, f"communicator {calls[0].group}"
        called, messages = self.current.record_event(), []
        for sends, tensor, peer, _ in calls:
            self.counted["messages" if sends else "received"] += 1
            self.counted["bytes"] += sends * tensor.nbytes
            assert tensor.numel(), "an empty message"
            messages.append(Message(sends, tensor, peer, self._numbers[group, sends, peer]))
            self._numbers[group, sends, peer] += 1
        self.counted["calls"] += 1
        self.add(Step(self.rank, queue, "wait", after=(called,)))
        self.add(Step(self.rank, queue, "start", messages=tuple(messages)))
        return [_Work(self, self.add(Step(self.rank, queue, "end", messages=tuple(messages))))]


class _Call(NamedTuple):
    sends: bool
    tensor: Tensor
    peer: int
    group: str


@contextmanager
def recording(
    recorder: Recorder, ranks_of: Callable[[str], Sequence[int]], *, by_stream: bool = True
) -> Iterator[None]:
    """Records the work of a rank inside the context. `ranks_of` returns the ranks of a communicator. With `by_stream`
    False, scratch buffers are lent to any stream, which is a race."""

    def connect(tensor: Tensor, group: str) -> None:
        others = [rank for rank in ranks_of(group) if rank != recorder.rank]
        received = [torch.zeros(1) for _ in others]
        recorder.group_call(
            [
                *(_Call(False, each, other, group) for each, other in zip(received, others)),
                *(_Call(True, tensor, other, group) for other in others),
            ]
        )[0].wait()
        recorder.counted.clear()

    def current(*_: object) -> Stream:
        return recorder.current

    def owner(_: torch.device) -> str | None:
        return recorder.current.name if by_stream else None

    with (
        mock.patch.object(dist, "P2POp", lambda op, tensor, peer, group: _Call(op is dist.isend, tensor, peer, group)),
        mock.patch.object(dist, "batch_isend_irecv", recorder.group_call),
        mock.patch.object(dist, "all_reduce", connect),
        mock.patch.object(torch.accelerator, "current_stream", current),
        mock.patch.object(torch.accelerator, "is_available", return_value=False),  # tensors are the host's
        mock.patch.object(scratch, "_current_stream", owner),
        recorder,
    ):
        yield


class Programs:
    """The steps of all ranks, with the steps that each step waits for."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        last: dict[tuple[int, str], int] = {}
        before: list[set[int]] = []
        starts: dict[tuple[str, int, int, int], dict[bool, int]] = defaultdict(dict)
        for number, step in enumerate(steps):
            place = (step.rank, step.queue)
            before.append({*step.after, *([last[place]] if place in last else [])})
            last[place] = number
            if step.what == "start":
                for message in step.messages:
                    starts[_pair(step, message)][message.sends] = number
        for number, step in enumerate(steps):
            if step.what == "end":
                for message in step.messages:
                    both = starts[_pair(step, message)]
                    if len(both) < 2:
                        raise DeadlockError(f"rank {step.rank}: no rank takes part in {message}")
                    before[number].update(both.values())
        self._before, self._starts = before, starts
        self._chains = _chains(before)
        chain_of = {number: index for index, chain in enumerate(self._chains) for number in chain}
        needed = [{chain_of[each] for each in before[chain[0]]} for chain in self._chains]
        self._missing = [len(chains) for chains in needed]
        self._after: list[list[int]] = [[] for _ in self._chains]
        for index, chains in enumerate(needed):
            for each in chains:
                self._after[each].append(index)

    def progress(self, draw: random.Random) -> list[int]:
        """Returns a random order of the chains of steps; raises `DeadlockError` if not all chains run."""
        missing, done = [*self._missing], []
        ready = [number for number, count in enumerate(missing) if not count]
        while ready:
            place = int(draw.random() * len(ready))
            ready[place], ready[-1] = ready[-1], ready[place]
            done.append(number := ready.pop())
            for following in self._after[number]:
                missing[following] -= 1
                if not missing[following]:
                    ready.append(following)
        if len(done) < len(missing):
            stuck = [self.steps[chain[0]] for chain, count in zip(self._chains, missing) if count]
            queues = sorted({f"rank {step.rank}, {step.queue}" for step in stuck})
            raise DeadlockError(f"{len(stuck)} chains of steps never run, of {'; '.join(queues)}")
        return done

    def order(self, draw: random.Random) -> list[int]:
        """Returns a random order of the steps; see `progress`."""
        return [number for index in self.progress(draw) for number in self._chains[index]]

    def run(self, order: Sequence[int]) -> None:
        """Runs all steps in this order. A message is copied when the later of both ranks begins its call."""
        arrived: dict[tuple[str, int, int, int], Message] = {}
        for number in order:
            step = self.steps[number]
            if step.call is not None:
                step.call()
            for message in step.messages if step.what == "start" else ():
                other = arrived.setdefault(pair := _pair(step, message), message)
                if other is not message:
                    sent, received = (message, other) if message.sends else (other, message)
                    assert sent.tensor.numel() == received.tensor.numel(), pair
                    received.tensor.copy_(sent.tensor)

    def check_races(self) -> None:
        """Raises `RaceError` for two steps of a rank that use the same memory, one of them to write, unless one comes
        before the other in every order."""
        places = sorted({(step.rank, step.queue) for step in self.steps})
        column = {place: index for index, place in enumerate(places)}
        clocks: dict[int, list[int]] = {}
        used: dict[int, list[tuple[int, int, bool, int, int, int]]] = defaultdict(list)
        ticks: Counter[int] = Counter()
        for number in self.order(random.Random(0)):
            step = self.steps[number]
            here = column[step.rank, step.queue]
            ticks[here] += 1
            clock = [
                max(values) for values in zip([0] * len(places), *(clocks[each] for each in self._ordering(number)))
            ]
            clock[here] = ticks[here]
            clocks[number] = clock
            for start, end, writes in _accesses(step):
                for low, high, wrote, place, tick, other in used[step.rank]:
                    if low < end and start < high and (writes or wrote) and clock[place] < tick:
                        raise RaceError(f"{_named(step)} and {_named(self.steps[other])} use the same memory")
                used[step.rank].append((start, end, writes, here, ticks[here], number))

    def _ordering(self, number: int) -> Iterator[int]:
        """Yields the steps before a step that order memory: a message orders the receiver after the sender only."""
        step = self.steps[number]
        if step.what != "end":
            yield from self._before[number]
            return
        yield from (each for each in self._before[number] if self.steps[each].rank == step.rank)
        for message in step.messages:
            if not message.sends:
                yield self._starts[_pair(step, message)][True]


def _chains(before: Sequence[set[int]]) -> list[list[int]]:
    """Returns the steps in chains: a step that waits for one step only, which no other step waits for, follows it."""
    followers = Counter(each for needed in before for each in needed)
    chains: dict[int, list[int]] = {}  # by last step
    for number, needed in enumerate(before):
        one = min(needed) if len(needed) == 1 else -1
        chain = chains.pop(one) if followers[one] == 1 and one in chains else []
        chains[number] = [*chain, number]
    return list(chains.values())


def _pair(step: Step, message: Message) -> tuple[str, int, int, int]:
    ends = (step.rank, message.peer) if message.sends else (message.peer, step.rank)
    return (step.queue, *ends, message.number)


def _accesses(step: Step) -> Iterator[tuple[int, int, bool]]:
    """Yields (first address, address after the last, whether it writes); a call uses memory from its start to its
    end, so both steps do."""
    for message in step.messages:
        yield *_range(message.tensor), not message.sends
    yield from ((*_range(each), False) for each in step.reads)
    yield from ((*_range(each), True) for each in step.writes)


def _range(tensor: Tensor) -> tuple[int, int]:
    length = (
        1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) if tensor.numel() else 0
    )
    return tensor.data_ptr(), tensor.data_ptr() + length * tensor.element_size()


def _named(step: Step) -> str:
    return f"{step.what} of rank {step.rank} on {step.queue}"
