"""Both dispatchers give the outputs and gradients of the layer on one device, which gets the tokens of all ranks.

Legend: T tokens of all ranks, K experts per token, E experts, H hidden.
"""

from typing import Literal, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimus.comm import Group, Groups
from optimus.config import ModelConfig
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.model import Transformer
from optimus.model.init import initialize
from optimus.model.moe.dispatch import TokenDispatcher, local_dispatch
from optimus.model.moe.layer import Experts, MoeLayer
from optimus.parallel.dispatch.allgather import AllGatherDispatch
from optimus.parallel.dispatch.alltoall import AllToAllDispatch
from optimus.parallel.dispatch.two_level import TwoLevelDispatch
from optimus.parallel.layouts import parameter_layouts
from optimus.parallel.options import StageOptions
from optimus.parallel.parallelize import parallelize
from optimus.parallel.recompute import Recomputation
from optimus.testing import run_ranks

Kind = Literal["allgather", "alltoall"]
ROUTINGS = ["random", "one choice", "every expert", "one expert", "one rank", "nothing for the last rank"]
KINDS: list[Kind] = ["allgather", "alltoall"]
H, I = 16, 8
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def error(ours: Tensor, theirs: Tensor) -> float:
    """Returns the relative error in the Frobenius norm. A result that should be zero must be zero."""
    assert ours.shape == theirs.shape
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-30)).item()


# ---- A dispatcher without a router ----


class Inputs(NamedTuple):
    """The inputs and parameters of all ranks, in rank order."""

    x_TH: Tensor
    weights_TK: Tensor
    indices_TK: Tensor
    y_grad_TH: Tensor
    gate_up: Tensor
    down: Tensor


def inputs(indices_TK: Tensor, experts: int, dtype: torch.dtype) -> Inputs:
    torch.manual_seed(1)
    x_TH, y_grad_TH = torch.randn(2, len(indices_TK), H, dtype=dtype)
    weights_TK = torch.rand(indices_TK.shape).to(dtype)
    gate_up, down = torch.randn(experts, 2, I, H, dtype=dtype), torch.randn(experts, H, I, dtype=dtype)
    return Inputs(x_TH, weights_TK, indices_TK, y_grad_TH, gate_up, down)


def outputs(given: Inputs, dispatch: TokenDispatcher) -> list[Tensor]:
    """Returns y and the gradients of x, of the weights and of both parameters. Dim 0 of each is tokens or experts."""
    experts = Experts(len(given.down), H, I)
    experts.gate_up, experts.down = nn.Parameter(given.gate_up.clone()), nn.Parameter(given.down.clone())
    x_TH, weights_TK = given.x_TH.clone().requires_grad_(), given.weights_TK.clone().requires_grad_()
    y_TH = dispatch(x_TH, weights_TK, given.indices_TK, experts)
    grads = torch.autograd.grad(y_TH, [x_TH, weights_TK, experts.gate_up, experts.down], given.y_grad_TH)
    with torch.no_grad():
        assert dispatch(x_TH, weights_TK, given.indices_TK, experts).equal(y_TH)  # a second pass gives the same bits
    return [y_TH.detach(), *grads]


def part(given: Inputs, mesh: Mesh, rank: int, tokens: list[int]) -> Inputs:
    """Returns the inputs of rank `rank`: `tokens[rank]` tokens, its share of the experts, and its part of each expert."""
    mine = [value.split(tokens)[rank] for value in given[:4]]
    return Inputs(*mine, *(own_experts(value, mesh, rank) for value in given[4:]))


def own_experts(value: Tensor, mesh: Mesh, rank: int) -> Tensor:
    """Returns the part of the experts' parameter, or of its gradient, that `rank` holds."""
    own = value.chunk(mesh.ep)[mesh.coordinate(rank, "ep")]
    return own.chunk(mesh.etp, 2)[mesh.coordinate(rank, "etp")]


def on_a_rank(kind: Kind, given: Inputs, mesh: Mesh, tokens: list[int], duplicates: bool = False) -> list[Tensor]:
    groups = Groups(mesh)
    group, experts = groups.along("ep"), len(given.down)
    each = experts // mesh.ep
    if kind == "allgather":
        dispatch: TokenDispatcher = AllGatherDispatch(groups.along("ep", "etp"), group.rank * each, each)
    else:
        levels, parts = groups.levels("ep"), groups.along("etp")
        assert (levels is not None) == (mesh.ranks_per_node is not None)
        dispatch = AllToAllDispatch(group, each, parts, duplicates=duplicates)
        if levels is not None:
            dispatch = TwoLevelDispatch(*levels, each, parts, duplicates=duplicates)
    return outputs(part(given, mesh, groups.rank, tokens), dispatch)


