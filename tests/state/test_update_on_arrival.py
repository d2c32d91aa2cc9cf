"""Chunks that are updated as soon as their gradients are reduced (AxoNN, section 3.3.3), where nothing is clipped.

`clip_norm: 1e30` gives the plain order with the same numbers: it clips nothing, but needs the norm before the update.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.simulated_device import CopyLink, SimulatedDevice, Simulation
from helpers.drawing import config_of
from helpers.sweep import in_turns
from helpers.whole import whole_state
from optimus.comm import Handle
from optimus.config import load_config
from optimus.optim.adamw import AdamW
from optimus.testing import run_ranks
from optimus.testing.steps import Steps, random_batch
from optimus.training.step import StepResult, training_step

ON_ARRIVAL, PLAIN = ("optimizer.clip_norm=null",), ("optimizer.clip_norm=1e30", "optimizer.clip_during_warmup=true")


class Counted(Steps):
    """Training steps that count the updates on arrival."""

    def __init__(self, config: dict[str, Any], *overrides: str) -> None:
        super().__init__(load_config(config, overrides).model_dump(exclude_unset=True))
        self.on_arrival, right = 0, self.state.reduce_and_step

        def counted(*given: Any) -> float:
            self.on_arrival += 1
            return right(*given)

        self.state.reduce_and_step = counted  # type: ignore[method-assign]


# ---- The same numbers ----

LAYOUTS: dict[str, tuple[str, int, Sequence[str]]] = {
    "chunks": ("dense", 2, ()),
    "pieces of two tiles": ("moe", 2, ("state.all_reduce_tiles=2", "state.tile=100", "state.chunk=100000")),
    "bf16": ("dense", 2, ("train.precision=bfloat16", "state.gradient_dtype=bfloat16")),
    "sharded optimizer": ("moe", 2, ("state.shard=optimizer",)),
    "sharded gradients": ("dense", 4, ("state.shard=gradients", "parallel.tensor=2", "train.micro_batch=1")),
    "sharded in groups": (
        "dense",
        4,
        ("state.shard=parameters", "state.shard_ranks=2", "state.all_reduce_tiles=1", "state.tile=100"),
    ),
    "tied stages, experts": ("tied", 4, ("parallel.pipeline=2", "parallel.expert=2")),
    "stages": ("dense", 4, ("parallel.pipeline=2", "train.micro_batch=1", "state.shard=optimizer")),
    "muon, split matrices": ("dense", 4, ("optimizer.name=muon", "parallel.tensor=2")),
    "muon, sharded": ("moe", 2, ("optimizer.name=muon", "state.shard=optimizer")),
    "schedule-free": ("dense", 2, ("optimizer.name=schedule-free",)),
    "frozen": ("dense", 2, ("train.freeze=[embedding,blocks.0.*]",)),
    "context": ("dense", 2, ("parallel.context=2",)),
}


def trained(config: dict[str, Any], overrides: Sequence[str]) -> tuple[list[StepResult], dict[str, Tensor], int]:
    steps = Counted(config, *overrides)
    results = [steps.train() for _ in range(3)]
    steps.state.finish()
    return results, whole_state(steps.state), steps.on_arrival


def both(config: dict[str, Any], overrides: Sequence[str]) -> tuple[Any, Any]:
    return trained(config, [*overrides, *ON_ARRIVAL]), trained(config, [*overrides, *PLAIN])


def assert_same(found: Any, right: Any) -> None:
    assert found[0] == right[0]  # losses and norms of all steps
    assert all(map(torch.equal, found[1].values(), right[1].values()))


@pytest.mark.parametrize("case", in_turns([*LAYOUTS], 4, always=3))
def test_losses_norms_and_states_are_those_of_the_plain_order(case: str) -> None:
    model, ranks, overrides = LAYOUTS[case]
    for found, right in run_ranks(both, ranks, config_of(model), overrides):
        assert (found[2], right[2]) == (3, 0)
        assert_same(found, right)


def test_only_steps_without_a_limit_update_on_arrival() -> None:
    """The two steps of the warm-up do by default, and later steps clip."""
    config = config_of("dense")
    for found in run_ranks(trained, 2, config, ()):
        assert found[2] == config["lr_schedule"]["warmup_steps"] == 2


@pytest.mark.parametrize(
    ("ranks", "override"),
    [(1, "state.shard=none"), (2, "state.overlap=false"), (2, "parallel.tensor=2"), (2, "state.offload=optimizer")],
)
def test_where_nothing_overlaps_the_order_is_plain(ranks: int, override: str) -> None:
    for found in run_ranks(trained, ranks, config_of("dense"), [override, *ON_ARRIVAL]):
        assert found[2] == 0


# ---- Steps that must change nothing ----


def spoilt(config: dict[str, Any], name: str, factor: float, limit: float) -> tuple[StepResult, bool, int, StepResult]:
    """Takes a step in which the last rank multiplies its gradient of parameter `name` by `factor`, and a usual step.

    Returns both results, whether the first has left all state unchanged, and its number of updates on arrival.
    """
    steps = Counted(config, *ON_ARRIVAL)
    slots = {slot.name: each for chunk in steps.state.trained for slot, each in zip(chunk.plan.slots, chunk.parameters)}
    last = steps.groups.rank == steps.groups.world.size - 1
    before, counted = whole_state(steps.state), steps.state.steps
    batch_BS = random_batch(steps.config, 1).chunk(steps.groups.along("dp").size)[steps.groups.along("dp").rank]

    def take(limit: float) -> StepResult:
        return training_step(steps.model, steps.state, batch_BS, steps.config, 1, limit)

    hook = slots[name].register_hook(lambda gradient: gradient * factor if last else gradient)
    result, on_arrival = take(limit), steps.on_arrival
    hook.remove()
    after = whole_state(steps.state)
    same = counted == steps.state.steps and all(map(torch.equal, after.values(), before.values()))
    return result, same, on_arrival, take(math.inf)


@pytest.mark.parametrize("shard", ["none", "gradients"])
def test_nan_in_the_chunk_that_is_reduced_last(shard: str) -> None:
    """The embedding's chunk is the last to be reduced; no other chunk has been updated before its NaN is known."""
    config = config_of("dense", state={"chunk": 2000, "shard": shard})
    for result, same, on_arrival, usual in run_ranks(spoilt, 2, config, "embedding.weight", math.nan, math.inf):
        assert math.isfinite(result.loss)
        assert math.isnan(result.grad_norm)
        assert (result.skipped, same, on_arrival) == (True, True, 0)
        assert not usual.skipped


