"""Projections split over grids of ranks, and a model of such projections, give the numbers of one device.

Legend: T rows, L inputs and N outputs of a weight.
"""

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from optimus.comm import Group, Groups, PlannedGroups
from optimus.comm.functional import local_rows
from optimus.comm.groups import groups_of_mesh
from optimus.config import ModelConfig
from optimus.kernels.gradient_buffer import GradientBuffer, TensorBuffer
from optimus.kernels.linear import MatrixProduct
from optimus.mesh import Layout, Mesh
from optimus.mesh.mesh import runs_of_tensor
from optimus.model import Transformer
from optimus.model.architecture import Latent
from optimus.model.cache import KVCache
from optimus.model.init import initialize
from optimus.model.linear import Linear, Product
from optimus.model.norms import Norms
from optimus.model.parameters import Size
from optimus.model.units import replace_all
from optimus.model.vocabulary import Vocabulary
from optimus.parallel.degrees import TensorDegrees
from optimus.parallel.layouts import parameter_layouts
from optimus.parallel.options import StageOptions
from optimus.parallel.parallelize import parallelize
from optimus.parallel.tensor import SplitProduct, products
from optimus.testing import run_ranks

# (ranks over outputs, ranks over inputs) of weights that read the residual stream
GRIDS = [(2, 1), (1, 2), (4, 1), (2, 2), (3, 1)]
T, L, N = 24, 36, 12


def error(ours: Tensor, theirs: Tensor) -> float:
    """Returns the relative error in the Frobenius norm."""
    assert ours.shape == theirs.shape
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def columns(x: Tensor, group: Group, dim: int = -1) -> Tensor:
    """Returns this rank's part of a dim."""
    return x.chunk(group.size, dim)[group.rank].contiguous()


# ---- One projection ----


class Form(NamedTuple):
    """The way a projection is split, and the place of its weight's gradient."""

    # writes to the residual stream, so the first axis of the grid splits inputs; otherwise it splits outputs
    returns: bool
    sequence: bool
    overlap: bool
    buffer: bool


