"""Frozen parameters take 2 bytes each in bf16, no traffic and no weight-gradient product; the others are trained."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from helpers.rules import ADAMW, state_spec
from helpers.state_groups import gather_units, groups_for, model_state
from helpers.sweep import in_turns
from optimus.config import ModelConfig
from optimus.config.tree import StateConfig
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.model import Transformer
from optimus.model.init import initialize
from optimus.optim.frozen import Frozen
from optimus.parallel.layouts import parameter_layouts
from optimus.state.gathering import ParameterPrefetcher
from optimus.state.model_state import ModelState
from optimus.state.plan import StateSpec, bytes_by_kind, shard_partitions, sharding_of
from optimus.testing import run_ranks
from optimus.testing.memory import allocated
from optimus.testing.traffic import counting

BF16, FP32 = torch.bfloat16, torch.float32
CONFIG = ModelConfig(
    family="olmoe", hidden=32, layers=3, heads=2, intermediate=32, vocab=64, experts=4, experts_per_token=2
)
TOKENS = torch.arange(24).view(2, 12)
LEVELS = ["none", "optimizer", "gradients", "parameters"]
FIRST = ("embedding.", "blocks.0.", "blocks.1.attention.")
EVERY_OTHER = ("blocks.0.", "blocks.1.moe.", "blocks.2.attention.", "head.")


def made(
    ranks: int,
    shard: str,
    frozen: tuple[str, ...],
    compute: torch.dtype = BF16,
    *,
    limit: int = 1 << 26,
    recompute: tuple[str, ...] = (),
    widths: dict[str, int] | None = None,
    **options: Any,
) -> tuple[Transformer, ModelState]:
    gathering = ParameterPrefetcher()
    with torch.device("meta"):
        module = Transformer(CONFIG)
    gather_units(module, gathering, recompute)
    layouts = parameter_layouts(module)
    rules = {name: Frozen() if name.startswith(frozen) else ADAMW for name in layouts}
    section = {"shard": shard, "chunk": limit, "gradient_dtype": str(compute).removeprefix("torch."), **options}
    config = StateConfig.model_validate(section | {"shard_ranks": widths})
    state = model_state(
        module,
        layouts,
        groups_for(Mesh.from_sizes(ranks), layouts, config),
        config,
        spec=StateSpec(compute, rules),
        device=torch.device("cpu"),
        gathering=gathering,
    )
    state.initialize(3, 0.02)
    return module, state


def rest_of(module: Transformer, frozen: tuple[str, ...]) -> nn.Module:
    """Returns a module with the trained parameters alone, under their names."""
    rest = nn.Module()
    for name, parameter in module.named_parameters():
        if not name.startswith(frozen):
            *path, leaf = name.split(".")
            owner = rest
            for each in path:
                if not hasattr(owner, each):
                    owner.add_module(each, nn.Module())
                owner = getattr(owner, each)
            owner.register_parameter(leaf, nn.Parameter(torch.empty(parameter.shape, device="meta")))
    return rest


def cost(ranks: int) -> list[tuple[dict[str, int], int, dict[str, int], dict[str, int]]]:
    """Returns, for each level: bytes at rest by kind, frozen elements, traffic of a step, and traffic without frozen
    parameters."""
    found = []
    for shard in LEVELS:
        module, state = made(ranks, shard, FIRST)
        state.begin_step()
        with counting() as traffic:
            module.losses(TOKENS).cross_entropy.backward()
        assert bool(traffic.calls) is (ranks > 1 and shard in ("gradients", "parameters"))
        state.reduce_gradients()
        rest = rest_of(module, FIRST)
        layouts = {name: layout for name, layout in parameter_layouts(module).items() if not name.startswith(FIRST)}
        options = {"spec": state_spec(BF16), "device": torch.device("cpu"), "gathering": ParameterPrefetcher()}
        alone = model_state(rest, layouts, state.groups, state.options, **options)
        frozen = [chunk for chunk in state.chunks if not chunk.plan.rule.trains]
        assert allocated(state.chunks) == bytes_by_kind([chunk.plan for chunk in state.chunks])
        size = sum(parameter.numel() for chunk in frozen for parameter in chunk.parameters)
        found.append((allocated(frozen), size, reduction_and_step(state), reduction_and_step(alone)))
    return found


def reduction_and_step(state: ModelState) -> dict[str, int]:
    """Returns the bytes of reduction and step by collective, given gradients."""
    state.begin_step()
    for chunk in state.trained:
        chunk.gradients.before_gradient()
    with counting() as traffic:
        state.reduce_gradients()
        state.step(1e-2, 1.0)
        state.finish()
    return dict(traffic.bytes)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_two_bytes_and_no_traffic(ranks: int) -> None:
    results = run_ranks(cost, ranks, ranks) if ranks > 1 else [cost(1)]
    for levels in results:
        for shard, (at_rest, size, traffic, without) in zip(LEVELS, levels, strict=True):
            parts = ranks if shard == "parameters" else 1
            own = -(-size // (32 * parts)) * 32  # padded to whole vectors
            assert at_rest == {"parameters": 2 * own, "gradients": 0, "master": 0, "moments": 0, "mask": 0}, shard
            assert traffic == without, shard


@pytest.mark.parametrize("frozen", [FIRST, EVERY_OTHER], ids=["first", "every other"])
def test_the_rest_is_trained_as_by_torch(frozen: tuple[str, ...]) -> None:
    module, state = made(1, "none", frozen, FP32)
    theirs = Transformer(CONFIG)
    initialize(theirs, 3, 0.02)
    for name, parameter in theirs.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    wanted = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for _ in range(3):
        state.begin_step()
        module.losses(TOKENS).cross_entropy.backward()
        norm = state.reduce_gradients()
        state.step(1e-2, 1.0)
        optimizer.zero_grad()
        theirs.losses(TOKENS).cross_entropy.backward()
        assert norm == pytest.approx(float(torch.stack([p.grad.norm() for p in wanted]).norm()), rel=1e-5)
        optimizer.step()
    for (name, ours), other in zip(module.named_parameters(), theirs.parameters()):
        torch.testing.assert_close(ours, other, rtol=0, atol=0 if name.startswith(frozen) else 2e-5)
        assert ours.requires_grad is other.requires_grad
        assert (ours.grad is None) is name.startswith(frozen)


def test_no_product_for_the_gradient_of_a_frozen_weight() -> None:
    flops = []
    for frozen in ((), ("blocks.", "head.")):
        module, _ = made(1, "none", frozen, FP32)
        with FlopCounterMode(display=False) as counter:
            module.losses(TOKENS).cross_entropy.backward()
        flops.append(counter.get_total_flops())
    assert 3 * flops[1] == 2 * flops[0]  # one of a weight's three products is left out, that of its gradient


def whole_at_once(
    ranks: int, frozen: tuple[str, ...], recompute: tuple[str, ...], reshard: bool
) -> tuple[list[int], int]:
    """Runs two steps of two microbatches: (the most chunks that were whole at a time in each step, uses)."""
    options = {"limit": 1, "recompute": recompute, "prefetch": 0, "reshard_after_forward": reshard}
    module, state = made(ranks, "parameters", frozen, **options)
    most, uses = [], 0
    use = state._gathering._use

    def counted(chunks: Any) -> None:
        nonlocal uses
        use(chunks)
        uses += 1
        most[-1] = max(most[-1], sum(chunk.unsharded.is_present for chunk in state.chunks))

    state._gathering._use = counted  # type: ignore[method-assign]
    for _ in range(2):
        most.append(0)
        state.begin_step()
        for tokens in TOKENS.split(1):
            module.losses(tokens).cross_entropy.backward()
        state.reduce_gradients()
        assert not any(chunk.unsharded.is_present for chunk in state.chunks if not chunk.plan.rule.trains)
        state.step(1e-2, 1.0)
        assert allocated(state.chunks) == bytes_by_kind([chunk.plan for chunk in state.chunks])
    return most, uses


@pytest.mark.parametrize("recompute", in_turns([["block"], [], ["norm", "attention", "moe"]], 2, always=1), ids=str)
def test_frozen_parameters_are_resharded_after_use(recompute: list[str]) -> None:
    """Freezing parameters never makes more chunks whole at a time."""
    (trained, _), _ = run_ranks(whole_at_once, 2, 2, (), tuple(recompute), True)
    for frozen in (FIRST, EVERY_OTHER):
        (most, _), _ = run_ranks(whole_at_once, 2, 2, frozen, tuple(recompute), True)
        assert max(most) <= max(trained)


def test_without_resharding_they_stay_until_the_step() -> None:
    run_ranks(whole_at_once, 2, 2, EVERY_OTHER, (), False)


def values(ranks: int, widths: dict[str, int] | None) -> dict[str, torch.Tensor]:
    module, state = made(ranks, "parameters", EVERY_OTHER, widths=widths, limit=2000)
    state.begin_step()
    module.losses(TOKENS).cross_entropy.backward()
    state.reduce_gradients()
    state.step(1e-2, 1.0)
    for chunk in state.chunks:
        chunk.unsharded.gather()
    return {name: p.detach().clone() for name, p in module.named_parameters() if name.startswith(EVERY_OTHER)}


@pytest.mark.parametrize("widths", [None, {"parameters": 2, "gradients": 4}], ids=str)
def test_values_stay_the_initial_ones_in_the_type_of_computation(widths: dict[str, int] | None) -> None:
    theirs = Transformer(CONFIG)
    initialize(theirs, 3, 0.02)
    expected = dict(theirs.named_parameters())
    for found in run_ranks(values, 4, 4, widths):
        for name, value in found.items():
            assert torch.equal(value, expected[name].to(BF16)), name


def test_who_thaws_a_parameter_by_hand_is_told() -> None:
    module, state = made(1, "none", FIRST)
    module.embedding.weight.requires_grad_(True)
    with pytest.raises(UserError, match=r"contradicts train\.freeze for embedding\.weight: name the parameters"):
        state.begin_step()


@pytest.mark.parametrize("over", ["replicas", "data"])
@pytest.mark.parametrize(
    "widths", [None, 2, {"parameters": 2, "gradients": 4}, {"parameters": 1, "gradients": 2}], ids=str
)
def test_they_are_sharded_over_groups_that_are_there_anyway(over: str, widths: Any) -> None:
    options = StateConfig.model_validate({"shard": "parameters", "shard_over": over, "shard_ranks": widths})
    mesh = Mesh.from_sizes(16, expert=2)
    for replicas in (("dp", "cp"), ("edp",)):
        *steps, _ = shard_partitions(mesh, replicas, sharding_of(Frozen(), options))
        assert len(steps) == (widths != {"parameters": 1, "gradients": 2})
        assert all(step in shard_partitions(mesh, replicas, options)[:-1] for step in steps)