def check(
    kind: Kind,
    indices_TK: Tensor,
    experts: int,
    dtype: torch.dtype,
    tokens: list[int],
    etp: int = 1,
    per_node: int | None = None,
) -> None:
    mesh = Mesh(dp=len(tokens), ep=len(tokens) // etp, etp=etp, ranks_per_node=per_node)
    given = inputs(indices_TK, experts, dtype)
    results = run_ranks(on_a_rank, mesh.size, kind, given, mesh, tokens)
    whole = outputs(given, local_dispatch)
    errors = [error(torch.cat(parts), theirs) for parts, theirs in zip(list(zip(*results))[:3], whole)]
    for rank, result in enumerate(results):
        errors += [error(grad, own_experts(theirs, mesh, rank)) for grad, theirs in zip(result[3:], whole[3:])]
    assert len(errors) == 3 + 2 * mesh.size
    assert max(errors) < TOLERANCE[dtype]


def routing(name: str, ranks: int) -> tuple[Tensor, int]:
    """Returns (indices_TK, E) of 12 tokens and two experts a rank."""
    tokens, experts = 12 * ranks, 2 * ranks
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0))
    cases = {
        "random": scores.topk(min(3, experts)).indices,
        "one choice": scores.topk(1).indices,
        "every expert": scores.topk(experts).indices,
        "one expert": torch.full((tokens, 1), experts - 2),
        "one rank": torch.tensor([[3, 2]]).expand(tokens, 2).contiguous(),
        "nothing for the last rank": scores[:, :-2].topk(2).indices,
    }
    return cases[name], experts


@pytest.mark.swept
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ROUTINGS)
def test_same_as_one_device(kind: Kind, ranks: int, name: str) -> None:
    indices_TK, experts = routing(name, ranks)
    check(kind, indices_TK, experts, torch.float32, [12] * ranks)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["random", "every expert", "one expert"])
def test_same_as_one_device_in_bfloat16(kind: Kind, name: str) -> None:
    indices_TK, experts = routing(name, 4)
    check(kind, indices_TK, experts, torch.bfloat16, [12] * 4)


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens_at_all(kind: Kind) -> None:
    check(kind, torch.zeros(0, 2, dtype=torch.int64), 4, torch.float32, [0, 0])


@pytest.mark.parametrize("tokens", [[1, 23, 0, 24], [0, 0, 48, 0]])
def test_all_to_all_of_different_numbers_of_tokens(tokens: list[int]) -> None:
    indices_TK, experts = routing("random", 4)
    check("alltoall", indices_TK, experts, torch.float32, tokens)


@pytest.mark.swept
@pytest.mark.parametrize(("ranks", "per_node", "etp"), [(4, 2, 1), (8, 2, 1), (8, 4, 1), (8, 4, 2)])
@pytest.mark.parametrize("name", ROUTINGS)
def test_on_two_levels(ranks: int, per_node: int, etp: int, name: str) -> None:
    """Each rank of several nodes, with several ranks each, holds experts."""
    indices_TK, experts = routing(name, ranks)
    check("alltoall", indices_TK, experts, torch.float32, [12] * ranks, etp, per_node)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "etp"), [(2, 2), (4, 2), (8, 2), (8, 4)])
def test_experts_split_in_parts(kind: Kind, ranks: int, etp: int) -> None:
    indices_TK, experts = routing("random", ranks)
    check(kind, indices_TK, experts, torch.float32, [12] * ranks, etp)


@pytest.mark.parametrize("tokens", [[5, 19, 0, 24], [0, 48, 0, 0]])
def test_parts_with_different_numbers_of_tokens(tokens: list[int]) -> None:
    indices_TK, experts = routing("random", 4)
    check("alltoall", indices_TK, experts, torch.float32, tokens, etp=2)


def with_duplicates(given: Inputs, mesh: Mesh) -> list[Tensor]:
    """Runs the dispatcher of a rank whose tokens all ranks along `etp` have too."""
    rank = mesh.coordinate(Groups(mesh).rank, "ep")
    same = Inputs(*(value.chunk(mesh.ep)[rank] for value in given[:4]), *given[4:])
    tokens = [0] * mesh.size
    tokens[Groups(mesh).rank] = len(same.x_TH)
    return on_a_rank("alltoall", same, mesh, tokens, duplicates=True)


