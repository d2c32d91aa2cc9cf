"""Tensor parallelism moves the bytes of the equations of AxoNN (dissertation, section 5.1.2) and of TED.

The counters give the whole tensor of an all-reduce, of which a rank sends 2 (G - 1) / G (a ring, or Gloo's part by
part). All-gathers and reduce-scatters go from rank to rank on Gloo. For them the counters give the bytes that a rank
sends: (G - 1) / G of the whole tensor.

Legend: m rows, k inputs and n outputs of a weight; a ranks over the outputs and b over the inputs of weights that read
the residual stream. There a and b are G_x and G_y; for weights that write to the residual stream they are G_y and G_x.
"""

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from helpers.sweep import in_turns
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
GRIDS = [(2, 1), (4, 1), (1, 2), (1, 4), (2, 2)]  # in each, all groups of more than one rank have the same size


# ---- The equations: elements that a rank sends for one weight (the paper divides them by the bandwidth) ----


def gather_z(k: int, n: int, x: int, y: int, z: int) -> float:
    """Equation 5.1: the all-gather of the weight, of which each of z ranks holds a part."""
    return (z - 1) * k * n / (x * y * z)


def scatter_z(k: int, n: int, x: int, y: int, z: int) -> float:
    """Equation 5.2: the reduce-scatter of the weight's gradient."""
    return (z - 1) / z * k * n / (x * y)


def reduce_y(m: int, n: int, x: int, y: int) -> float:
    """Equation 5.3: the all-reduce of the output in the forward pass; m is a rank's rows, the rows of all over G_z."""
    return 2 * (y - 1) / y * m * n / x


def reduce_x(m: int, k: int, x: int, y: int) -> float:
    """Equation 5.4: the all-reduce of the input's gradient in the backward pass."""
    return 2 * (x - 1) / x * m * k / y


def reduce_data(k: int, n: int, x: int, y: int, z: int, data: int) -> float:
    """Equation 5.5: the all-reduce of the weight's gradient over the data ranks."""
    return 2 * (data - 1) / data * k * n / (x * y * z)


def sent(traffic: Traffic, ranks: int) -> float:
    """Returns the bytes that a rank sends if all its groups have `ranks` ranks."""
    assert traffic.bytes.keys() <= {"all_reduce", "send", "recv"}
    assert traffic.bytes["send"] == traffic.bytes["recv"]
    return 2 * (ranks - 1) / ranks * traffic.bytes["all_reduce"] + traffic.bytes["send"]


# ---- One projection ----

M, K, N = 16, 8, 24


def one_projection(grid: tuple[int, int], returns: bool, sequence: bool) -> tuple[float, float]:
    """Returns the bytes that this rank sends in the forward and in the backward pass."""
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
    """A grid with G_y or G_x 1 is Megatron-LM: one all-reduce, in one of the two passes."""
    x, y = grid[::-1] if returns else grid
    right = FP32 * reduce_y(M, N, x, y), FP32 * reduce_x(M, K, x, y)
    assert run_ranks(one_projection, x * y, grid, returns, False) == [right] * (x * y)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("returns", [False, True])
def test_one_projection_with_sequence_parallelism(grid: tuple[int, int], returns: bool) -> None:
    """An all-reduce over `a` ranks becomes an all-gather and a reduce-scatter, each half of its bytes.

    One more all-gather fetches the rows of which a rank saves a part.
    """
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
    """Returns the bytes that this rank sends in the forward and in the backward pass of the whole model."""
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
    """Returns the sums of equations 5.3 and 5.4 over the four weights of a block, of which every other is transposed."""
    a, b = grid
    leaving = [(HIDDEN, 3 * HIDDEN), (HIDDEN, 2 * FEED_FORWARD)]
    returning = [(HIDDEN, HIDDEN), (FEED_FORWARD, HIDDEN)]
    forward = sum(reduce_y(ROWS, n, a, b) for _, n in leaving) + sum(reduce_y(ROWS, n, b, a) for _, n in returning)
    backward = sum(reduce_x(ROWS, k, a, b) for k, _ in leaving) + sum(reduce_x(ROWS, k, b, a) for k, _ in returning)
    return forward, backward


