"""Stages 2 and 3 equal a stable sort."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from optimus.kernels.triton.token_count import token_count
from optimus.kernels.triton.token_index import token_index


def check(indices_TK: Tensor, experts: int, row_tile: int) -> None:
    """Asserts that counts, rows, inverse and tiles are those of a stable sort of the local choices."""
    choices = indices_TK.flatten()
    here = (choices >= 0) & (choices < experts)
    order = torch.where(here, choices, experts).argsort(stable=True)[: int(here.sum())]
    rows_E = torch.bincount(choices[here], minlength=experts)

    offset_E1 = token_count(indices_TK, experts).offset_E1
    assert offset_E1.tolist() == [0, *rows_E.cumsum(0).tolist()]

    routes = token_index(indices_TK, experts, row_tile)
    assert routes.offset_E1.equal(offset_E1)
    assert routes.choice_P[: len(order)].equal(order.int())
    position = torch.full_like(choices, -1, dtype=torch.int64)
    position[order] = torch.arange(len(order), device=order.device)
    assert routes.position_TK.equal(position.view_as(indices_TK).int())

    tiles = [
        (expert, first)
        for expert, (start, end) in enumerate(zip(offset_E1.tolist(), offset_E1[1:].tolist()))
        for first in range(start, end, row_tile)
    ]
    table = list(zip(routes.expert_R.tolist(), routes.first_R.tolist()))
    assert routes.tiles_1.item() == len(tiles)
    assert table[: len(tiles)] == tiles
    assert routes.token_P()[: len(order)].equal((order // indices_TK.shape[1]).int())


@pytest.mark.in_turn(1, 3)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking would take minutes in the interpreter
)  # fmt: skip
@given(
    experts=st.integers(1, 256), ranks=st.integers(1, 12), rank=st.integers(0, 11), tokens=st.integers(0, 150),
    chosen=st.integers(1, 9), skew=st.floats(0, 3), seed=st.integers(0, 2**31), row_tile=st.sampled_from([16, 64]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)  # fmt: skip
def test_as_a_stable_sort(
    device: torch.device, experts: int, ranks: int, rank: int, tokens: int, chosen: int, skew: float, seed: int,
    row_tile: int, dtype: torch.dtype,
) -> None:  # fmt: skip
    """The index of one of `ranks` ranks equals a stable sort by expert. Choices are skewed towards low expert numbers."""
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
    scores = scores / torch.arange(1, experts + 1) ** skew
    indices_TK = scores.topk(min(chosen, experts), dim=1).indices
    here = -(-experts // ranks)  # experts per rank
    check((indices_TK - rank % ranks * here).to(device, dtype), here, row_tile)


@pytest.mark.parametrize("experts", [1, 16, 240])
def test_one_expert_receives_everything(device: torch.device, experts: int) -> None:
    check(torch.full((300, 1), experts - 1, device=device), experts, 64)


def test_an_expert_chosen_twice_by_a_token_has_two_rows(device: torch.device) -> None:
    check(torch.tensor([[1, 1, 0], [2, 1, 1], [0, 0, 0]], device=device), 3, 16)


def test_choices_of_other_ranks_only(device: torch.device) -> None:
    check(torch.full((20, 3), -1, device=device), 4, 16)


def test_a_view_with_strides(device: torch.device, random: Callable[..., Tensor]) -> None:
    check(random(4, 50, dtype=torch.float32).argsort(0).T, 4, 16)