@pytest.mark.parametrize(
    ("factor", "limit", "skipped"),
    [(math.inf, math.inf, True), (1e30, math.inf, True), (1.0, 0.0, True), (1e8, math.inf, False)],
)
def test_steps_that_may_be_unfit_take_the_plain_order(factor: float, limit: float, skipped: bool) -> None:
    """Infinite and very large gradients, and a loss above the limit. A huge norm that is fit is applied."""
    for result, same, on_arrival, _ in run_ranks(spoilt, 2, config_of("dense"), "embedding.weight", factor, limit):
        assert (result.skipped, same, on_arrival) == (skipped, skipped, 0)


def bounds(config: dict[str, Any], overrides: Sequence[str]) -> tuple[float, float]:
    """Returns the bound of the norm of a step, and the norm."""
    steps, found = Counted(config, *overrides, *ON_ARRIVAL), list[float]()
    right = steps.state.square_bound

    def noted() -> Tensor:
        bound_1 = right()
        sum_1 = bound_1.clone()
        steps.groups.world.all_reduce(sum_1)
        found.append(float(sum_1) ** 0.5)
        return bound_1

    steps.state.square_bound = noted  # type: ignore[method-assign]
    return found[0] if (norm := steps.train().grad_norm) and found else math.nan, norm


@pytest.mark.parametrize("case", in_turns([*LAYOUTS], 6, always=2))
def test_the_bound_is_at_least_the_norm(case: str) -> None:
    """Cauchy and Schwarz: n addends on each of R ranks have a sum of at most (n R) ** 0.5 of the root of all squares.

    It is not much more: at most n R times the largest norm of an addend.
    """
    model, ranks, overrides = LAYOUTS[case]
    for bound, norm in run_ranks(bounds, ranks, config_of(model), overrides):
        assert norm <= bound <= 1e3 * norm


