"""Bytes that tensor parallelism moves, against the equations of AxoNN (dissertation, section 5.1.2) and of TED.

The counters give the whole tensor of an all-reduce, of which a rank sends 2 (G - 1) / G (a ring, or Gloo's part by part); of
all-gathers and reduce-scatters, which on Gloo go from rank to rank, what a rank sends: (G - 1) / G of the whole tensor.

Legend: m rows, k inputs and n outputs of a weight; a ranks over the outputs and b over the inputs of what leaves the
residual stream, which are G_x and G_y for that weight, and G_y and G_x for what returns to it.
"""

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from optimus.comm import Group, Groups, Handle
from optimus.comm.functional import local_rows
from optimus.config import load_config
from optimus.kernels.linear import MatrixProduct
from optimus.mesh import Mesh
from optimus.parallel.tensor import SplitProduct
from optimus.resolve.ranks import mesh_of
from optimus.testing import run_ranks
from optimus.testing.steps import build, random_batch
from optimus.testing.traffic import Traffic, counting
from optimus.training.step import objective, terms, training_step

FP32 = 4  # bytes
GRIDS = [(2, 1), (4, 1), (1, 2), (1, 4), (2, 2)]  # of which no two groups of more than one rank differ in size


# ---- The equations, in elements that a rank sends for one weight; the time is this over the bandwidth ----


def gather_z(k: int, n: int, x: int, y: int, z: int) -> float:
    """Equation 5.1: the all-gather of the weight, of which z ranks have a part each."""
    return (z - 1) * k * n / (x * y * z)


def scatter_z(k: int, n: int, x: int, y: int, z: int) -> float:
    """Equation 5.2: the reduce-scatter of its gradient."""
    return (z - 1) / z * k * n / (x * y)


def reduce_y(m: int, n: int, x: int, y: int) -> float:
    """Equation 5.3: the all-reduce of the output in the forward pass; m are this rank's rows, the rows of all over G_z."""
    return 2 * (y - 1) / y * m * n / x


def reduce_x(m: int, k: int, x: int, y: int) -> float:
    """Equation 5.4: the all-reduce of the input's gradient in the backward pass."""
    return 2 * (x - 1) / x * m * k / y


def reduce_data(k: int, n: int, x: int, y: int, z: int, data: int) -> float:
    """Equation 5.5: the all-reduce of the weight's gradient over the data ranks."""
    return 2 * (data - 1) / data * k * n / (x * y * z)


def sent(traffic: Traffic, ranks: int) -> float:
    """Bytes that a rank sends, where all its groups have `ranks` ranks."""
    assert traffic.bytes.keys() <= {"all_reduce", "send", "recv"}
    assert traffic.bytes["send"] == traffic.bytes["recv"]
    return 2 * (ranks - 1) / ranks * traffic.bytes["all_reduce"] + traffic.bytes["send"]


# ---- One projection ----

M, K, N = 16, 8, 24


