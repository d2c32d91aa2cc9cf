"""A module with parameters in chunks: views, gradients, norm and initial weights."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from helpers.rules import state_spec
from helpers.state_groups import model_state
from helpers.whole import whole_state
from optimus.comm import Groups
from optimus.config import ModelConfig
from optimus.config.tree import StateConfig
from optimus.errors import UserError
from optimus.mesh import Layout, Mesh
from optimus.model import Transformer
from optimus.model.init import initialize
from optimus.parallel.layouts import parameter_layouts
from optimus.state.model_state import ModelState
from optimus.testing.memory import allocated

BF16, FP32 = torch.bfloat16, torch.float32
NAMES: dict[torch.dtype, Any] = {BF16: "bfloat16", FP32: "float32"}
CONFIG = ModelConfig(
    family="olmoe", hidden=16, layers=2, heads=2, intermediate=24, vocab=50, experts=4, experts_per_token=2
)
TOKENS = torch.arange(40).remainder(50).view(4, 10)


def made(
    compute: torch.dtype = BF16,
    gradient: torch.dtype = FP32,
    seed: int = 3,
    config: ModelConfig = CONFIG,
    limit: int | None = None,
) -> tuple[Transformer, ModelState]:
    with torch.device("meta"):
        module = Transformer(config)
    state = model_state(
        module,
        parameter_layouts(module),
        Groups(Mesh()),
        StateConfig(tile=100, chunk=limit, gradient_dtype=NAMES[gradient]),
        spec=state_spec(compute),
        device=torch.device("cpu"),
    )
    state.initialize(seed, 0.02)
    return module, state


def plain(seed: int = 3, config: ModelConfig = CONFIG) -> Transformer:
    module = Transformer(config)
    initialize(module, seed, 0.02)
    return module


@pytest.mark.parametrize("limit", [1, 1000, 1 << 26])
@pytest.mark.parametrize("compute", [BF16, FP32])
def test_initial_weights_are_those_of_a_plain_module(compute: torch.dtype, limit: int) -> None:
    module, state = made(compute, limit=limit)
    expected = dict(plain().named_parameters())
    assert [name for name, _ in module.named_parameters()] == list(expected)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, expected[name].to(compute)), name
    tensors = whole_state(state)
    for name, weight in expected.items():
        assert torch.equal(tensors[f"model.{name}"], weight), name  # the master weights, not rounded
    assert set(tensors) == {f"{kind}.{name}" for kind in ("model", "adamw.m", "adamw.v") for name in expected}


def test_parameters_are_views_of_the_chunk() -> None:
    module, state = made()
    (chunk,) = state.chunks
    before = module(TOKENS)
    chunk.parameter.mul_(3)
    assert not torch.equal(module(TOKENS), before)
    chunk.parameter.fill_(0.25)
    assert all((parameter == 0.25).all() for parameter in module.parameters())
    with torch.no_grad():
        module.embedding.weight.fill_(7.0)
    slot = next(slot for slot in chunk.plan.slots if slot.name == "embedding.weight")
    assert (chunk.parameter[slot.start : slot.end] == 7.0).all()


@pytest.mark.parametrize("gradient", [BF16, FP32])
@pytest.mark.parametrize("compute", [BF16, FP32])
def test_gradients_accumulate_in_the_chunk(compute: torch.dtype, gradient: torch.dtype) -> None:
    """Backward passes add to the chunk's buffer in the gradient's type, and never replace the buffer."""
    module, state = made(compute, gradient)
    (chunk,) = state.chunks
    expected = {name: torch.zeros(p.shape, dtype=gradient) for name, p in module.named_parameters()}
    for tokens in TOKENS.split(1):
        other = plain().to(compute)
        other.losses(tokens).cross_entropy.backward()
        for name, parameter in other.named_parameters():
            assert parameter.grad is not None
            expected[name] += parameter.grad.to(gradient)
        module.losses(tokens).cross_entropy.backward()
    begin = chunk.gradients.gradient.untyped_storage().data_ptr()
    views = chunk.views(chunk.gradients.gradient)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == gradient
        assert parameter.grad.untyped_storage().data_ptr() == begin
        # Addends are rounded to the compute type; their last bits depend on the order of a product's sums.
        tolerance = 2e-2 if BF16 in (compute, gradient) else 1e-5
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(views[name], expected[name], rtol=0, atol=tolerance * scale)
        assert scale > 0
    state.begin_step()
    assert all(not parameter.grad.any() for parameter in module.parameters() if parameter.grad is not None)


def test_fp32_gradients_of_bf16_parameters_keep_small_addends() -> None:
    """The sum 1 + 256 * 2^-9 is 1.5 in fp32; bf16 rounds every addend away."""
    sums = {}
    for gradient in (FP32, BF16):
        module = nn.Linear(1, 1, bias=False)
        state = model_state(
            module,
            {"weight": Layout((1, 1))},
            Groups(Mesh()),
            StateConfig(gradient_dtype=NAMES[gradient]),
            spec=state_spec(BF16),
            device=torch.device("cpu"),
        )
        state.chunks[0].gradients.gradient[0] = 1.0
        for _ in range(256):
            module(torch.full((1, 1), 2.0**-9, dtype=BF16)).sum().backward()
        sums[gradient] = float(state.chunks[0].gradients.gradient[0])
    assert sums == {FP32: 1.5, BF16: 1.0}


@pytest.mark.parametrize("gradient", [BF16, FP32])
def test_gradient_norm(gradient: torch.dtype) -> None:
    module, state = made(BF16, gradient, limit=700)
    assert len(state.chunks) > 2
    module.losses(TOKENS).cross_entropy.backward()
    squares = [p.grad.double().square().sum() for p in module.parameters() if p.grad is not None]
    assert state.reduce_gradients() == pytest.approx(float(torch.stack(squares).sum().sqrt()), rel=1e-5)
    state.chunks[-1].gradients.gradient[0] = math.nan
    assert math.isnan(state.reduce_gradients())


def test_the_step_reaches_every_chunk_and_counts() -> None:
    """Chunks and tiles of any size give the weights of torch's AdamW on a plain module."""
    module, state = made(FP32)
    parted, parted_state = made(FP32, limit=700)
    theirs = plain()
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for _ in range(3):
        for model, its_state in ((module, state), (parted, parted_state)):
            its_state.begin_step()
            model.losses(TOKENS).cross_entropy.backward()
            its_state.reduce_gradients()
            its_state.step(1e-2, 1.0)
        optimizer.zero_grad()
        theirs.losses(TOKENS).cross_entropy.backward()
        optimizer.step()
    assert state.steps == 3
    for ours, same, other in zip(module.parameters(), parted.parameters(), theirs.parameters()):
        assert torch.equal(ours, same)
        torch.testing.assert_close(ours, other, rtol=0, atol=2e-5)


