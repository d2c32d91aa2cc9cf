"""Every layout gives the numbers of one process: random combinations of all that says how work and state are divided."""

import random
from typing import Any

import pytest

from optimus.testing import Layout, assert_same_as_one_process, run_ranks
from optimus.testing.equality import train_steps

MODELS: dict[str, dict[str, Any]] = {
    "moe": {"family": "olmoe", "intermediate": 24, "experts": 8, "experts_per_token": 2},
    "dense": {"family": "olmo", "intermediate": 48},
    "tied": {"family": "olmoe", "intermediate": 24, "experts": 8, "experts_per_token": 3, "tie_embeddings": True},
}


def config_of(model: str, **sections: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": {"hidden": 16, "layers": 2, "heads": 2, "vocab": 50} | MODELS[model],
        "data": {"path": ""},
        "train": {
            "output": "",
            "steps": 10,
            "global_batch": 16,
            "micro_batch": 2,
            "context": 12,
            "precision": "float32",
        },
        "schedule": {"peak": 3e-3, "minimum": 3e-4, "warmup_steps": 2},
        "state": {"chunk": 2000},
    } | sections


def drawn(number: int) -> tuple[str, Layout]:
    """A model and a layout; the number decides everything."""
    choose = random.Random(number)
    model = choose.choice(list(MODELS))
    dp = choose.choice([1, 2, 4, 4, 8, 8])
    shard = choose.choice(["none", "optimizer", "gradients", "parameters"])
    overrides = [f"state.shard={shard}", f"state.chunk={choose.choice([500, 2000, 100_000])}"]
    overrides += [f"train.micro_batch={choose.choice([n for n in (1, 2, 4, 8) if 16 % (dp * n) == 0])}"]
    overrides += [f"state.tile={choose.choice([64, 1000, 1 << 20])}"]
    if shard != "none":
        overrides += [f"state.shard_over={choose.choice(['replicas', 'data'])}"]
        overrides += [f"state.shard_ranks={choose.choice([n for n in (1, 2, 4) if n <= dp])}"] * choose.choice([0, 1])
    if shard == "parameters":
        overrides += [f"state.release={choose.choice(['true', 'false'])}", f"state.prefetch={choose.choice([0, 1, 3])}"]
    if shard == "none":
        overrides += [f"state.coarsening={choose.choice([1, 3])}"] * choose.choice([0, 1])
    if model != "dense":
        overrides += [f"parallel.expert={choose.choice([n for n in (1, 2, 4, 8) if dp % n == 0])}"]
        overrides += [f"moe.dispatch={choose.choice(['alltoall', 'allgather'])}"]
        overrides += [f"moe.balance_scope={choose.choice(['microbatch', 'global'])}"]
    if choose.random() < 0.3:
        overrides += ["recompute=[norm,attention]"]
    return model, Layout(dp, overrides)


@pytest.mark.parametrize("number", range(48))
def test_random_layouts(number: int) -> None:
    model, layout = drawn(number)
    assert_same_as_one_process(config_of(model), [layout], 5)


def test_the_draws_meet_everything() -> None:
    drawings = [drawn(number) for number in range(48)]
    said = {override for _, layout in drawings for override in layout.overrides}
    for name in ("none", "optimizer", "gradients", "parameters"):
        assert f"state.shard={name}" in said
    for option in ("shard_over=data", "shard_ranks=2", "release=false", "prefetch=3", "coarsening=1", "tile=64"):
        assert f"state.{option}" in said
    assert {f"parallel.expert={n}" for n in (1, 2, 4, 8)} <= said
    assert {"moe.dispatch=alltoall", "moe.dispatch=allgather", "moe.balance_scope=global"} <= said
    assert {model for model, _ in drawings} == set(MODELS)


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients", "parameters"])
def test_bf16_gradients_are_as_good_on_ranks(shard: str) -> None:
    """bf16 gradients with fp32 computation: sums in another order, whose rounding Adam makes as large as any gradient."""
    layout = Layout(4, ["parallel.expert=2", f"state.shard={shard}", "state.gradient_dtype=bfloat16"])
    assert_same_as_one_process(config_of("moe"), [layout], 5, rtol=4e-2)


@pytest.mark.parametrize("shard", ["gradients", "parameters"])
def test_fifty_steps_in_bf16(shard: str) -> None:
    """Sharded bf16 gradients lose nothing that shows: within 1 % of one process."""
    config = config_of("moe")
    config["train"] |= {"precision": "bfloat16", "steps": 50}
    config["state"] |= {"gradient_dtype": "bfloat16"}
    alone = train_steps(config, 50).steps
    spread = config | {"parallel": {"expert": 2}, "state": config["state"] | {"shard": shard}}
    there = run_ranks(train_steps, 4, spread, 50)[0].steps
    assert alone[-1].loss < 0.97 * alone[0].loss  # it has learnt something
    assert there[-1].loss == pytest.approx(alone[-1].loss, rel=1e-2)
    assert max(abs(a.loss / b.loss - 1) for a, b in zip(there, alone, strict=True)) < 1e-2


@pytest.mark.parametrize("dispatch", ["alltoall", "allgather"])
def test_the_global_balance_loss_knows_no_microbatches(dispatch: str) -> None:
    """Counted over the global batch, it is the same for any number of them, here against one microbatch of everything."""
    config = config_of("moe", moe={"balance_scope": "global", "balance_coefficient": 0.5, "dispatch": dispatch})
    config["train"]["micro_batch"] = 16
    right = train_steps(config, 5)
    for ranks, micro_batch, expert in ((1, 2, 1), (4, 1, 2), (2, 8, 2)):
        spread = config | {"train": config["train"] | {"micro_batch": micro_batch}, "parallel": {"expert": expert}}
        found = run_ranks(train_steps, ranks, spread, 5)[0]
        for a, b in zip(found.steps, right.steps, strict=True):
            assert a == pytest.approx(b, rel=1e-5), (ranks, micro_batch)
    local = train_steps(config | {"moe": {"balance_coefficient": 0.5}}, 1).steps[0]
    assert local == pytest.approx(right.steps[0], rel=1e-5)  # of one microbatch they are the same
    config["train"]["micro_batch"] = 2
    smaller = train_steps(config | {"moe": {"balance_coefficient": 0.5}}, 1).steps[0]
    assert smaller.balance_loss != pytest.approx(local.balance_loss, rel=1e-4)  # of more they are not


def test_a_difference_is_found_and_named() -> None:
    config = config_of("moe")
    with pytest.raises(AssertionError, match=r"2 ranks, .*seed=1.* step 1: loss is .*, one process has"):
        _with_another_reference(config)


def _with_another_reference(config: dict[str, Any]) -> None:
    from optimus.testing import equality

    right = equality.train_steps(config, 2)
    (found,) = run_ranks(train_steps, 2, config | {"train": config["train"] | {"seed": 1}}, 2)[:1]
    equality.compare(found, right, "2 ranks, ['train.seed=1']", 1e-5)
