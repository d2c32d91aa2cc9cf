"""All contestants of a benchmark train in one precision."""

from typing import Any

import pytest

from benchmarks import data_parallel, tensor_parallel, training
from optimus.config import RunConfig
from optimus.observe.machine import Bfloat16
from optimus.resolve import facts


class Asked(Exception):
    """Raised in place of starting ranks."""


@pytest.mark.parametrize("chosen", ["float32", "bfloat16"])
def test_auto_is_what_a_run_would_choose(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "bfloat16_of", lambda device: Bfloat16(chosen == "bfloat16", "made up"))
    assert training.decided("auto") == chosen


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_is_asked_for_is_taken(precision: str) -> None:
    assert training.decided(precision) == precision


@pytest.mark.parametrize("module", [data_parallel, tensor_parallel])
def test_it_is_decided_once(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The precision is decided once, and the configurations of all contestants have it."""
    decisions, given = [], []

    def decide(precision: str) -> str:
        decisions.append(precision)
        return "bfloat16"

    def ranks(function: Any, number: int, make: Any, config: RunConfig, *more: Any) -> Any:
        given.append(config.train.precision)
        raise Asked

    monkeypatch.setattr(module, "decided", decide)
    monkeypatch.setattr(module, "run_fresh", ranks)
    with pytest.raises(Asked):
        module.run(model="mula-tiny")
    assert decisions == ["auto"]
    assert given == ["bfloat16"]
