"""Pruned chunks compute the bits of dense chunks with masks, in both forms of their buffers."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.drawing import config_of
from helpers.equality import Trained
from helpers.masked import random_masks
from helpers.sweep import in_turns
from helpers.whole import whole_state
from optimus.config import load_config
from optimus.resolve.parameters import full_model, layouts_of
from optimus.state.masks import Mask, MaskForm, MaskPlan, packed_bits, unpacked_bits
from optimus.state.model_state import ModelState
from optimus.state.plan import ParameterSlot
from optimus.state.pruning import magnitudes, prune, weights_of
from optimus.state.reduction import GradientReduction
from optimus.testing import run_ranks
from optimus.testing.memory import allocated, tracking
from optimus.testing.steps import Steps, random_batch
from optimus.testing.traffic import counting
from optimus.training.step import training_step

IN_BF16 = ["train.precision=bfloat16"]
PRUNED = ["pruning.sparsity=0.9", "pruning.at=0", "state.chunk=500"]

# ---- The two forms ----


@pytest.mark.parametrize("form", ["int32", "bits"])
@pytest.mark.parametrize("tile", [7, 1 << 12, None])
@pytest.mark.parametrize("left", [0.0, 1.0, 0.1, "one"])
def test_compress_and_expand(form: MaskForm, tile: int | None, left: float | str) -> None:
    size = 3 * 4096 + 640  # the last block is not full
    mask = torch.rand(size, generator=torch.Generator().manual_seed(0)) < (0.0 if left == "one" else left)
    if left == "one":
        mask[5000] = True
    else:
        mask[4096:8192] = left == 1.0  # a block that is pruned completely or not at all
    positions = mask.nonzero().flatten()
    plan = MaskPlan(size, len(positions), form)
    made = Mask(plan, positions, torch.zeros(plan.elements, dtype=torch.int32), tile)
    length = -(-len(positions) // 32) * 32
    values = torch.randn(size)
    dense = values.clone()
    compressed = made.compress(dense, length)
    assert torch.equal(compressed[: len(positions)], values[mask])
    assert not compressed[len(positions) :].any()
    assert torch.equal(made.compressed(values, slice(3, 40)), torch.cat([values[mask], torch.zeros(40)])[3:40])
    dense[length:] = torch.where(mask, 7.0, 0.0)[length:]  # pruned elements stay zero
    made.expand(dense, length, fresh=False)
    assert torch.equal(dense, values * mask)
    made.compress(dense, length)
    dense[length:] = torch.nan
    made.expand(dense, length, fresh=True)
    assert torch.equal(dense, values * mask)
    for start in (0, 5, len(positions)):
        end = min(len(positions), start + 9000)
        assert torch.equal(made.positions(start, end).long(), positions[start:end])
    for start, end in ((0, size), (37, 5003)):
        assert torch.equal(made.unpruned(start, end), mask[start:end])
    borders = made.borders([0, length // 2, length])
    assert borders[0] == 0
    assert borders[-1] == size
    part = torch.zeros(length - length // 2)
    part[: max(0, len(positions) - length // 2)] = values[mask][length // 2 :]
    assert torch.equal(made.expanded(part, length // 2, slice(borders[1], size)), (values * mask)[borders[1] :])


def test_bits_of_rows() -> None:
    mask = torch.rand(3, 13) < 0.5
    assert torch.equal(unpacked_bits(packed_bits(mask), 13), mask)


# ---- Equality with dense state and masks ----


def one_of_each_kind(slot: ParameterSlot, weights: Tensor) -> Tensor:
    """Returns scores that prune some parameters completely, some not at all, and one down to a single element."""
    scores = torch.zeros(weights.shape)
    if "q_" in slot.name or "qkv" in slot.name or "stack" in slot.name:
        return scores + 2.0
    if "out" in slot.name and slot.start == 0:
        scores.view(-1)[3] = 2.0
    return scores


def trained(config: dict[str, Any], steps: int, dense: bool, score: str) -> Trained:
    """Trains a pruned model; `dense` applies the masks to the state of a model that is not pruned."""
    made = Steps(config)
    made.train()
    layouts = layouts_of(full_model(made.config), made.config)
    sizes = {name: math.prod(layouts[name].shape) for name in made.state.spec.unpruned}
    masks = prune(weights_of(made.state), 0.1, sizes, magnitudes if score == "magnitude" else one_of_each_kind)
    if score == "some":  # some parameters are pruned completely, some not at all
        masks = {
            name: bits if number % 3 else torch.full_like(bits, 255 * (number % 2))
            for number, (name, bits) in enumerate(masks.items())
        }
    if dense:
        _mask_dense(made.state, masks)
    else:
        made.state.prune(masks)
    results = [made.train() for _ in range(steps)]
    made.state.finish()
    here = all(chunk.plan.keeps_unsharded for chunk in made.state.chunks)
    parameters = made.state._module.named_parameters() if here else ()
    computed = {name: each.detach().clone() for name, each in parameters}
    whole = whole_state(made.state, everywhere=False)
    return Trained(results, {**whole, **{f"computed.{name}": each for name, each in computed.items()}})


def _mask_dense(state: ModelState, masks: dict[str, Tensor]) -> None:
    for chunk in state.trained:
        mask = torch.ones(chunk.plan.size)
        for slot in chunk.plan.slots:
            if slot.name in masks:
                mask[slot.start : slot.end] = unpacked_bits(masks[slot.name], slot.shape.numel())
        mask = mask[chunk.plan.shard]
        with chunk.states(change=True) as parts:
            for part in parts.values():
                part.mul_(mask)
        chunk.refresh_compute_copy()
        state.options = state.options.model_copy(update={"overlap": False})  # updates after `reduce`, not on arrival
        chunk.gradients.reduce = partial(_reduce_and_mask, chunk.gradients, mask)  # type: ignore[method-assign]


def _reduce_and_mask(gradients: GradientReduction, mask: Tensor) -> None:
    GradientReduction.reduce(gradients)
    gradients.reduced.mul_(mask)


# Several microbatches may round differently if dense gradients accumulate in place.
@pytest.mark.swept("model")
@pytest.mark.parametrize(
    ("model", "ranks", "overrides", "score"),
    [
        ("dense", 1, [], "magnitude"),
        ("dense", 1, ["pruning.indices=bits", *IN_BF16], "some"),
        ("moe", 1, ["train.micro_batch=8", "state.tile=32", *IN_BF16], "some"),
        ("dense", 2, ["state.shard=optimizer"], "magnitude"),
        ("moe", 2, ["state.shard=gradients", "parallel.expert=2"], "some"),
        ("tied dense", 2, ["state.shard=parameters", *IN_BF16], "some"),
        ("dense", 2, ["state.shard=parameters", "state.reshard_after_forward=false", "state.tile=64"], "magnitude"),
        (
            "tied",
            2,
            ["parallel.pipeline=2", "parallel.schedule=zb-h1", "pruning.targets=[matrix,expert,embedding]"],
            "some",
        ),
        ("moe", 2, ["parallel.tensor=2", "train.micro_batch=8"], "magnitude"),
        ("dense", 1, ["optimizer.name=schedule-free"], "magnitude"),
        ("moe", 4, ["state.shard=parameters", "state.shard_ranks={parameters: 2}", "parallel.expert=2"], "magnitude"),
        (
            "dense",
            4,
            ["parallel.tensor=2", "train.micro_batch=4", "state.shard=optimizer", "state.offload=optimizer"],
            "some",
        ),
    ],
)
def test_the_bits_of_masks_on_dense_state(model: str, ranks: int, overrides: list[str], score: str) -> None:
    tree = load_config(config_of(model), [*PRUNED, "train.steps=40", "train.global_batch=8", *overrides]).model_dump(
        exclude_unset=True
    )
    for a, b in zip(*(run_ranks(trained, ranks, tree, 20, dense, score) for dense in (False, True))):
        for number, (x, y) in enumerate(zip(a.steps, b.steps), start=1):
            assert x == y, number
        for key, tensor in b.tensors.items():
            assert torch.equal(a.tensors[key], tensor), key


# ---- Bytes ----


def pruned_steps(*overrides: str, model: str = "dense", share: float = 0.1) -> Steps:
    made = Steps(load_config(config_of(model), [*PRUNED, *overrides]).model_dump(exclude_unset=True))
    layouts = layouts_of(full_model(made.config), made.config)
    sizes = {name: math.prod(layouts[name].shape) for name in made.state.spec.unpruned}
    made.state.prune(prune(weights_of(made.state), share, sizes, magnitudes))
    return made


@pytest.mark.parametrize("form", ["int32", "bits"])
def test_bytes_at_rest(form: str) -> None:
    """The chunks allocate 2 P + f (g + 12 + i) P bytes, and at most the padding to whole vectors."""
    steps = pruned_steps(*IN_BF16, f"pruning.indices={form}", "state.chunk=20000")
    chunks = [chunk for chunk in steps.state.trained if chunk.elements.prunes]
    assert chunks
    for chunk in chunks:
        assert chunk.plan.mask is not None
        whole, left = chunk.plan.mask.size, chunk.plan.mask.unpruned
        index = 4 * left if form == "int32" else whole / 8 + 4 * math.ceil(whole / 4096)
        expected = 2 * whole + (4 + 12) * left + index
        found = sum(chunk.plan.bytes_by_kind().values())
        assert expected <= found <= expected + 16 * 31 + 4
        assert sum(allocated([chunk]).values()) == found
        assert not chunk.gradients.gradient.untyped_storage().nbytes()


def sent(shard: str, pruned: bool) -> tuple[int, list[tuple[int, int]]]:
    """Returns the bytes that this rank sends in a step, and (elements, unpruned elements) of each pruned chunk."""
    overrides = [f"state.shard={shard}", "train.micro_batch=8", *IN_BF16]
    made = pruned_steps(*overrides)
    sizes = [(chunk.plan.size, chunk.plan.borders[-1]) for chunk in made.state.trained if chunk.elements.prunes]
    if not pruned:
        made = Steps(load_config(config_of("dense"), [*PRUNED, *overrides]).model_dump(exclude_unset=True))
    made.train()
    made.state.finish()
    with counting() as traffic:
        made.train()
        made.state.finish()
    # Each of two ranks sends as many bytes as an all-reduced tensor has.
    return sum(traffic.sent_to.values()) + traffic.bytes["all_reduce"], sizes


@pytest.mark.parametrize(
    ("shard", "each"), in_turns([("none", 4 + 4), ("optimizer", 4 + 2), ("parameters", 4 + 2 + 2)], 3)
)
def test_bytes_sent(shard: str, each: int) -> None:
    """Each of two ranks sends half of the reduced and gathered elements, which are the unpruned ones."""
    dense, _ = run_ranks(sent, 2, shard, False)[0]
    pruned, sizes = run_ranks(sent, 2, shard, True)[0]
    assert dense - pruned == sum(whole - compressed for whole, compressed in sizes) * each / 2
    assert all(compressed < 0.2 * whole for whole, compressed in sizes if whole > 1000)


def test_peak_of_a_step_above_rest() -> None:
    """The peak of a step has dense gradient buffers of three chunks, and the workspace of a tile."""
    tile = 64
    steps = pruned_steps("state.chunk=300", f"state.tile={tile}")
    pruned = [chunk for chunk in steps.state.trained if chunk.elements.prunes]
    assert len(pruned) > 4
    steps.train()
    steps.state.begin_step()
    steps.state.reduce_on_arrival(0)
    with tracking() as seen:
        for chunk in reversed(pruned):
            for buffer in chunk.gradient_buffers.values():
                buffer.open().fill_(1e-3)
                buffer.close()
        steps.state.reduce_gradients()
        steps.state.step(1e-3, 1.0)
        steps.state.finish()
    *_, third, second, longest = sorted(4 * chunk.plan.size for chunk in pruned)
    assert longest < seen.peak <= third + second + longest + 32 * tile < sum(4 * chunk.plan.size for chunk in pruned)
    assert seen.current == 0


def test_a_step_changes_what_is_computed_with() -> None:
    """A step changes unpruned weights in the compute type, and keeps pruned ones at exactly zero.

    The public implementation does neither.
    """
    steps = pruned_steps(*IN_BF16)
    steps.train()
    before = {name: each.detach().clone() for name, each in steps.state._module.named_parameters()}
    for _ in range(20):
        steps.train()
    steps.state.finish()
    for name, mask in steps.state.masks.items():
        now, left = steps.state._module.get_parameter(name), unpacked_bits(mask, before[name].numel())
        assert not now.flatten()[~left].any()
        moved = (now != before[name]).flatten()[left]
        assert moved.float().mean() > 0.5 or not left.any()


def test_a_skipped_step_and_an_evaluation() -> None:
    found = []
    for between in (False, True):
        steps = pruned_steps("state.offload=all", "state.cache=8", *IN_BF16)
        steps.train()
        if between:
            skipped = training_step(
                steps.model, steps.state, random_batch(steps.config, 7), steps.config, 2, loss_limit=0.0
            )
            assert skipped.skipped
            with steps.state.evaluating():
                steps.state.finish()
        found.append([steps.train(), whole_state(steps.state)])
    (a, states), (b, expected) = found
    assert a == b
    assert all(torch.equal(states[key], tensor) for key, tensor in expected.items())


def elsewhere(residency: str, folder: Path) -> list[str]:
    """Returns the options that keep state in this place."""
    more = {"optimizer": [], "all": ["state.cache=8"], "disk": ["state.cache=8", f"state.disk={folder}"]}
    return [f"state.offload={residency}", *more[residency]]


@pytest.mark.parametrize(
    ("residency", "more"),
    [*((each, []) for each in ("optimizer", "all", "disk")), ("all", ["state.accumulate_on=host"])],
)
def test_residencies(residency: str, more: list[str], tmp_path: Path) -> None:
    """Compressed state on the host or on a disk gives the bits of the device."""
    found = []
    for overrides in ([], [*elsewhere(residency, tmp_path), *more]):
        steps = pruned_steps(*IN_BF16, *overrides)
        found.append([[steps.train() for _ in range(4)], whole_state(steps.state)])
        if overrides and residency != "disk":
            for chunk in steps.state.trained:
                if chunk.elements.prunes:
                    host = sum(chunk.plan.bytes_by_kind("host").values())
                    assert host == {"optimizer": 12, "all": 18}[residency] * chunk.plan.borders[-1]
    (a, states), (b, expected) = found[1], found[0]
    assert a == b
    assert all(torch.equal(states[key], tensor) for key, tensor in expected.items())


OF_RULES = {
    "fp32": [],
    "lion": ["optimizer.name=lion"],  # one state besides the weights
    "bf16 gradients": ["state.gradient_dtype=bfloat16"],
    "schedule-free": ["optimizer.name=schedule-free"],
    "bf16": [*IN_BF16, "state.gradient_dtype=bfloat16"],
}


@pytest.mark.swept("residency")
@pytest.mark.parametrize("rule", OF_RULES)
@pytest.mark.parametrize("residency", ["optimizer", "all", "disk"])
def test_pruned_between_steps(residency: str, rule: str, tmp_path: Path) -> None:
    """Pruning once more, after almost nothing was pruned, keeps as much memory as before or more."""
    found = []
    for overrides in ([], elsewhere(residency, tmp_path)):
        steps = Steps(
            load_config(config_of("dense"), [*PRUNED, *OF_RULES[rule], *overrides]).model_dump(exclude_unset=True)
        )
        seen = [steps.train(), steps.train()]
        for number, share in enumerate((0.95, 0.3)):
            masks = random_masks(steps.state, share, number)
            before = steps.state.masks
            steps.state.prune({name: bits & before.get(name, bits) for name, bits in masks.items()})
            seen += [steps.train(), steps.train()]
        found.append((seen, whole_state(steps.state)))
    (a, states), (b, expected) = found[1], found[0]
    assert a == b
    assert all(torch.equal(states[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("residency", ["all", "disk"])
def test_less_pruned_than_it_was_made_for(residency: str, tmp_path: Path) -> None:
    """A run may return to a checkpoint that is less pruned than the one that it began to load."""
    found = []
    for overrides in ([], elsewhere(residency, tmp_path)):
        steps = pruned_steps(*overrides)
        for share in (0.5, 1.0, 0.2):
            steps.state.prune(random_masks(steps.state, share), empty=True)
            steps.state.initialize(3, 0.1)
            steps.train()
        found.append(([steps.train(), steps.train()], whole_state(steps.state)))
    (a, states), (b, expected) = found[1], found[0]
    assert a == b
    assert all(torch.equal(states[key], tensor) for key, tensor in expected.items())


def steps_of_few_pruned(residency: str) -> Trained:
    """Trains with four microbatches a model that is pruned in its output layer alone; experts have no replicas."""
    options = ["parallel.expert=2", "train.micro_batch=2", "train.global_batch=16", f"state.offload={residency}"]
    options += ["pruning.targets=[head]", *IN_BF16]
    made = pruned_steps(*options, model="moe")
    assert sum(chunk.plan.adds_gradients for chunk in made.state.trained) == 1
    assert any(chunk.gradients.alone for chunk in made.state.trained)
    return Trained([made.train() for _ in range(3)], whole_state(made.state))


def test_gradients_leave_once() -> None:
    """The gradients of a pruned chunk are reduced in each microbatch, and leave only after the last reduction."""
    found, right = (run_ranks(steps_of_few_pruned, 2, residency) for residency in ("all", "none"))
    for a, b in zip(found, right):
        assert a.steps == b.steps
        assert all(torch.equal(a.tensors[key], tensor) for key, tensor in b.tensors.items())