def split_product(form: Form, outer: Group, inner: Group) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns (this rank's tensor, that of one device) by name, for two outputs of one input, as gate and up are."""
    inputs, outputs = (outer, inner) if form.returns else (inner, outer)
    gathers, scatters = form.sequence and not form.returns, form.sequence and form.returns
    x_TL, y_grad_TN = normal(0, T, L).requires_grad_(), normal(1, T, 2 * N)
    w_2NL = nn.Parameter(normal(2, 2, N, L))
    y_TN = Product(MatrixProduct())(x_TL, w_2NL, None)
    y_TN.backward(y_grad_TN)

    def at_input(x: Tensor) -> Tensor:
        return columns(local_rows(x, outputs) if gathers else x, inputs)

    def at_output(y: Tensor) -> Tensor:
        own = columns(y.unflatten(1, (2, N)), outputs).flatten(1)
        return local_rows(own, inputs) if scatters else own

    def of_weight(w: Tensor) -> Tensor:
        return columns(columns(w, inputs), outputs, 1)

    x, w = at_input(x_TL.detach()).requires_grad_(), nn.Parameter(of_weight(w_2NL.detach()))
    buffer = TensorBuffer(torch.ones(w.shape))
    before = x.detach().clone()
    split = SplitProduct(MatrixProduct(), inputs, outputs, gathers=gathers, scatters=scatters, overlap=form.overlap)
    y = split(x, w, buffer if form.buffer else None)
    y.backward(at_output(y_grad_TN))
    assert x.equal(before)
    assert (w.grad is None, buffer.added) == ((True, 1) if form.buffer else (False, 0))
    w_grad = buffer.grad - 1 if form.buffer else w.grad
    assert x.grad is not None
    assert w_grad is not None
    assert x_TL.grad is not None
    assert w_2NL.grad is not None
    return {
        "y": (y.detach(), at_output(y_TN.detach())),
        "x_grad": (x.grad, at_input(x_TL.grad)),
        "w_grad": (w_grad, of_weight(w_2NL.grad)),
    }


FORMS = [Form(*choices) for choices in itertools.product([False, True], repeat=4)]


def split_products(grid: tuple[int, int]) -> dict[Form, dict[str, tuple[Tensor, Tensor]]]:
    groups = Groups(Mesh(tp=grid[0] * grid[1], tp_in=grid[1]))
    outer, inner = groups.along("tp_out"), groups.along("tp_in")
    return {form: split_product(form, outer, inner) for form in FORMS}


@pytest.mark.parametrize("grid", GRIDS)
def test_a_split_projection_is_the_whole_one(grid: tuple[int, int]) -> None:
    """Cases are both roles, with and without sequence parallelism, overlap and a gradient buffer."""
    for found in run_ranks(split_products, grid[0] * grid[1], grid):
        for form, tensors in found.items():
            for name, (ours, theirs) in tensors.items():
                assert error(ours, theirs) < 1e-5, (form, name)
            plain = found[form._replace(overlap=False)]
            assert all(tensors[name][0].equal(plain[name][0]) for name in tensors), form


def without_gradients() -> bool:
    group = Groups(Mesh(tp=2)).along("tp_out")
    alone = Group([group.rank], 0)
    split = SplitProduct(MatrixProduct(), alone, group, gathers=True, scatters=False, overlap=True)
    layer = Linear(Size("residual", L), Size("ffn", N // 2))
    layer.product = split
    with torch.no_grad():
        return layer(normal(0, T // 2, L)).requires_grad


def test_no_grad_makes_no_graph() -> None:
    assert run_ranks(without_gradients, 2) == [False, False]


# ---- A whole model ----

_DENSE = ModelConfig(family="olmo", hidden=24, layers=2, heads=12, intermediate=36, vocab=50)
_SPARSE = {"family": "olmoe", "experts": 4, "experts_per_token": 2}
MODELS = {
    "dense": _DENSE,
    "tied": _DENSE.model_copy(update={"tie_embeddings": True}),
    "sparse": _DENSE.model_copy(update=_SPARSE),
}
TOKENS = torch.randint(50, (3, 24), generator=torch.Generator().manual_seed(0))


def keep_own(model: Transformer, layouts: Mapping[str, Layout], groups: Groups) -> None:
    """Replaces the parameters with this rank's parts; tied parameters stay tied."""
    parts = {
        parameter: nn.Parameter(parameter.detach()[layouts[name].region(groups.mesh, groups.rank)].clone())
        for name, parameter in model.named_parameters()
    }
    for module in model.modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, leaf, parts[parameter])


def trained(model: Transformer, tokens_BS: Tensor = TOKENS) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Returns the logits of sequences of an odd length, the loss and the gradients."""
    with torch.no_grad():
        logits_BSV = model(tokens_BS[:, :-3])
    loss = model.losses(tokens_BS).cross_entropy
    loss.backward()
    return logits_BSV, loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def model_on_a_grid(name: str, grid: tuple[int, int], sequence: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    groups = Groups(Mesh(tp=grid[0] * grid[1], tp_in=grid[1]))
    model = parallelize(Transformer(MODELS[name]), groups, StageOptions(sequence=sequence))
    initialize(model, 0, 0.2)
    layouts = parameter_layouts(model, sequence=sequence)
    keep_own(model, parameter_layouts(model, sequence=sequence), groups)
    logits_BSV, loss, gradients = trained(model)
    for key, gradient in gradients.items():
        groups.along(*layouts[key].partial_axes).all_reduce(gradient)
    return logits_BSV, loss, gradients


@pytest.mark.swept(together=2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("sequence", [False, True])
def test_a_model_is_the_one_of_one_device(name: str, grid: tuple[int, int], sequence: bool) -> None:
    model = Transformer(MODELS[name])
    initialize(model, 0, 0.2)
    logits_BSV, loss, gradients = trained(model)
    layouts = parameter_layouts(model, sequence=sequence)
    mesh = Mesh(tp=grid[0] * grid[1], tp_in=grid[1])
    for rank, found in enumerate(run_ranks(model_on_a_grid, mesh.size, name, grid, sequence)):
        assert error(found[0], logits_BSV) < 1e-5
        assert error(found[1], loss) < 1e-5
        assert found[2].keys() == gradients.keys()
        for key, gradient in found[2].items():
            assert error(gradient, gradients[key][layouts[key].region(mesh, rank)]) < 1e-5, (rank, key)


# ---- Layers of fewer ranks ----

DEGREES = TensorDegrees(((range(1), 1), (range(1, 2), 2)))
LAYERED = {
    "dense": _DENSE.model_copy(update={"layers": 3, "qk_norm": "whole"}),
    "sparse": _DENSE.model_copy(update={"layers": 3} | _SPARSE),
    "latent": _DENSE.model_copy(
        update={"family": "deepseek_v3", "layers": 3, "latent": Latent(keys=8, value=4, rotary=2, queries=12)}
    ),
}


def generated(model: Transformer, tokens_BS: Tensor) -> Tensor:
    """Returns the logits of all positions: of four at once, then of one after the other, with a cache."""
    cache = KVCache(len(model.blocks))
    with torch.no_grad():
        parts = [model(part_BS, cache) for part_BS in (tokens_BS[:, :4], *tokens_BS[:, 4:].split(1, 1))]
    return torch.cat(parts, 1)


def model_of_degrees(name: str, tokens_BS: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    mesh = Mesh(tp=4)
    more = [PlannedGroups(axis, mesh.groups((axis,))) for _, ranks in DEGREES.ranges for axis in runs_of_tensor(ranks)]
    groups = Groups(mesh, planned=[*groups_of_mesh(mesh), *more])
    model = parallelize(Transformer(LAYERED[name]), groups, StageOptions(sequence=True, degrees=DEGREES))
    initialize(model, 0, 0.2)
    layouts = parameter_layouts(model, sequence=True, degrees=DEGREES)
    keep_own(model, layouts, groups)
    answer_BSV = generated(model, tokens_BS[:, :9])
    logits_BSV, loss, gradients = trained(model, tokens_BS)
    for key, gradient in gradients.items():
        groups.along(*layouts[key].partial_axes).all_reduce(gradient)
    return answer_BSV, logits_BSV, loss, gradients


@pytest.mark.parametrize("sequences", [4, 3], ids=["shared", "repeated"])
@pytest.mark.parametrize("name", LAYERED)
def test_layers_of_fewer_ranks_are_those_of_one_device(name: str, sequences: int) -> None:
    """One layer has no tensor parallelism, one has runs of two ranks, one has all four; also in generation.

    If the ranks cannot share the sequences, all process all of them.
    """
    tokens_BS = torch.randint(50, (sequences, 24), generator=torch.Generator().manual_seed(1))
    model = Transformer(LAYERED[name])
    initialize(model, 0, 0.2)
    answer_BSV = generated(model, tokens_BS[:, :9])
    logits_BSV, loss, gradients = trained(model, tokens_BS)
    layouts, mesh = parameter_layouts(model, sequence=True, degrees=DEGREES), Mesh(tp=4)
    for rank, found in enumerate(run_ranks(model_of_degrees, 4, name, tokens_BS)):
        for ours, theirs in zip(found, (answer_BSV, logits_BSV, loss)):
            assert error(ours, theirs) < 1e-5
        assert found[3].keys() == gradients.keys()
        for key, gradient in found[3].items():
            assert error(gradient, gradients[key][layouts[key].region(mesh, rank)]) < 1e-5, (rank, key)
    out = [f"blocks.{layer}.attention.out.weight" for layer in range(3)]  # sharded by its inputs
    assert [gradients[name].shape[1] // found[3][name].shape[1] for name in out] == [1, 2, 4]


def test_one_rank_has_local_products() -> None:
    model = parallelize(Transformer(MODELS["dense"]), Groups(Mesh()), StageOptions(sequence=True))
    types = {"product": Product, "norms": Norms, "vocabulary": Vocabulary}
    for what, kind in types.items():
        found = {type(getattr(each, what)) for each in model.modules() if what in getattr(each, "replaceable", ())}
        assert found == {kind}


# ---- Another inner product ----


class Rounded(MatrixProduct):
    """A stand-in for a low precision: rounds operands to bf16 and counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = {"forward": 0, "input": 0, "weight": 0}

    def forward(self, x_TL: Tensor, w_NL: Tensor) -> Tensor:
        self.calls["forward"] += 1
        return super().forward(_rounded(x_TL), _rounded(w_NL))

    def input_gradient(self, y_grad_TN: Tensor, w_NL: Tensor) -> Tensor:
        self.calls["input"] += 1
        return super().input_gradient(_rounded(y_grad_TN), _rounded(w_NL))

    def weight_gradient(
        self, y_grad_TN: Tensor, x_TL: Tensor, w_NL: Tensor, buffer: GradientBuffer | None
    ) -> Tensor | None:
        self.calls["weight"] += 1
        return super().weight_gradient(_rounded(y_grad_TN), _rounded(x_TL), w_NL, buffer)


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def rounded_product(outputs: int, deferred: bool) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, int]]:
    """Returns (this rank's tensor, its part of one device's) by name, and the calls of `Rounded` on a grid of two."""
    groups = Groups(Mesh(tp=2, tp_in=2 // outputs))
    outer, inner = groups.along("tp_out"), groups.along("tp_in")
    x_TL, w_NL, y_grad_TN = normal(0, T, L).requires_grad_(), nn.Parameter(normal(1, N, L)), normal(2, T, N)
    y_TN = Product(Rounded())(x_TL, w_NL, None)
    y_TN.backward(y_grad_TN)
    rounded = Rounded()
    split = SplitProduct(rounded, inner, outer, gathers=False, scatters=False, overlap=True)
    x = columns(x_TL.detach(), inner).requires_grad_()
    w = nn.Parameter(columns(columns(w_NL.detach(), inner), outer, 0))
    buffer = TensorBuffer(torch.zeros_like(w), groups.step)
    y = split(x, w, buffer)
    if deferred:
        with groups.step.deferring() as later:
            y.backward(columns(y_grad_TN, outer))
        assert not buffer.grad.any()
        for add in later:
            add()
    else:
        y.backward(columns(y_grad_TN, outer))
    assert x.grad is not None
    assert x_TL.grad is not None
    assert w_NL.grad is not None
    found = {
        "y": (y.detach(), columns(y_TN.detach(), outer)),
        "x_grad": (x.grad, columns(x_TL.grad, inner)),
        "w_grad": (buffer.grad, columns(columns(w_NL.grad, inner), outer, 0)),
    }
    return found, rounded.calls


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("deferred", [False, True])
def test_any_inner_product_is_split(outputs: int, deferred: bool) -> None:
    """Every rank calls the inner product once for each of the three products, and gets the rounded numbers of one
    device."""
    exact = normal(0, T, L) @ normal(1, N, L).T
    for found, calls in run_ranks(rounded_product, 2, outputs, deferred):
        assert calls == {"forward": 1, "input": 1, "weight": 1}
        for name, (ours, theirs) in found.items():
            assert error(ours, theirs) < 1e-6, name
    rounded = Product(Rounded())(normal(0, T, L), nn.Parameter(normal(1, N, L)), None)
    assert error(rounded.detach(), exact) > 1e-4


def rounded_model(ranks: int, sequence: bool) -> tuple[Tensor, dict[str, int]]:
    """Returns the loss of a model on a grid whose projections all multiply by `Rounded`, and the calls."""
    groups, options, rounded = Groups(Mesh(tp=ranks)), StageOptions(sequence=sequence), Rounded()
    model = parallelize(Transformer(MODELS["dense"]), groups, options)
    product = products(groups, options, rounded)
    replace_all(model, {"product": lambda projection: product(*projection.dims)})
    initialize(model, 0, 0.2)
    keep_own(model, parameter_layouts(model, sequence=sequence), groups)
    return trained(model)[1], rounded.calls


@pytest.mark.parametrize("sequence", [False, True])
def test_a_model_of_another_inner_product(sequence: bool) -> None:
    """Four projections a layer multiply twice forward (for logits and losses) and once backward."""
    loss, calls = rounded_model(1, sequence)
    projections = 4 * MODELS["dense"].layers
    assert calls == {"forward": 2 * projections, "input": projections, "weight": projections}
    for found, its_calls in run_ranks(rounded_model, 2, 2, sequence):
        assert its_calls == calls
        assert error(found, loss) < 1e-3
