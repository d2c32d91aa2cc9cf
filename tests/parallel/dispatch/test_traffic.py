"""The dispatchers move the bytes that follow from the routing: each token travels once to a rank.

Legend: T tokens of a rank, K experts per token, E experts, H hidden, N ranks.
"""

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from optimus.comm import Group, Groups
from optimus.mesh import Mesh
from optimus.model.moe.choices import choices_of
from optimus.model.moe.layer import Experts
from optimus.parallel.dispatch.allgather import AllGatherDispatch
from optimus.parallel.dispatch.alltoall import AllToAllDispatch, make_copies, needed_by
from optimus.parallel.dispatch.two_level import TwoLevelDispatch
from optimus.testing import run_ranks
from optimus.testing.traffic import Traffic, counting

T, H, I, PER_RANK = 20, 16, 8, 2
INDEX = 4  # bytes of the index of a chosen expert
COUNT = 16  # bytes of the two counts that a rank sends each other rank

Counted = tuple[Counter[str], Counter[str]]


def routing(ranks: int, chosen: int) -> Tensor:
    """Returns the experts of all ranks' tokens, [N, T, K].

    Low experts are chosen more often, so that ranks get very different numbers of tokens.
    """
    generator = torch.Generator().manual_seed(chosen)
    probabilities = torch.linspace(3, 0.1, ranks * PER_RANK).expand(ranks * T, -1)
    return torch.multinomial(probabilities, chosen, generator=generator).view(ranks, T, chosen)


def copied(traffic: Traffic) -> Counted:
    return traffic.calls.copy(), traffic.bytes.copy()


