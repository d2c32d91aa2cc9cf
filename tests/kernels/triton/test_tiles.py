"""The search for the fastest tiles, which runs the kernels."""

import math

import pytest
import torch

from optimus.config import ModelConfig

pytest.importorskip("triton")

from benchmarks import tiles
from optimus.kernels.triton import tuning

MODEL = ModelConfig(
    family="olmoe", hidden=32, layers=1, heads=2, intermediate=16, vocab=32, experts=2, experts_per_token=1
)


def test_every_kernel_has_a_row_and_the_table_stays_as_it_was(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "_ROUNDS", 1)
    before = tuning.tiles("down", torch.empty(0, dtype=torch.bfloat16), 64, 512, 512)
    rows = tiles.search(tiles.Layer(MODEL, 8, torch.float32, device), 0.0, compilers=0)
    products = ["up", "down", "down_backward", "up_backward", "all four"]
    assert [row["kernel"] for row in rows] == [*products, *products, "weight_gradient"]
    assert [row["rows"] for row in rows[:-1]] == [128] * 5 + [64] * 5
    for row in rows:
        if row["kernel"] != "all four":  # time suffices for the present choice only
            assert row["tried"] == 1
            assert row["tflops"] == row["present_tflops"]
    assert math.isclose(rows[4]["ms"], sum(row["ms"] for row in rows[:4]))
    assert tuning.tiles("down", torch.empty(0, dtype=torch.bfloat16), 64, 512, 512) == before


def test_what_is_not_compiled_in_time_is_left_out(device: torch.device) -> None:
    """Tiles not compiled in time are left out, except the present choice, which comes first and is compiled when timed."""
    layer = tiles.Layer(MODEL, 8, torch.float32, device)
    candidates = tiles._candidates(layer)
    few = {key: of_kernel[:2] for key, of_kernel in candidates.items()}
    compiled = tiles._compiled(few, layer, 0.0, compilers=1)
    assert [of_kernel[0] for of_kernel in compiled.values()] == [of_kernel[0] for of_kernel in few.values()]
    assert sum(map(len, compiled.values())) < sum(map(len, few.values()))
    assert all(set(compiled[key]) <= set(few[key]) for key in few)
