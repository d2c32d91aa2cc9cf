"""Scores in batches equal those computed one token at a time."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optimus.evaluation.score import Window, evaluating, score, split_long
from optimus.model import Transformer


def plain_score(model: Transformer, window: Window) -> tuple[float, bool]:
    """Returns the score by its definition: one unpadded forward pass per token."""
    total, greedy = 0.0, True
    for place, token in enumerate(window.continuation):
        with torch.no_grad():
            logits = model(torch.tensor([[*window.context, *window.continuation[:place]]]))[0, -1].double()
        total += torch.log_softmax(logits, -1)[token].item()
        greedy = greedy and int(logits.argmax()) == token
    return total, greedy


def some_windows(model: Transformer) -> list[Window]:
    draw = random.Random(0)
    windows = [
        Window([draw.randrange(300) for _ in range(draw.randint(1, 9))], [draw.randrange(300) for _ in range(size)])
        for size in (1, 3, 1, 7, 2)
    ]
    context = windows[0].context
    with torch.no_grad():
        best = int(model(torch.tensor([context]))[0, -1].argmax())
    return [*windows, Window(context, [best]), Window(context, [best, 5])]  # the first of these two is greedy


@pytest.mark.parametrize("tokens_per_batch", [1, 20, 8192])
def test_equals_plain_computation(model: Transformer, tokens_per_batch: int) -> None:
    windows = some_windows(model)
    found = score(model, windows, tokens_per_batch)
    expected = [plain_score(model, window) for window in windows]
    assert [s.log_likelihood for s in found] == pytest.approx([total for total, _ in expected], abs=2e-5)
    assert [s.greedy for s in found] == [greedy for _, greedy in expected]
    assert found[-2].greedy


def test_nothing_to_score(model: Transformer) -> None:
    """The probability of an empty continuation is 1, whatever the context."""
    for context in ([5], [5, 6]):
        assert score(model, [Window(context, [])]) == [(0.0, True)]


def test_output_layer_in_blocks(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = some_windows(model)
    whole = [s.log_likelihood for s in score(model, windows)]
    monkeypatch.setattr("optimus.evaluation.score._LOGITS_AT_ONCE", 1)
    assert [s.log_likelihood for s in score(model, windows)] == pytest.approx(whole, abs=1e-5)


def test_same_input_runs_once(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    plain = Transformer.hidden_states
    monkeypatch.setattr(Transformer, "hidden_states", lambda self, t, *a: rows.append(len(t)) or plain(self, t, *a))
    score(model, [Window([1, 2, 3], [answer]) for answer in (4, 5, 6, 7)])
    assert rows == [1]


def test_mode_and_gradients(model: Transformer) -> None:
    model.train()
    with evaluating(model):
        assert not model.training
        assert not torch.is_grad_enabled()
    assert model.training
    assert torch.is_grad_enabled()
    with pytest.raises(ZeroDivisionError), evaluating(model):
        _ = 1 / 0
    assert model.training
    model.eval()
    with evaluating(model):
        pass
    assert not model.training


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(1, 40), st.integers(1, 12))
def test_split_long(context: list[int], length: int, limit: int) -> None:
    continuation = list(range(100, 100 + length))
    windows = split_long(context, continuation, limit)
    assert [token for window in windows for token in window.continuation] == continuation
    text = context + continuation
    end = len(context)
    for window in windows:
        assert len(window.context) >= 1
        assert len(window.context) + len(window.continuation) - 1 <= limit
        assert list(window.context) == text[end - len(window.context) : end]
        end += len(window.continuation)
    if len(context) + length - 1 <= limit:
        assert windows == [Window(context, continuation)]