@pytest.mark.parametrize(("ep", "etp"), [(2, 2), (1, 2), (2, 4)])
def test_all_to_all_of_duplicates(ep: int, etp: int) -> None:
    """Every rank along `etp` sends all tokens, and gets the whole result and the gradients of the whole layer."""
    mesh = Mesh(dp=ep, tp=etp, ep=ep, etp=etp)
    indices_TK, experts = routing("random", 2)
    given = inputs(indices_TK, experts, torch.float32)
    whole = outputs(given, local_dispatch)
    for rank, found in enumerate(run_ranks(with_duplicates, mesh.size, given, mesh)):
        home = mesh.coordinate(rank, "ep")
        right = [value.chunk(ep)[home] for value in whole[:3]] + [own_experts(grad, mesh, rank) for grad in whole[3:]]
        errors = [error(ours, theirs) for ours, theirs in zip(found, right, strict=True)]
        assert max(errors) < TOLERANCE[torch.float32], (rank, errors)


# ---- A model whose layers have a dispatcher ----

MODEL = ModelConfig(
    family="olmoe", hidden=32, layers=2, heads=2, intermediate=24, vocab=50, experts=8, experts_per_token=3
)
SEQUENCES = torch.randint(50, (8, 20), generator=torch.Generator().manual_seed(0))


def losses_and_gradients(model: Transformer, tokens_BS: Tensor) -> tuple[float, dict[str, Tensor]]:
    logits_BSV = model(tokens_BS)
    with torch.no_grad():
        assert model(tokens_BS).equal(logits_BSV)
    loss = F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), tokens_BS[:, 1:].flatten())
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def model_on_a_rank(mesh: Mesh, kind: Kind, recomputed: list[str]) -> tuple[float, dict[str, Tensor]]:
    """Returns the mean loss of this rank's sequences, and gradients summed over the ranks that hold the same parameter."""
    groups = Groups(mesh)
    options = StageOptions(dispatch=kind, recomputation=Recomputation(tuple(recomputed)))
    model = parallelize(Transformer(MODEL), groups, options)
    initialize(model, 0, 0.2)
    layouts = parameter_layouts(model)
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        local = parameter.detach()[layouts[name].region(mesh, groups.rank)].clone()
        setattr(model.get_submodule(owner), leaf, nn.Parameter(local))
    loss, gradients = losses_and_gradients(model, SEQUENCES.chunk(mesh.size)[groups.rank])
    for name, gradient in gradients.items():
        groups.along(*layouts[name].partial_axes).all_reduce(gradient)
    return loss, gradients


@pytest.mark.swept
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("mesh", "recomputed"),
    [
        (Mesh(dp=2, ep=2), []),
        (Mesh(dp=4, ep=2), ["moe"]),
        (Mesh(dp=4, ep=4), ["norm", "attention", "moe"]),
        (Mesh(dp=4, ep=1), ["moe"]),
        (Mesh(dp=8, ep=4), []),
        (Mesh(dp=8, ep=8, ranks_per_node=4), ["moe"]),
    ],
    ids=lambda value: f"dp{value.dp}-ep{value.ep}" if isinstance(value, Mesh) else "+".join(value) or "keep",
)
def test_a_model_has_the_gradients_of_one_process(kind: Kind, mesh: Mesh, recomputed: list[str]) -> None:
    model = Transformer(MODEL)
    initialize(model, 0, 0.2)
    loss, gradients = losses_and_gradients(model, SEQUENCES)
    layouts = parameter_layouts(model)
    results = run_ranks(model_on_a_rank, mesh.size, mesh, kind, recomputed)
    assert sum(result[0] for result in results) / mesh.size == pytest.approx(loss, rel=1e-6)
    for rank, (_, found) in enumerate(results):
        assert found.keys() == gradients.keys()
        for name, gradient in found.items():
            theirs = gradients[name][layouts[name].region(mesh, rank)]
            assert error(gradient / mesh.size, theirs) < 2e-5, (rank, name)


def _six_expert_ranks() -> Groups:
    """Returns groups of six expert ranks, of which none has to run."""
    groups = Groups(Mesh())
    groups._along = {frozenset({axis}): Group(range(size), 0) for axis, size in (("ep", 6), ("etp", 1))}
    return groups


def test_experts_that_cannot_be_divided() -> None:
    with pytest.raises(UserError, match="8 experts cannot be divided evenly over ep 6"):
        parallelize(Transformer(MODEL), _six_expert_ranks(), StageOptions())


def test_one_expert_rank_needs_no_dispatcher() -> None:
    model = parallelize(Transformer(MODEL), Groups(Mesh()), StageOptions())
    layers = [module for module in model.modules() if isinstance(module, MoeLayer)]
    assert [layer.dispatch for layer in layers] == [local_dispatch] * MODEL.layers
