"""Recomputation saves fewer bytes for the backward pass, changes no bit of the gradients and repeats no collective."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from helpers.sweep import in_turns
from optimus.comm import Groups
from optimus.config import ModelConfig
from optimus.mesh import Mesh
from optimus.model import Transformer
from optimus.model.init import initialize
from optimus.model.moe.layer import Experts
from optimus.parallel.options import StageOptions
from optimus.parallel.parallelize import parallelize
from optimus.parallel.recompute import Recomputation, Recompute
from optimus.step_context import StepContext
from optimus.testing import run_ranks
from optimus.testing.traffic import counting

DENSE = ModelConfig(family="olmo", hidden=32, layers=2, heads=2, intermediate=64, vocab=50)
EXPERTS = ModelConfig(
    family="olmoe", hidden=32, layers=2, heads=2, intermediate=24, vocab=50, experts=4, experts_per_token=2
)
TOKENS = torch.randint(50, (2, 64), generator=torch.Generator().manual_seed(0))


def recomputing(config: ModelConfig, chosen: Recomputation) -> Transformer:
    model = Transformer(config)
    Recompute(chosen, StepContext()).arrange([model.blocks], [])
    return model


def measured(config: ModelConfig, chosen: Recomputation, precision: torch.dtype) -> tuple[list[torch.Tensor], int]:
    """Returns the losses with all gradients, and the bytes saved for the backward pass besides the parameters."""
    model = recomputing(config, chosen)
    initialize(model, 0, 0.2)
    model = model.to(precision)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        losses = model.losses(TOKENS)
        bytes_kept = sum(kept.values())
    (losses.cross_entropy + 0.01 * losses.balance + 0.001 * losses.z).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return [losses.cross_entropy, losses.balance, losses.z, *gradients], bytes_kept


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (DENSE, ["norm"]),
        (DENSE, ["attention"]),
        (DENSE, ["mlp"]),
        (DENSE, ["norm", "attention", "mlp"]),
        (DENSE, ["block"]),
        (EXPERTS, ["norm"]),
        (EXPERTS, ["attention"]),
        (EXPERTS, ["moe"]),
        (EXPERTS, ["norm", "attention", "moe"]),
        (EXPERTS, ["block"]),
    ],
)
def test_same_gradients_from_fewer_bytes(config: ModelConfig, kinds: list[str], precision: torch.dtype) -> None:
    expected, everything = measured(config, Recomputation(), precision)
    found, kept = measured(config, Recomputation(tuple(kinds)), precision)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    assert kept < everything


@pytest.mark.parametrize(("config", "feed_forward"), [(DENSE, "mlp"), (EXPERTS, "moe")])
def test_more_kinds_keep_less(config: ModelConfig, feed_forward: str) -> None:
    sets = (), (feed_forward,), (feed_forward, "attention")
    kept = [measured(config, Recomputation(kinds), torch.float32)[1] for kinds in sets]
    assert kept[0] > kept[1] > kept[2]


@pytest.mark.parametrize("config", [DENSE, EXPERTS])
@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("whole", [False, True])
def test_every_nth_block(config: ModelConfig, every: int, whole: bool) -> None:
    """Modules of fewer blocks are recomputed, so more bytes are saved; whole blocks save fewer inputs."""
    config = config.model_copy(update={"layers": 6})
    kinds = ("block",) if whole else ("norm", "attention", "mlp" if config.experts is None else "moe")
    expected, everything = measured(config, Recomputation(), torch.float32)
    (found, kept), (_, at_one) = (measured(config, Recomputation(kinds, n), torch.float32) for n in (every, 1))
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    assert kept < at_one if whole else at_one < kept < everything


@pytest.mark.parametrize("config", [DENSE, EXPERTS])
@pytest.mark.parametrize("whole", [False, True])
def test_ranges_of_layers(config: ModelConfig, whole: bool) -> None:
    """Each layer of a range saves the same bytes less, no matter which layers these are.

    Layers share tables and small tensors, so a range's bytes differ from the sum of its layers' by less than 3 % of one
    layer; a layer more or less would be 100 %.
    """
    config = config.model_copy(update={"layers": 6})
    kinds = ("block",) if whole else ("norm", "attention", "mlp" if config.experts is None else "moe")
    expected, everything = measured(config, Recomputation(), torch.float32)

    def less(chosen: Recomputation) -> int:
        found, kept = measured(config, chosen, torch.float32)
        assert all(torch.equal(a, b) for a, b in zip(found, expected))
        return everything - kept

    one, two = (less(Recomputation(ranges=((range(1, stop), kinds),))) for stop in (2, 3))
    near = 0.03 * one
    assert one > 0
    assert two == pytest.approx(2 * one, abs=near)
    apart = less(Recomputation(ranges=((range(1, 2), kinds), (range(3, 5), kinds))))
    assert apart == pytest.approx(3 * one, abs=near)
    without_two = less(Recomputation(kinds, ranges=((range(2, 4), ()),)))
    assert without_two == pytest.approx(less(Recomputation(kinds)) - 2 * one, abs=near)
    assert less(Recomputation(("attention",), 2, ((range(6), kinds),))) == less(Recomputation(kinds))


def test_segments_of_a_stage() -> None:
    """Every n-th block counts anew in each stage, and where the recomputation changes."""
    chosen = Recomputation(("attention",), 2, ((range(3, 5), ("block",)), (range(8, 9), ())))
    assert [*chosen.segments(range(1, 9))] == [
        ((1,), ()),
        ((2,), ("attention",)),
        ((3,), ("block",)),
        ((4,), ("block",)),
        ((5,), ()),
        ((6,), ("attention",)),
        ((7,), ()),
        ((8,), ()),
    ]
    whole = Recomputation(("block",), 3, ((range(4, 5), ()),))
    assert [layers for layers, _ in whole.segments(range(7))] == [(0, 1, 2), (3,), (4,), (5, 6)]


def test_a_norm_and_what_it_feeds_are_one() -> None:
    """The output of a norm is not saved for the module it feeds: two inputs a block are saved instead of four."""
    apart = measured(DENSE, Recomputation(("attention", "mlp")), torch.float32)[1]
    together = measured(DENSE, Recomputation(("norm", "attention", "mlp")), torch.float32)[1]
    assert apart - together >= DENSE.layers * 2 * TOKENS.numel() * DENSE.hidden * 4


@pytest.mark.parametrize("kinds", [["moe"], ["block"]])
def test_router_statistics_are_counted_once(kinds: list[str]) -> None:
    model = recomputing(EXPERTS, Recomputation(tuple(kinds)))
    initialize(model, 0, 0.2)
    losses = model.losses(TOKENS)
    assert losses.router is not None
    losses.balance.backward()
    choices = EXPERTS.layers * TOKENS.numel() * 2
    assert losses.router.tokens == EXPERTS.layers * TOKENS.numel()
    assert losses.router.counts_E.sum() == choices
    assert losses.router.probabilities_E.sum().item() == pytest.approx(choices / 2, rel=1e-5)


@pytest.mark.parametrize("kinds", [["block"], ["norm", "attention", "moe"]])
def test_nothing_draws_random_numbers(kinds: list[str]) -> None:
    """No module draws random numbers, so recomputation needs no state of a generator."""
    model = recomputing(EXPERTS, Recomputation(tuple(kinds)))
    initialize(model, 0, 0.2)
    before = torch.get_rng_state()
    model.losses(TOKENS).cross_entropy.backward()
    assert torch.get_rng_state().equal(before)


# ---- Communication-aware: results of collectives are cached ----

SPREAD = EXPERTS.model_copy(update={"experts": 8})
Measured = tuple[list[torch.Tensor], int, int]


def traffic(kind: str, ranks: int, kinds: list[str], keep: bool, early: bool) -> Measured:
    """Runs two microbatches at once: (their losses and gradients, calls of all collectives, bytes of all collectives)."""
    groups = Groups(Mesh(dp=ranks, ep=ranks))
    chosen = Recomputation(tuple(kinds))
    options = StageOptions(dispatch=kind, recomputation=chosen, keep_collectives=keep)  # type: ignore[arg-type]
    model = parallelize(Transformer(SPREAD), groups, options)
    initialize(model, 0, 0.2)
    for module in model.modules():
        if isinstance(module, Experts):
            for name in ("gate_up", "down"):
                whole = module.get_parameter(name).detach()
                setattr(module, name, nn.Parameter(whole.chunk(ranks)[groups.rank].clone()))
    tokens = torch.randint(50, (2, 4, 16), generator=torch.Generator().manual_seed(groups.rank))
    with set_checkpoint_early_stop(early), counting() as counted:
        losses = [model.losses(microbatch) for microbatch in tokens]
        for one in reversed(losses):
            (one.cross_entropy + one.balance + one.z).backward()
    values = [value.detach() for one in losses for value in (one.cross_entropy, one.balance, one.z)]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return values + gradients, counted.calls.total(), counted.bytes.total()


def all_traffic(kind: str, ranks: int) -> dict[str, Measured]:
    kinds = ["norm", "attention", "moe"]
    return {
        "none": traffic(kind, ranks, [], True, True),
        "keep": traffic(kind, ranks, kinds, True, True),
        "keep all": traffic(kind, ranks, kinds, True, False),
        "keep blocks": traffic(kind, ranks, ["block"], True, False),
        "repeat": traffic(kind, ranks, kinds, False, True),
        "repeat all": traffic(kind, ranks, kinds, False, False),
    }


@pytest.mark.parametrize(
    ("kind", "ranks"), in_turns([("alltoall", 2), ("alltoall", 4), ("allgather", 2), ("allgather", 4)], 3, always=1)
)
def test_kept_results_save_the_collectives_of_recomputation(kind: str, ranks: int) -> None:
    """The cache saves a third of the bytes if the whole forward pass is recomputed (TED, section 7.3).

    By default recomputation stops once all saved tensors exist, before the results travel back.
    """
    for found in run_ranks(all_traffic, ranks, kind, ranks):
        values, calls, moved = found["none"]
        for name, (others, _, _) in found.items():
            assert all(torch.equal(a, b) for a, b in zip(others, values, strict=True)), name
        for name in ("keep", "keep all", "keep blocks"):
            assert found[name][1:] == (calls, moved)
        assert moved < found["repeat"][2] < found["repeat all"][2]
        assert moved / found["repeat all"][2] == pytest.approx(2 / 3, abs=0.03)
