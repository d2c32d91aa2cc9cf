"""Recording a device's waits costs the host one query or comparison per wait, however many waits a step has."""

from collections import Counter
from typing import Any

import pytest
import torch

from optimus.comm.device_waits import DeviceWaits, flight_record


class Looked(int):
    """A collective's number that counts its comparisons."""

    looks: Counter[str]

    def __eq__(self, other: object) -> bool:
        self.looks["compared"] += 1
        return int(self) == other

    __hash__ = int.__hash__


class Point:
    """An event of a stream that has passed the first `reached` events; neighbouring events are a second apart."""

    def __init__(self, looks: Counter[str], number: int, reached: list[int]) -> None:
        self._looks, self._number, self._reached = looks, number, reached

    def query(self) -> bool:
        self._looks["queried"] += 1
        return self._number < self._reached[0]

    def elapsed_time(self, end: "Point") -> float:
        return 1000.0 * (end._number - self._number)


@pytest.mark.parametrize("count", [50, 400])
def test_what_has_passed_is_found_in_as_many_looks_as_there_are_waits(count: int) -> None:
    looks: Counter[str] = Counter()
    reached, made = [0], iter(range(2 * count))
    waits = DeviceWaits(lambda: Point(looks, next(made), reached))
    counted: Any = type("Counted", (Looked,), {"looks": looks})
    for number in range(count):
        waits.wait(("0, 1", "all_reduce", counted(number)), [])
    reached[0] = count + 1  # half of the waits have passed; one has begun
    first = waits.passed()
    assert looks["queried"] + looks["compared"] <= count
    assert [int(place[2]) for place, _ in first] == list(range(count // 2))
    assert {seconds for _, seconds in first} == {1.0}
    assert waits.waiting() == ("0, 1", "all_reduce", count // 2)
    reached[0] = 2 * count
    assert [int(place[2]) for place, _ in waits.passed()] == list(range(count // 2, count))
    assert waits.passed() == []


@pytest.mark.parametrize("name", ["_dump_nccl_trace_json", "_dump_fr_trace_json", None])
def test_the_flight_record_of_any_torch(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions of torch have the function under one of two names, and some builds have none."""
    there = torch._C._distributed_c10d
    for each in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        monkeypatch.delattr(there, each, raising=False)
    if name is not None:
        monkeypatch.setattr(there, name, lambda *given: b"record", raising=False)
    assert flight_record() == (b"{}" if name is None else b"record")