def norm(rows: float, b: int) -> float:
    """Returns the elements of two sums a row, all-reduced over the ranks that split the columns, in each pass."""
    return 2 * (b - 1) / b * 2 * rows


@pytest.mark.parametrize("grid", in_turns([(grid,) for grid in GRIDS], 2))
@pytest.mark.parametrize("sequence", [False, True])
def test_a_dense_block(grid: tuple[int, int], sequence: bool) -> None:
    """A block moves the bytes of equations 5.3 and 5.4 for its weights, and of two norms.

    Sequence parallelism adds two all-gathers, of the rows of which qkv and gate_up save a part.
    """
    a, b = grid
    forward, backward = (part + 2 * norm(ROWS / a if sequence else ROWS, b) for part in projections(grid))
    if sequence:
        backward += 2 * (a - 1) / a * ROWS * HIDDEN / b
        # Half of the bytes that are all-reduced over `a` moves in the forward pass, half in the backward pass.
        over_a = 2 * (a - 1) / a * 2 * ROWS * HIDDEN / b
        assert forward >= over_a
    for one, two in run_ranks(of_one_and_two_blocks, a * b, grid, sequence):
        assert (two[0] - one[0], two[1] - one[1]) == pytest.approx((FP32 * forward, FP32 * backward), abs=1e-6)


@pytest.mark.parametrize("grid", in_turns([(grid,) for grid in GRIDS], 2))
@pytest.mark.parametrize("sequence", [False, True])
def test_the_vocabulary(grid: tuple[int, int], sequence: bool) -> None:
    """The vocabulary's ranks never exchange logits.

    The embedding sums over them. The loss sends them the rows and two numbers a row and rank, and sums logits over
    columns.
    """
    a, b = grid
    rows = ROWS / a if sequence else ROWS
    stream = 2 * (a - 1) / a * ROWS * HIDDEN / b  # an all-reduce of the residual stream
    logits = 2 * (b - 1) / b * ROWS * VOCABULARY / a
    # with sequence parallelism, embedding and loss move half of the stream each
    forward = stream + logits + (a - 1) * 2 * ROWS + norm(rows, b)
    backward = stream + norm(rows, b)
    for one, two in run_ranks(of_one_and_two_blocks, a * b, grid, sequence):
        outside = 2 * one[0] - two[0], 2 * one[1] - two[1]
        assert outside == pytest.approx((FP32 * forward, FP32 * backward), abs=1e-6)


# ---- Weights: AxoNN's z and data ----


def of_a_step(source: dict[str, Any]) -> tuple[int, int, int]:
    """Returns (bytes sent, bytes all-reduced, elements of this rank's parameters) of a step."""
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
    """All weights, which are one chunk, move the bytes of equations 5.1, 5.2 and 5.5 with G_x, G_z and G_data 2.

    The same grid without z and data gives the bytes of activations, losses and the norm of the gradients.
    """
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
    """Returns the parameters of one block, the embedding and the output layer on one of `a` ranks."""
    return (4 * HIDDEN**2 + 3 * HIDDEN * FEED_FORWARD + 2 * VOCABULARY * HIDDEN) // a


# ---- Tokens of experts: TED ----


def exchanged(source: dict[str, Any]) -> dict[str, Counter[str]]:
    """Returns the bytes into and out of the all-to-alls of a microbatch, by pass and by axis."""
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
        if rows.dtype != torch.int64:  # not the counts, whose bytes do not depend on the tokens
            here["ep" if group is groups.along("ep") else "etp"] += rows.nbytes + came.nbytes
        return came, handle

    with patch.object(Group, "all_to_all_async", counted):
        loss = objective(terms(model.model.losses(tokens)), config)
        here = found["backward"]
        loss.backward()
    return found


@pytest.mark.parametrize("tp", [2, 4])
def test_duplicate_tokens_are_dropped(tp: int) -> None:
    """Dropping duplicate tokens leaves 1 / tp of the bytes of the all-to-all, in both passes (TED, section 7.2)."""
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