def with_a_faulty_link(config: dict[str, Any]) -> str:
    steps = Steps(load_config(config, ON_ARRIVAL))
    gradients = steps.state.trained[0].gradients
    right = gradients.replica_group

    class Faulty:
        def all_reduce_async(self, tensor: Tensor) -> Handle:
            handle = right.all_reduce_async(tensor)
            return Handle(lambda: (handle.wait(), tensor.fill_(math.nan))[0])

    gradients.replica_group = Faulty()  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="a link or a memory is faulty") as raised:
        steps.train()
    return str(raised.value)


def test_a_sum_that_is_not_finite_although_all_addends_are_raises() -> None:
    assert all(said.startswith("step 1: ") for said in run_ranks(with_a_faulty_link, 2, config_of("dense")))


# ---- Overlap on real ranks ----


class HeldBack:
    """The group of a chunk: a link that carries a piece of gradients only when `held` allows it."""

    def __init__(self, group: Any, held: Callable[[], None]) -> None:
        self._group, self._held = group, held

    def all_reduce_async(self, tensor: Tensor) -> Handle:
        def wait() -> None:
            self._held()
            self._group.all_reduce_async(tensor).wait()

        return Handle(wait)


def held_back(config: dict[str, Any], overrides: Sequence[str]) -> tuple[Any, list[str]]:
    """Trains; the links carry the first chunk's gradients only after all other chunks have been updated."""
    steps = Counted(config, *overrides)
    first, *others = steps.state.trained
    assert others
    seen = list[str]()

    def held() -> None:
        seen.extend({chunk.gradients.sum.status for chunk in others})

    first.gradients.replica_group = HeldBack(first.gradients.replica_group, held)  # type: ignore[assignment]
    results = [steps.train() for _ in range(3)]
    steps.state.finish()
    return (results, whole_state(steps.state)), seen


def in_both_orders(config: dict[str, Any]) -> tuple[Any, Any]:
    return held_back(config, ON_ARRIVAL), held_back(config, PLAIN)


def test_chunks_are_updated_while_a_link_holds_another_back() -> None:
    for (found, seen), (right, seen_before) in run_ranks(in_both_orders, 2, config_of("dense")):
        assert_same(found, right)
        assert seen == ["used"] * 3  # all others are updated
        assert "used" not in seen_before


def pieces(config: dict[str, Any]) -> list[str]:
    """Returns the arrivals of pieces and the updates of tiles of a step, in order."""
    steps, seen = Counted(config, *ON_ARRIVAL), list[str]()
    (chunk,) = steps.state.trained
    chunk.gradients.replica_group = HeldBack(  # type: ignore[assignment]
        chunk.gradients.replica_group, lambda: seen.append("piece")
    )
    right = AdamW.update

    def update(self: AdamW, *given: Any) -> None:
        seen.append("tile")
        right(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdamW, "update", update)
        steps.train()
    return seen


def test_a_chunk_is_updated_in_pieces_of_k_tiles() -> None:
    config = config_of("dense", state={"chunk": 100_000, "tile": 320, "all_reduce_tiles": 3})
    for seen in run_ranks(pieces, 2, config):
        whole, rest = divmod(seen.count("tile"), 3)
        assert whole > 3
        assert seen == ["piece", "tile", "tile", "tile"] * whole + (["piece"] + ["tile"] * rest if rest else [])


# ---- Overlap on the virtual clock ----