def one_projection(grid: tuple[int, int], returns: bool, sequence: bool) -> tuple[float, float]:
    """Bytes that this rank sends in the forward and in the backward pass."""
    groups = Groups(Mesh(tp=grid[0] * grid[1], tp_in=grid[1]))
    outer, inner = groups.along("tp_out"), groups.along("tp_in")
    inputs, outputs = (outer, inner) if returns else (inner, outer)
    gathers, scatters = sequence and not returns, sequence and returns
    product = SplitProduct(MatrixProduct(), inputs, outputs, gathers=gathers, scatters=scatters, overlap=True)
    weight = nn.Parameter(torch.ones(N // outputs.size, K // inputs.size))
    x: Tensor = torch.ones(M, K // inputs.size)
    x = (local_rows(x, outputs) if gathers else x).requires_grad_()
    with counting() as forward:
        y = product(x, weight, None)
    with counting() as backward:
        y.backward(torch.ones_like(y))
    return sent(forward, max(grid)), sent(backward, max(grid))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("returns", [False, True])
def test_one_projection(grid: tuple[int, int], returns: bool) -> None:
    """With G_y or G_x 1 this is Megatron-LM: one all-reduce, in one of the two passes."""
    x, y = grid[::-1] if returns else grid
    right = FP32 * reduce_y(M, N, x, y), FP32 * reduce_x(M, K, x, y)
    assert run_ranks(one_projection, x * y, grid, returns, False) == [right] * (x * y)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("returns", [False, True])
def test_one_projection_with_sequence_parallelism(grid: tuple[int, int], returns: bool) -> None:
    """What is all-reduced over `a` ranks becomes an all-gather and a reduce-scatter, each half of it; and the rows that only
    a part is saved of are gathered once more."""
    a, b = grid
    x, y = (b, a) if returns else (a, b)
    if returns:
        half = reduce_y(M, N, x, y) / 2
        right = half, half + reduce_x(M, K, x, y)
    else:
        half = reduce_x(M, K, x, y) / 2
        right = half + reduce_y(M, N, x, y), 2 * half
    found = run_ranks(one_projection, a * b, grid, returns, True)
    assert found == [(FP32 * right[0], FP32 * right[1])] * (a * b)


# ---- A block and the vocabulary ----

HIDDEN, FEED_FORWARD, VOCABULARY, ROWS = 16, 24, 32, 2 * 8


def tree(layers: int, grid: tuple[int, int], **sections: Any) -> dict[str, Any]:
    model = {"family": "olmo", "hidden": HIDDEN, "layers": layers, "heads": 4, "intermediate": FEED_FORWARD}
    train = {
        "output": "",
        "steps": 1,
        "global_batch": 2,
        "micro_batch": 2,
        "sequence_length": 8,
        "precision": "float32",
    }
    config = {"model": model | {"vocab": VOCABULARY}, "data": {"path": ""}, "train": train}
    return config | {"parallel": {"tensor": list(grid)}} | sections


def of_a_microbatch(source: dict[str, Any]) -> tuple[float, float]:
    """Bytes that this rank sends in the forward and in the backward pass of the whole model."""
    config = load_config(source)
    groups = Groups(mesh_of(config, torch.distributed.get_world_size()))
    model, state = build(config, groups)
    state.initialize(0, 0.02)
    state.begin_step()
    with counting() as forward:
        loss = objective(terms(model.model.losses(random_batch(config, 1))), config)
    with counting() as backward:
        loss.backward()
    size = max(config.parallel.grid)
    return sent(forward, size), sent(backward, size)


def of_one_and_two_blocks(grid: tuple[int, int], sequence: bool) -> list[tuple[float, float]]:
    return [of_a_microbatch(tree(n, grid, parallel={"tensor": list(grid), "sequence": sequence})) for n in (1, 2)]


def projections(grid: tuple[int, int]) -> tuple[float, float]:
    """Equations 5.3 and 5.4 of a block, summed over its four weights, every other one transposed: (5.3, 5.4)."""
    a, b = grid
    leaving = [(HIDDEN, 3 * HIDDEN), (HIDDEN, 2 * FEED_FORWARD)]
    returning = [(HIDDEN, HIDDEN), (FEED_FORWARD, HIDDEN)]
    forward = sum(reduce_y(ROWS, n, a, b) for _, n in leaving) + sum(reduce_y(ROWS, n, b, a) for _, n in returning)
    backward = sum(reduce_x(ROWS, k, a, b) for k, _ in leaving) + sum(reduce_x(ROWS, k, b, a) for k, _ in returning)
    return forward, backward


def norm(rows: float, b: int) -> float:
    """Two sums a row over the ranks that have the columns, in each pass."""
    return 2 * (b - 1) / b * 2 * rows


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("sequence", [False, True])
def test_a_dense_block(grid: tuple[int, int], sequence: bool) -> None:
    """Equations 5.3 and 5.4 of its weights, and two norms; with sequence parallelism two all-gathers more, of the rows that
    qkv and gate_up save a part of."""
    a, b = grid
    forward, backward = (part + 2 * norm(ROWS / a if sequence else ROWS, b) for part in projections(grid))
    if sequence:
        backward += 2 * (a - 1) / a * ROWS * HIDDEN / b
        # Of what is all-reduced over `a`, one half moves in the forward and one half in the backward pass.
        over_a = 2 * (a - 1) / a * 2 * ROWS * HIDDEN / b
        assert forward >= over_a
    for one, two in run_ranks(of_one_and_two_blocks, a * b, grid, sequence):
        assert (two[0] - one[0], two[1] - one[1]) == pytest.approx((FP32 * forward, FP32 * backward), abs=1e-6)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("sequence", [False, True])
def test_the_vocabulary(grid: tuple[int, int], sequence: bool) -> None:
    """Embedding: a sum over the parts of the vocabulary. Loss: the rows to all parts, two numbers a row and part, and over
    the columns the logits' sum. Logits never move between the parts of the vocabulary."""
    a, b = grid
    rows = ROWS / a if sequence else ROWS
    stream = 2 * (a - 1) / a * ROWS * HIDDEN / b  # an all-reduce of the residual stream
    logits = 2 * (b - 1) / b * ROWS * VOCABULARY / a
    forward = stream + logits + (a - 1) * 2 * ROWS + norm(rows, b)  # with sequence: half for each, embedding and loss
    backward = stream + norm(rows, b)
    for one, two in run_ranks(of_one_and_two_blocks, a * b, grid, sequence):
        outside = 2 * one[0] - two[0], 2 * one[1] - two[1]
        assert outside == pytest.approx((FP32 * forward, FP32 * backward), abs=1e-6)


# ---- Weights: AxoNN's z and data ----


def of_a_step(source: dict[str, Any]) -> tuple[int, int, int]:
    """(bytes sent, bytes all-reduced, elements of this rank's parameters) of what a step does about weights."""
    config = load_config(source)
    groups = Groups(mesh_of(config, torch.distributed.get_world_size()))
    model, state = build(config, groups)
    state.initialize(0, 0.02)
    tokens = random_batch(config, 1).chunk(groups.mesh.dp)[groups.along("dp").rank]
    training_step(model, state, tokens, config, 1)
    with counting() as step:
        training_step(model, state, tokens, config, 2)
    return step.bytes["send"], step.bytes["all_reduce"], sum(chunk.plan.size for chunk in state.chunks)


@pytest.mark.parametrize("release", [False, True])
def test_the_weights_of_a_step(release: bool) -> None:
    """Equations 5.1, 5.2 and 5.5 of all weights together, which are one chunk: G_x 2, G_z 2, G_data 2. What activations, the
    losses and the norm of the gradients take is that of the same grid without z and data."""
    state = {"shard": "parameters", "shard_ranks": 2, "reshard_after_forward": release, "prefetch": 0}
    train = tree(1, (2, 1))["train"] | {"global_batch": 8}
    found = run_ranks(of_a_step, 8, tree(1, (2, 1), train=train, state=state))
    alone = run_ranks(of_a_step, 2, tree(1, (2, 1)))
    for (moved, reduced, elements), (activations, scalars, whole) in zip(found, 4 * alone):
        assert elements == whole == count(2)
        weights = gather_z(1, elements, 1, 1, 2) + scatter_z(1, elements, 1, 1, 2)
        assert moved - activations == FP32 * weights
        assert reduced - scalars == FP32 * reduce_data(1, elements, 1, 1, 2, 2)


def count(a: int) -> int:
    """Elements of the parameters of one block, the embedding and the output layer, split over `a` ranks."""
    return (4 * HIDDEN**2 + 3 * HIDDEN * FEED_FORWARD + 2 * VOCABULARY * HIDDEN) // a


# ---- Tokens of experts: TED ----


def exchanged(source: dict[str, Any]) -> dict[str, Counter[str]]:
    """Bytes into and out of the all-to-all of a microbatch, by pass and by axis."""
    config = load_config(source)
    groups = Groups(mesh_of(config, torch.distributed.get_world_size()))
    model, state = build(config, groups)
    state.initialize(0, 0.5)
    state.begin_step()
    tokens = random_batch(config, 1).chunk(groups.mesh.dp)[groups.along("dp").rank]
    found: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
    here = found["forward"]
    exchange = Group.all_to_all_async

    def counted(group: Group, rows: Tensor, *lengths: list[int]) -> tuple[Tensor, Handle]:
        came, handle = exchange(group, rows, *lengths)
        if rows.dtype != torch.int64:  # the counts, of which there are as many whatever is sent
            here["ep" if group is groups.along("ep") else "etp"] += rows.nbytes + came.nbytes
        return came, handle

    with patch.object(Group, "all_to_all_async", counted):
        loss = objective(terms(model.model.losses(tokens)), config)
        here = found["backward"]
        loss.backward()
    return found


@pytest.mark.parametrize("tp", [2, 4])
def test_duplicate_tokens_are_dropped(tp: int) -> None:
    """TED, section 7.2: of the bytes of the all-to-all, 1 / tp is left, in both passes."""
    sparse = {"family": "olmoe", "experts": 4, "experts_per_token": 2}
    layout = {"tensor": tp, "expert": 2, "expert_tensor": tp, "sequence": False}
    config = tree(2, (tp, 1), parallel=layout)
    config["model"] |= sparse
    config["train"] |= {"global_batch": 4}
    dropped, kept = (run_ranks(exchanged, 2 * tp, config | {"moe": {"drop_duplicates": d}}) for d in (True, False))
    for when in ("forward", "backward"):
        few, many = (sum(rank[when]["ep"] for rank in found) for found in (dropped, kept))
        assert few > 0
        assert many == tp * few
        assert all(rank[when]["etp"] == 0 for rank in kept)
