"""Chunks make only the transitions of the table, in any order of events that their users may cause."""

import itertools
import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

from helpers.orders import CASES, Order
from helpers.sweep import in_turns
from optimus.comm import Handle
from optimus.state import chunk, placement
from optimus.state.statuses import THREADS, TRANSITIONS, ManagedBuffer, Status
from optimus.state.transfers import transfers

EVENTS = {thing: sorted({event for ways in table.values() for event in ways}) for thing, table in TRANSITIONS.items()}
EVERY = [(thing, status, event) for thing, table in TRANSITIONS.items() for status in table for event in EVENTS[thing]]
ORDERS, BLOCK = 5000, 500  # with one thread, and as many with several


@pytest.mark.parametrize(("thing", "status", "event"), EVERY)
def test_transitions(thing: str, status: str, event: str) -> None:
    held, waited = Status(thing), list[int]()
    held.status, held.until = status, Handle(lambda: waited.append(1))
    following = TRANSITIONS[thing][status].get(event)
    if following is None:
        with pytest.raises(
            RuntimeError, match=rf"{event}: the status of {thing} is {status}: the calls are in the wrong order"
        ):
            held.transition(event)
        assert held.status == status
        return
    held.transition(event)
    assert held.status == following
    assert waited == ([1] if event == "arrive" else [])


def test_all_that_is_named_is_there() -> None:
    for thing, table in TRANSITIONS.items():
        _, *others = table
        assert {*others} <= {following for ways in table.values() for following in ways.values()}
        assert {following for ways in table.values() for following in ways.values()} <= {*table}, thing
    assert all(status in TRANSITIONS[thing] for thing, status in THREADS)


@pytest.mark.parametrize("stays", [True, False])
def test_memory(stays: bool) -> None:
    tensor = torch.ones(4)
    held = ManagedBuffer("gradients", tensor, transfers(torch.device("cpu")).resize, stays=stays)
    held.transition("open")
    assert tensor.tolist() == [1] * 4
    held.transition("free")
    assert tensor.untyped_storage().nbytes() == (16 if stays else 0)
    held.transition("open")
    assert tensor.tolist() == [0] * 4


