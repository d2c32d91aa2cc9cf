"""Signal handlers are those of before once a command or a run has ended."""

import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from optimus.observe.signals import ENDING, ended_by_signals
from optimus.training.hooks.interrupt import Interrupt


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_handlers_of_python_are_restored() -> None:
    def handler(*_: Any) -> None: ...

    signal.signal(signal.SIGTERM, handler)
    with ended_by_signals("ending"):
        assert signal.getsignal(signal.SIGTERM) is not handler
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_handler_that_is_not_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python calls the handler of a program that embeds Python None, and cannot restore it."""
    change = signal.signal

    def set_over_foreign(number: int, handler: Any) -> None:
        change(number, handler)

    with monkeypatch.context() as patched:
        patched.setattr(signal, "getsignal", lambda number: None)
        with ended_by_signals("ending"):
            pass
    assert [signal.getsignal(number) for number in ENDING] == [signal.SIG_DFL] * 3
    with monkeypatch.context() as patched:
        patched.setattr(signal, "signal", set_over_foreign)
        hook, trainer = Interrupt(), SimpleNamespace(groups=SimpleNamespace(rank=0))
        hook.before_training(trainer)  # type: ignore[arg-type]
        assert signal.getsignal(signal.SIGTERM) == hook._note
        hook.after_training(trainer)  # type: ignore[arg-type]
    assert [signal.getsignal(number) for number in ENDING] == [signal.SIG_DFL] * 3