def on_a_rank(kind: str, indices_NTK: Tensor, dtype: torch.dtype) -> tuple[Counted, Counted]:
    """Returns calls and bytes of the forward pass and of the backward pass."""
    ranks = len(indices_NTK)
    group = Groups(Mesh(dp=ranks, ep=ranks)).along("ep")
    gathers = AllGatherDispatch(group, group.rank * PER_RANK, PER_RANK)
    dispatch = gathers if kind == "allgather" else AllToAllDispatch(group, PER_RANK, Group([group.rank], 0))
    experts = Experts(PER_RANK, H, I).to(dtype)
    x_TH = torch.randn(T, H, dtype=dtype, requires_grad=True)
    indices_TK = indices_NTK[group.rank]
    weights_TK = torch.rand(indices_TK.shape).to(dtype).requires_grad_()
    with counting() as forward:
        y_TH = dispatch(x_TH, weights_TK, indices_TK, experts)
    with counting() as backward:
        y_TH.sum().backward()
    return copied(forward), copied(backward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_gather_moves_all_tokens_however_they_are_routed(ranks: int, dtype: torch.dtype) -> None:
    """Tokens, weights and indices are all-gathered and outputs are reduce-scattered; the backward pass does the
    reverse.

    On Gloo each rank exchanges parts with every other rank.
    """
    chosen, b = 3, dtype.itemsize
    tokens, weights, choices = ((ranks - 1) * T * n for n in (H * b, chosen * b, chosen * INDEX))
    for forward, backward in run_ranks(on_a_rank, ranks, "allgather", routing(ranks, chosen), dtype):
        calls, moved = 4 * (ranks - 1), 2 * tokens + weights + choices
        assert forward == ({"send": calls, "recv": calls}, {"send": moved, "recv": moved})
        calls, moved = 3 * (ranks - 1), 2 * tokens + weights
        assert backward == ({"send": calls, "recv": calls}, {"send": moved, "recv": moved})


def rows_sent(indices_NTK: Tensor) -> list[list[int]]:
    """Returns the rows that each rank sends to each: the tokens with at least one expert there."""
    ranks = len(indices_NTK)
    holders = [[{choice // PER_RANK for choice in token} for token in tokens] for tokens in indices_NTK.tolist()]
    return [[sum(to in holder for holder in holders[origin]) for to in range(ranks)] for origin in range(ranks)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chosen", [1, 3, 8])
def test_all_to_all_moves_a_row_for_each_rank_that_a_token_needs(chosen: int, dtype: torch.dtype) -> None:
    ranks, b = 4, dtype.itemsize
    indices_NTK = routing(ranks, chosen)
    sent = rows_sent(indices_NTK)
    results = run_ranks(on_a_rank, ranks, "alltoall", indices_NTK, dtype)
    for rank, (forward, backward) in enumerate(results):
        rows = sum(sent[rank]) + sum(row[rank] for row in sent)  # sent and received
        there = rows * (H * b + chosen * b + chosen * INDEX) + 2 * ranks * COUNT
        assert forward == ({"all_to_all_single": 5}, {"all_to_all_single": there + rows * H * b})
        assert backward == ({"all_to_all_single": 3}, {"all_to_all_single": rows * (2 * H * b + chosen * b)})
    if chosen == 8:  # each token needs every expert, and travels once to each rank, not once per expert
        assert sent == [[T] * ranks] * ranks


def rows_to_nodes(indices_NTK: Tensor) -> list[Counter[int]]:
    """Returns the rows that a rank sends to each other rank in each all-to-all of a forward pass on two levels."""
    mesh = Mesh(dp=4, ep=4, ranks_per_node=2)
    groups = Groups(mesh)
    levels = groups.levels("ep")
    assert levels is not None
    dispatch = TwoLevelDispatch(*levels, PER_RANK, Group([groups.rank], 0))
    rows: list[Counter[int]] = []

    real = Group.all_to_all_async

    def noted(self: Group, tensor: Tensor, *counts: list[int] | None) -> Any:
        sent = counts[0] if counts and counts[0] else [1] * self.size  # the all-to-all of counts
        rows.append(Counter({rank: count for rank, count in zip(self.ranks, sent) if rank != groups.rank}))
        return real(self, tensor, *counts)

    indices_TK = indices_NTK[groups.rank]
    with mock.patch.object(Group, "all_to_all_async", noted):
        dispatch(torch.randn(T, H), torch.rand(indices_TK.shape), indices_TK, Experts(PER_RANK, H, I))
    return rows


def test_on_two_levels_a_token_crosses_to_a_node_once() -> None:
    """A token crosses once to a node, whichever of the node's ranks hold its experts.

    Counts travel between nodes and on the node; tokens, weights and indices between nodes and then on the node; results
    the way back.
    """
    indices_NTK = routing(4, 3)
    sent = [
        sum(any(choice // (2 * PER_RANK) != rank // 2 for choice in token) for token in tokens)
        for rank, tokens in enumerate(indices_NTK.tolist())
    ]
    for rank, rows in enumerate(run_ranks(rows_to_nodes, 4, indices_NTK)):
        other = (rank + 2) % 4  # the rank of the other node with the same local rank
        assert [count[other] for count in rows[2:5]] == [sent[rank]] * 3
        on_node = [{rank ^ 1}]
        assert [set(count) - {other} for count in rows] == [set(), *on_node, *[set()] * 3, *on_node * 4, set()]
        assert rows[9][other] == sent[other]


def test_copies_of_tokens() -> None:
    """Token 0 goes to rank 2 once for its two experts, token 1 to ranks 0 and 2, token 2 to rank 0; rank 1 gets none."""
    rank_TK = torch.tensor([[2, 2], [2, 0], [0, 0]])
    needed_TN = needed_by(rank_TK, 3)
    assert needed_TN.sum(0).tolist() == [2, 0, 2]
    assert choices_of(rank_TK, 3).tolist() == [3, 0, 3]
    copies = make_copies(needed_TN, 4)
    assert copies.token_S.tolist() == [1, 2, 0, 1]
    assert copies.copy_S.tolist() == [2, 0, 3, 1]
    assert copies.first_T.tolist() == [0, 1, 3]