@pytest.mark.parametrize(
    "block", [pytest.param(block, marks=pytest.mark.in_turn(block % 5, 5)) for block in range(ORDERS // BLOCK)]
)
@pytest.mark.parametrize("threads", [False, True])
def test_orders(threads: bool, block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        try:
            Order(CASES[seed % len(CASES)], seed, threads, chunk, placement).run()
        except Exception as error:
            error.add_note(f"order {seed}, {threads=}, {CASES[seed % len(CASES)]}")
            raise


UNSHARDED, REDUCTION, UPDATE, CHUNK = "unsharded", "reduction", "update", "chunk"
PLANTED = [
    (UNSHARDED, 'self.transition("fetch", turn)', "pass"),
    (UNSHARDED, 'self.transition("gather" if depth == 0 else "approach", turn)', "pass"),
    (UNSHARDED, "self.start_gather()\n        self.wait()", "self.wait()"),
    (UNSHARDED, "self.start_gather()\n        self.wait()", "self.start_gather()"),
    (UNSHARDED, 'self.wait()\n            self.transition("free")', 'self.transition("free")'),
    (UNSHARDED, "            self.part.finish_update()\n", "            pass\n"),
    (UNSHARDED, "        self.finish()\n        if self.is_present", "        if self.is_present"),
    (
        UNSHARDED,
        '            self.transition("free")\n            self._depth = plan',
        "            self._depth = plan",
    ),
    (REDUCTION, "        self.finish()\n        self.finish_offload()", "        self.finish_offload()"),
    (REDUCTION, "        self.finish_offload()\n        self._host.finish()", "        self._host.finish()"),
    (REDUCTION, "        self.finish_offload()\n        self._host.finish()", "        self.finish_offload()"),
    (REDUCTION, "part.behind = self.free", "pass"),
    (REDUCTION, '        self.sum.transition("clear")\n', ""),
    (REDUCTION, "            self.free_gradient()\n", "            pass\n"),
    (
        REDUCTION,
        "            self.finish_offload()\n            self.sum.transition",
        "            self.sum.transition",
    ),
    (REDUCTION, '            self.sum.transition("again")\n', ""),
    (
        REDUCTION,
        '            self.sum.transition("again")\n        self._gradients.transition("open")',
        '            self.sum.transition("again")',
    ),
    (REDUCTION, "                self.offload_gradient(0)\n", "                pass\n"),
    (REDUCTION, "if self._complete(self._added) and", "if"),
    (REDUCTION, "        self.begin_last()\n        self.finish()\n", "        self.begin_last()\n"),
    (REDUCTION, "        self.chunk.part.finish_update()\n", ""),
    (
        REDUCTION,
        '        if self.sum.status in ("summing", "using"):\n            self.sum.transition("arrive")\n',
        "",
    ),
    (REDUCTION, 'self.sum.status in ("summing", "using")', 'self.sum.status == "summing"'),
    (REDUCTION, '"update on arrival" if on_arrival else "update"', '"update"'),
    (REDUCTION, "        self.finish()\n        moves,", "        moves,"),
    (REDUCTION, "                    part.copy.finish()\n", "                    pass\n"),
    (REDUCTION, "            self._host.finish()\n            copied, added", "            copied, added"),
    (
        REDUCTION,
        '            self.sum.transition("arrive")\n            self._accumulated',
        "            self._accumulated",
    ),
    (
        REDUCTION,
        '            self._host.finish()\n            self._host.transition("read")',
        '            self._host.transition("read")',
    ),
    (UPDATE, "        self._unsharded.wait()\n", ""),
    (UPDATE, "        self._gradients.use(on_arrival)\n", ""),
    (UPDATE, "        if on_arrival:\n            self._gradients.finish()\n", ""),
    (UPDATE, "        copy.finish()\n", ""),
    (
        UPDATE,
        '        copy.transition("write")\n',
        '        copy.transition("write")\n        self._unsharded.invalidate()\n',
    ),
    (
        CHUNK,
        "            self.unsharded.wait()\n            self.part.copy.finish()",
        "            self.part.copy.finish()",
    ),
    (
        CHUNK,
        "            self.unsharded.wait()\n            self.part.copy.finish()",
        "            self.unsharded.wait()",
    ),
    (
        CHUNK,
        '            self.part.finish_update()\n            self.part.transition("read")',
        '            self.part.transition("read")',
    ),
    (
        CHUNK,
        '        self.unsharded.wait()\n        self.part.transition("compute")',
        '        self.part.transition("compute")',
    ),
    (
        CHUNK,
        'if self.part.status == "lent":\n            self.gradients.clear()\n            self.refresh_compute_copy()',
        "pass",
    ),
    (CHUNK, "        self.gradients.clear()\n        self.unsharded.wait()", "        self.unsharded.wait()"),
    (
        CHUNK,
        '        self.part.copy.finish()\n        self.part.transition("write")\n',
        '        self.part.transition("write")\n',
    ),
]


@pytest.mark.parametrize(("file", "right", "wrong"), in_turns(PLANTED, 4, always=4))
def test_planted_orders_raise(file: str, right: str, wrong: str) -> None:
    """A removed or added line breaks the table's order for some order of events, and raises."""
    with mock.patch.dict(sys.modules):
        made = [_changed(name, right if name == file else "", wrong) for name in (UNSHARDED, REDUCTION, UPDATE, CHUNK)]
        orders = itertools.product(range(30 * len(CASES)), (False, True))
        said = (_said(seed, threads, made[-1]) for seed, threads in orders)
        assert any("the calls are in the wrong order" in each or "may not change it" in each for each in said)


def _changed(name: str, right: str, wrong: str) -> ModuleType:
    """Returns the changed module of the state, which replaces the original in `sys.modules`."""
    file = Path(import_module(f"optimus.state.{name}").__file__ or "")
    source = re.sub(r"^ *#.*\n|  # .*", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE)  # without comments
    assert right in source
    module = ModuleType(f"optimus.state.{name}")
    sys.modules[module.__name__] = module
    exec(compile(source.replace(right, wrong) if right else source, str(file), "exec"), module.__dict__)
    return module


def _said(seed: int, threads: bool, changed: ModuleType) -> str:
    """Returns the message that an order of events raises, or an empty string."""
    try:
        Order(CASES[seed % len(CASES)], seed, threads, changed, placement).run()
    except RuntimeError as error:
        return str(error)
    except Exception as error:
        return type(error).__name__
    return ""
