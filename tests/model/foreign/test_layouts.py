"""Adapted families of `transformers` have on every layout the losses of a plain PyTorch loop of the same modules."""

from pathlib import Path

import pytest

from helpers.adapted import LAYOUTS, SETTINGS, config_of, expected, on_layout, plain, refused, trained
from helpers.sweep import in_turns
from optimus.errors import UserError
from optimus.testing.ranks import run_ranks

# Losses are means of some hundred fp32 numbers, and the steps before differ by rounding. Adam divides by square roots of
# second moments, so that gradients of few significant bits change weights by up to a learning rate.
LOSS, NORM = 2e-6, 1e-4

CASES = [(family, layout) for family in SETTINGS for layout in LAYOUTS]
"""Pairs ordered so that the first ones cover all families and all layouts."""
CASES.sort(key=lambda pair: (list(SETTINGS).index(pair[0]) - list(LAYOUTS).index(pair[1])) % len(LAYOUTS))
WITH_DOCUMENTS = ("llama", "phi3", "stablelm", "olmo2", "gemma3_text", "gpt_neox", "glm4")


def close(found: list[tuple[float, float]], right: list[tuple[float, float]]) -> None:
    for (loss, norm), (right_loss, right_norm) in zip(found, right, strict=True):
        assert loss == pytest.approx(right_loss, rel=LOSS)
        assert norm == pytest.approx(right_norm, rel=NORM)


@pytest.mark.parametrize(("family", "layout"), in_turns(CASES, 30, always=6))
def test_losses_are_those_of_a_plain_loop(
    family: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the file of `disk` is in the run's folder
    if (reason := refused(family, layout)) is not None:
        with pytest.raises(UserError, match=reason):
            config_of(family, **LAYOUTS[layout].sections)
        return
    close(on_layout(family, layout), expected(family, layout))


@pytest.mark.parametrize("layout", in_turns(["context", "1f1b", "tensor", "zero3", "recompute"], 10, always=1))
@pytest.mark.parametrize("family", in_turns(WITH_DOCUMENTS, 10, always=1))
def test_documents_are_apart(family: str, layout: str) -> None:
    ranks, sections, _ = LAYOUTS[layout]
    close(run_ranks(trained, ranks, family, sections, True)[0], plain(family, True))