def test_bytes_by_kind_sum_over_the_chunks() -> None:
    said = CONFIG.model_dump(exclude_unset=True) | {"hidden": 32, "intermediate": 32, "vocab": 64}
    # All sizes are multiples of the alignment.
    config = ModelConfig.model_validate(said)
    module, state = made(BF16, FP32, config=config, limit=1)
    p = sum(parameter.numel() for parameter in module.parameters())
    assert len(state.chunks) == len(list(module.parameters()))
    assert allocated(state.chunks) == {
        "parameters": 2 * p,
        "gradients": 4 * p,
        "moments": 8 * p,
        "master": 4 * p,
        "mask": 0,
    }


def test_state_that_nobody_holds_is_freed() -> None:
    """Freed state frees its process groups, of which the backend would keep threads and connections."""
    import gc
    import weakref

    module = nn.Linear(3, 2)
    layouts = {name: Layout(tuple(parameter.shape)) for name, parameter in module.named_parameters()}
    state = model_state(
        module,
        layouts,
        Groups(Mesh()),
        StateConfig(),
        spec=state_spec(),
        device=torch.device("cpu"),
    )
    state.begin_step()
    module(torch.ones(1, 3)).sum().backward()
    left = [weakref.ref(state), *(weakref.ref(chunk) for chunk in state.chunks)]
    del state, module
    gc.collect()
    assert [each() for each in left] == [None] * len(left)


def test_a_frozen_parameter_is_refused() -> None:
    """Freezing a parameter by hand is refused before a step and when the state is made: updates would still move it."""
    module, state = made()
    module.head.weight.requires_grad_(False)
    with pytest.raises(
        UserError, match=r"requires_grad contradicts train\.freeze for head\.weight: name the parameters"
    ):
        state.begin_step()
    module.head.weight.requires_grad_(True)
    state.begin_step()
    frozen = Transformer(CONFIG).requires_grad_(False)
    options = {"spec": state_spec(BF16), "device": torch.device("cpu")}
    with pytest.raises(UserError, match=r"for embedding\.weight, .* and \d+ more"):
        model_state(frozen, parameter_layouts(frozen), Groups(Mesh()), StateConfig(), **options)