TILES = 32  # of 128 elements
LATENCY, REDUCING = 1e-3, 1e-3  # s: of an all-reduce, and for the elements of a tile


def simulated(layers: int, tiles: int, k: int | None, updating: float, backward: float = 0.0) -> Simulation:
    """Returns a row of `layers` chunks of `tiles` tiles, whose update takes `updating` seconds per tile."""
    elements = 128
    return Simulation(
        SimulatedDevice(CopyLink(1.0), CopyLink(1.0)),
        layers=layers,
        width=math.isqrt(elements * tiles),
        forward=0.0,
        backward=backward,
        update=updating / elements,
        link=CopyLink(elements * 2 / REDUCING, LATENCY),
        tile=elements,
        all_reduce_tiles=k,
    )


def seconds(simulation: Simulation, on_arrival: bool) -> float:
    return simulation.run(2, on_arrival=on_arrival)[-1].seconds


@pytest.mark.parametrize("k", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("updating", [0.4e-3, 3e-3])
def test_the_time_of_a_chunk_in_pieces(k: int, updating: float) -> None:
    """p pieces, each r to reduce and u to update, take r + u + (p - 1) max(r, u), and p (r + u) without overlap."""
    p, r, u = TILES // k, LATENCY + k * REDUCING, k * updating
    made = seconds(simulated(1, TILES, k, updating), True)
    assert made == pytest.approx(r + u + (p - 1) * max(r, u), rel=1e-9)
    assert seconds(simulated(1, TILES, k, updating), False) == pytest.approx(p * (r + u), rel=1e-9)


def test_the_best_k_lies_between() -> None:
    """A piece of one tile is too small, as in AxoNN's figure 3.6: k = 1 is slower than no overlap, and large k is
    sequential. With r > u, the time n a / k + n b + k c + ... is least at k = (n a / c) ** 0.5.
    """
    times = {k: seconds(simulated(1, TILES, k, 0.4e-3), True) for k in (1, 2, 4, 8, 16, 32)}
    plain = seconds(simulated(1, TILES, None, 0.4e-3), False)
    assert min(times, key=times.__getitem__) == 8  # (32 * 1 / 0.4) ** 0.5 is 8.9
    assert times[1] > plain == pytest.approx(times[32])


@pytest.mark.parametrize("updating", [0.1e-3, 1e-3, 5e-3])
def test_the_time_of_chunks_behind_the_backward_pass(updating: float) -> None:
    """Chunk i is reduced after its gradients and after chunk i + 1, and updated after the backward pass, after its own
    reduction and after chunk i + 1."""
    layers, tiles, backward = 6, 8, 5e-3
    link = device = plain = 0.0
    for number in range(1, layers + 1):
        link = max(link, number * backward) + LATENCY + tiles * REDUCING
        device = max(device, layers * backward, link) + tiles * updating
    plain = link + layers * tiles * updating
    assert seconds(simulated(layers, tiles, None, updating, backward), True) == pytest.approx(device, rel=1e-9)
    assert seconds(simulated(layers, tiles, None, updating, backward), False) == pytest.approx(plain, rel=1e-9)


def test_numbers_on_the_virtual_clock() -> None:
    """A sum that is read before it arrives is NaN."""
    found, right = simulated(4, 8, 2, 1e-3, 1e-3), simulated(4, 8, 2, 1e-3, 1e-3)
    on_arrival, plain = found.run(3, 2, on_arrival=True), right.run(3, 2)
    assert [each[1:3] for each in on_arrival] == [each[1:3] for each in plain]
    assert all(map(torch.equal, found.weights(), right.weights()))


def test_a_missing_wait_for_a_piece_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made = simulated(4, 8, 2, 1e-3)
    for chunk in made.state.trained:
        monkeypatch.setattr(chunk.gradients, "wait_for", lambda *given: None)
    made.run(1, on_arrival=True)
    assert all(weights.isnan().any() for weights in made.weights())
