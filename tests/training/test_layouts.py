"""Every layout gives the numbers of one process, for all combinations of options that divide work and state.

Layouts are drawn at random. A covering array of some eighty small draws is always tested. The array has every value of
every option, every pair of values of `factors` that any draw has, every pair of `PAIRS`, and every sharding with split
backward passes. The draws of `SWEEP` are tested in turns.
"""

import itertools
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest

from helpers.covering import covering
from helpers.drawing import MODELS, config_of, drawn, passes
from helpers.equality import Layout, assert_same_as_one_process, train_steps
from helpers.sweep import in_turns
from optimus.pipeline.schedules import schedules
from optimus.pipeline.schedules.row import Sizes
from optimus.testing import run_ranks

POOL = range(2500)  # draws from which the covering array is chosen
SWEEP = range(160)
STEPS = 3
PAIRS: list[tuple[str, ...]] = [
    ("parallel.tensor=", "parallel.context=2"),
    ("parallel.tensor=[", "parallel.context_method=ulysses"),
    ("parallel.tensor=[", "parallel.context_method=ring"),
    ("parallel.tensor=[", "parallel.sequence=true"),
    ("parallel.tensor=[", "parallel.sequence=false"),
    ("parallel.tensor=[", "state.shard=parameters"),
    ("parallel.sequence=true", "state.shard=parameters"),
    ("parallel.expert_tensor=2", "parallel.expert=4"),
    ("parallel.expert_tensor=2", "moe.dispatch=allgather"),
    ("parallel.expert_tensor=2", "parallel.context=2"),
    ("moe.drop_duplicates=false", "recompute_collectives="),
    ("moe.drop_duplicates=false", "state.shard=parameters"),
    ("moe.drop_duplicates=false", "parallel.pipeline="),
    ("parallel.tensor=", "recompute_collectives=keep"),
    ("parallel.context=", "recompute_collectives=keep"),
    ("parallel.context=", "recompute_collectives=repeat"),
    ("state.shard=parameters", "recompute=[block]"),
    *itertools.product(
        ("parallel.executor=scheduled", "parallel.executor=message-driven"),
        (
            "parallel.tensor=[",
            "parallel.sequence=true",
            "parallel.context=2",
            "parallel.expert=2",
            "parallel.expert_tensor=2",
            "moe.balance_scope=global",
            "moe.dispatch=allgather",
            "state.shard=gradients",
            "state.shard=parameters",
            "state.shard=optimizer",
            "state.all_reduce_tiles=3",
            "recompute=[block]",
            "recompute_collectives=keep",
            "parallel.layers_per_stage=",
            "parallel.microbatches=auto",
        ),
    ),
    *itertools.product(
        ("parallel.schedule=zb-h1", "parallel.schedule=zbv", "parallel.schedule=v-half", "parallel.schedule=v-min"),
        ("parallel.tensor=", "parallel.expert=2", "state.shard=parameters", "recompute=[", "parallel.pipeline=4"),
    ),
    *itertools.product(
        ("parallel.vocabulary=true",),
        (
            "parallel.schedule=gpipe",
            "parallel.schedule=1f1b",
            "parallel.schedule=interleaved-1f1b",
            "parallel.schedule=zb-h1",
            "parallel.schedule=zbv",
            "parallel.tensor=",
            "parallel.context=",
            "parallel.pipeline=4",
            "state.shard=parameters",
            "moe.balance_scope=global",
        ),
    ),
    *itertools.product(
        ("parallel.schedule=zb",), ("parallel.vocabulary=true", "train.freeze=[b"), ("state.shard=parameters",)
    ),
    *itertools.product(
        ("parallel.vocabulary_algorithm=2",),
        (
            "parallel.schedule=v-half",
            "parallel.schedule=v-min",
            "parallel.tensor=",
            "parallel.pipeline=4",
            "pruning.at=",
        ),
    ),
    *itertools.product(
        ("tensor: ",),  # of a range of layers
        (
            "parallel.tensor=4",
            "parallel.context=2",
            "parallel.expert=2",
            "parallel.expert_tensor=2",
            "parallel.pipeline=2",
            "parallel.vocabulary=true",
            "parallel.microbatches=auto",
            "parallel.schedule=z",
            "parallel.executor=message-driven",
            "state.shard=optimizer",
            "state.shard=gradients",
            "state.shard=parameters",
            "state.shard_over=data",
            "state.offload=all",
            "recompute=[",
            "recompute: [block]",
            "optimizer.name=muon",
            "pruning.at=",
            "train.precision=float16",
        ),
    ),
    ("parallel.schedule=interleaved-1f1b", "parallel.pipeline=4"),
    ("parallel.executor=message-driven", "parallel.stages_per_rank=2 parallel.max_in_flight=["),
]

SPLITTING = {  # schedules that split backward passes, with the overrides that choose them
    row.name: [f"parallel.schedule={row.name}", f"parallel.stages_per_rank={row.stages}"]
    for row in schedules().values()
    if row.make(Sizes(2, 4, row.stages)).splits_backward
}

OPTIONS = {
    "parallel.tensor": ("2", "3", "4", "[2,2]", "[1,2]", "[2,3]", "[4,2]"),
    "parallel.sequence": ("true", "false"),
    "parallel.overlap": ("true", "false"),
    "parallel.context": ("2", "3", "4"),
    "parallel.context_method": ("ring", "ulysses"),
    "parallel.expert": ("1", "2", "3", "4", "6", "8"),
    "parallel.expert_tensor": ("1", "2", "3", "4"),
    "moe.dispatch": ("alltoall", "allgather", "auto"),
    "moe.drop_duplicates": ("true", "false"),
    "moe.balance_scope": ("microbatch", "global"),
    "state.shard": ("none", "optimizer", "gradients", "parameters"),
    "state.shard_over": ("replicas", "data"),
    "state.shard_ranks": ("1", "2", "4"),
    "state.shard_ranks.parameters": ("1", "2"),
    "state.shard_ranks.gradients": ("1", "2"),
    "state.shard_ranks.optimizer": ("2",),
    "state.reshard_after_forward": ("true", "false"),
    "state.prefetch": ("0", "1", "3"),
    "state.overlap": ("true", "false"),
    "state.all_reduce_tiles": ("1", "3"),
    "state.tile": ("64",),
    "state.offload": ("none", "optimizer", "all", "disk"),
    "state.cache": ("40", "auto", "2MB"),
    "state.chunk_sizes": ("[300,700]",),
    "state.unsharded_below": ("0", "400", "4000"),
    "state.pin_memory": ("true", "false"),
    "state.resident_fraction": ("0.0", "0.4", "auto"),
    "state.update_on": ("auto", "device", "host"),
    "state.accumulate_on": ("auto", "device", "host"),
    "recompute": (
        "[block]",
        "[moe]",
        "[mlp]",
        "[norm]",
        "[attention]",
        "[norm,attention,moe]",
        "[norm,attention,mlp]",
    ),
    "recompute_every": ("1", "2"),
    "recompute_collectives": ("keep", "repeat"),
    "parallel.pipeline": ("2", "4"),
    "parallel.schedule": ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv", "v-half", "v-min"),
    "parallel.warmup_factor": ("1", "2"),
    "parallel.stages_per_rank": ("1", "2"),
    "parallel.executor": ("scheduled", "message-driven"),
    "parallel.max_in_flight": ("1", "2", "5"),
    "parallel.layers_per_stage": ("[1,1]", "[1,2]", "[2,1]", "[1,1,1,1]"),
    "parallel.vocabulary": ("true", "false"),
    "parallel.vocabulary_algorithm": ("1", "2"),
    "parallel.microbatches": ("1", "2", "4", "8", "auto"),
    "parallel.pipeline_stride": ("1", "2", "4"),
    "optimizer.name": ("adamw", "muon", "lion", "schedule-free"),
    "train.loss": ("cross-entropy", "z-loss", "label-smoothing"),
    "train.freeze": ("[]", "[embedding,blocks.0.*]", "[blocks.1.*]", "[blocks.*.attention.*]"),
    "pruning.at": ("0", "1", "[1,2]"),
    "pruning.rewind": ("0",),
    "pruning.indices": ("int32", "bits"),
    "train.precision": ("float32", "float16"),
    "train.loss_scale.growth_interval": ("1", "2000"),
}
VALUES = {f"{option}={value}" for option, values in OPTIONS.items() for value in values}
# Options that the pairs take as drawn; `factors` adds the others. Few draws give moe.drop_duplicates, so `PAIRS` has
# its pairs.
PAIRED = (
    "parallel.sequence",
    "parallel.overlap",
    "parallel.context_method",
    "parallel.executor",
    "parallel.schedule",
    "parallel.stages_per_rank",
    "parallel.vocabulary",
    "parallel.vocabulary_algorithm",
    "moe.dispatch",
    "moe.balance_scope",
    "state.shard",
    "state.shard_over",
    "state.overlap",
    "state.reshard_after_forward",
    "state.offload",
    "state.accumulate_on",
    "recompute_collectives",
    "optimizer.name",
    "train.loss",
    "train.freeze",
    "train.precision",
)


def factors(model: str, layout: Layout) -> dict[str, str]:
    """Returns the options and values that must occur in pairs; sizes are reduced to the distinctions that run other
    code."""
    said = dict(override.split("=", 1) for override in layout.overrides)
    outputs, _, inputs = said.get("parallel.tensor", "1").strip("[]").partition(",")
    recomputed = said.get("recompute", "nothing")
    of_range = re.search(r"recompute: \[(.*?)\]", said.get("parallel.layers", ""))
    return {option: said[option] for option in PAIRED if option in said} | {
        "model": model,
        "pruning.at": said.get("pruning.at", "never"),
        "levels": str(1 < (layout.per_node or 1) < layout.ranks),  # several ranks on each of several nodes
        "outputs": str(int(outputs) > 1),
        "inputs": str(int(inputs or 1) > 1),
        "parallel.pipeline": said.get("parallel.pipeline", "1"),
        **{
            option: str(int(said.get(option, 1)) > 1)
            for option in ("parallel.context", "parallel.expert", "parallel.expert_tensor", "recompute_every")
        },
        "nested": str(any(option.startswith("state.shard_ranks.") for option in said)),
        "ranges": "" if of_range is None else "block" if of_range[1] == "block" else str(bool(of_range[1])),
        **{kind: str(kind in recomputed) for kind in ("nothing", "block", "norm", "attention", "m")},  # "m": moe or mlp
    }


def pairs(model: str, layout: Layout) -> set[tuple[object, ...]]:
    """Returns all pairs of factors."""
    return set(itertools.combinations(sorted(factors(model, layout).items()), 2))


def split_backward(model: str, layout: Layout) -> set[tuple[object, ...]]:
    """Returns sharding and residency of a draw with split backward passes.

    Passes of other microbatches run between both parts of such a pass. Sharded parameters are distinguished by experts,
    which have chunks of their own.
    """
    said = dict(override.split("=", 1) for override in layout.overrides)
    if said.get("parallel.schedule") not in SPLITTING:
        return set()
    shard, over = (
        said["state.shard"],
        "nested" if factors(model, layout)["nested"] == "True" else "state.shard_ranks" in said,
    )
    found = {("split", shard, over), ("split", shard, said["state.offload"]), ("split", shard, "recompute" in said)}
    return found | ({(*each, "dense" in model) for each in found} if shard == "parameters" else set())


def asked(model: str, layout: Layout) -> set[object]:
    """Returns everything of this draw that some case must have."""
    text = " ".join(layout.overrides)
    together = {pair for pair in PAIRS if all(part in text for part in pair)} | split_backward(model, layout)
    return {model, layout.ranks, *VALUES.intersection(layout.overrides), *together, *pairs(model, layout)}


def cost(model: str, layout: Layout) -> float:
    """Returns the cost of a case: a constant, and the work of its ranks."""
    return 32 + layout.ranks * passes(model, layout)


@cache
def cases() -> list[int]:
    """Returns the draws of the covering array."""
    draws = [drawn(number) for number in POOL]
    return [POOL[index] for index in covering([asked(*draw) for draw in draws], [cost(*draw) for draw in draws])]


FORCED = {
    "context": [
        Layout(2, ["parallel.context=2"]),
        Layout(2, ["parallel.context=2", "parallel.context_method=ulysses"]),
    ],
    "tensor": [
        Layout(2, ["parallel.tensor=2"]),
        Layout(2, ["parallel.tensor=2", "parallel.sequence=false"]),
        Layout(2, ["parallel.tensor=2", "parallel.expert=2", "parallel.sequence=false", "moe.dispatch=allgather"]),
        Layout(4, ["parallel.tensor=[2,2]", "parallel.expert=2", "parallel.expert_tensor=2"]),
    ],
    "pipeline": [Layout(4, ["parallel.pipeline=2", "parallel.context=2", "parallel.vocabulary=true"])],
    "data": [Layout(2, ["parallel.expert=2"])],
}


@pytest.mark.parametrize("axis", in_turns([*FORCED], 3, always=1))
def test_forced_routing(axis: str) -> None:
    """The number of experts divides neither a rank's choices nor a sequence's, with 24 tokens and 7 experts."""
    experts = {"experts": 14 if axis in ("tensor", "data") else 7, "experts_per_token": 3, "renormalise": True}
    config = config_of("moe", moe={"force_balanced": True}) | {"model": MODELS["moe"] | experts}
    config["train"]["global_batch"] = 4
    assert_same_as_one_process(config, FORCED[axis], STEPS, rtol=2e-5)


# The array is greedy: its first 18 cases have 82 % of the pairs.
@pytest.mark.parametrize("number", in_turns(cases(), 4, always=18))
def test_covering_layouts(number: int) -> None:
    model, layout = drawn(number)
    assert_same_as_one_process(config_of(model), [layout], STEPS, rtol=2e-5)


@pytest.mark.parametrize("number", in_turns(SWEEP, always=1))
def test_random_layouts(number: int) -> None:
    model, layout = drawn(number)
    assert_same_as_one_process(config_of(model), [layout], STEPS, rtol=2e-5)


@pytest.mark.parametrize(
    ("model", "overrides"),
    in_turns(
        [
            (
                "moe",
                ["parallel.expert=2", "parallel.pipeline_stride=2", "state.shard=parameters", "state.shard_ranks=2"],
            ),
            (
                "tied",
                ["parallel.tensor=2", "parallel.pipeline_stride=2", "state.shard=optimizer", "parallel.schedule=zb-h1"],
            ),
            ("tied dense", ["parallel.context=2", "parallel.pipeline_stride=2", "state.shard=gradients"]),
            ("dense", ["parallel.pipeline_stride=1", "state.shard=optimizer", "state.shard_ranks=2"]),
        ],
        3,
        always=1,
    ),
)
def test_stages_side_by_side(model: str, overrides: list[str]) -> None:
    """Ranks 0, 1, 4 and 5 (or 0, 2, 4 and 6) are the first stage, the others the second."""
    assert_same_as_one_process(config_of(model), [Layout(8, ["parallel.pipeline=2", *overrides])], STEPS, rtol=2e-5)


@pytest.mark.parametrize(
    ("model", "overrides"),
    in_turns(
        [
            ("moe", ["parallel.expert=2", "state.shard_ranks={parameters: 2, gradients: 4}", "recompute=[moe]"]),
            ("tied", ["parallel.tensor=2", "state.shard_ranks={parameters: 2}", "state.reshard_after_forward=false"]),
            (
                "tied dense",
                ["parallel.pipeline=2", "parallel.schedule=zb-h1", "state.shard_ranks={parameters: 1, gradients: 2}"],
            ),
            ("dense", ["parallel.context=2", "state.shard_ranks={parameters: 2, gradients: 2, optimizer: 4}"]),
        ],
        3,
        always=1,
    ),
)
def test_nested_shards(model: str, overrides: list[str]) -> None:
    layout = Layout(8, ["state.shard=parameters", "state.chunk=500", *overrides])
    assert_same_as_one_process(config_of(model), [layout], STEPS, rtol=2e-5)


@pytest.mark.parametrize(
    ("model", "overrides"),
    in_turns(
        [
            ("moe", ["parallel.expert=2", "state.shard=parameters", "state.unsharded_below=4000"]),
            ("dense", ["state.shard=gradients", "state.unsharded_below=400", "optimizer.name=muon"]),
            ("tied dense", ["parallel.pipeline=2", "state.shard=optimizer", "state.unsharded_below=4000"]),
            (
                "moe",
                ["parallel.tensor=2", "state.shard=parameters", "state.shard_ranks=1", "state.unsharded_below=400"],
            ),
            ("dense", ["state.shard=optimizer", "state.unsharded_below=1000000"]),
        ],
        3,
        always=1,
    ),
)
@pytest.mark.parametrize("residency", ["none", "all"])
def test_small_groups_that_are_not_sharded(model: str, overrides: list[str], residency: str) -> None:
    layout = Layout(4, ["state.chunk=500", f"state.offload={residency}", *overrides])
    assert_same_as_one_process(config_of(model), [layout], STEPS, rtol=2e-5)


SHARDINGS = {  # sharding and residency, with the number of replicas of a stage's parameters
    "optimizer": (2, ["state.shard=optimizer"]),
    "gradients": (2, ["state.shard=gradients"]),
    "parameters": (2, ["state.shard=parameters"]),
    "some ranks": (4, ["state.shard=parameters", "state.shard_ranks=2"]),
    "nested": (4, ["state.shard=parameters", "state.shard_ranks={parameters: 2, gradients: 2}"]),
    "parameters, the rest on the host": (2, ["state.shard=parameters", "state.offload=optimizer"]),
    "parameters, all on the host": (2, ["state.shard=parameters", "state.offload=all"]),
    "gradients, all on the host": (2, ["state.shard=gradients", "state.offload=all"]),
    "parameters, added up on the host": (
        2,
        ["state.shard=parameters", "state.offload=all", "state.accumulate_on=host"],
    ),
    "parameters, on a disk": (2, ["state.shard=parameters", "state.offload=disk"]),
}


@pytest.mark.swept("schedule", "recompute")
@pytest.mark.parametrize("schedule", SPLITTING.values(), ids=SPLITTING)
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize(("model", "chunk", "mlp"), [("moe", 2000, "moe"), ("dense", 100_000, "mlp")])
@pytest.mark.parametrize("recompute", ["[]", "[block]", "[norm,attention,%s]"], ids=["nothing", "blocks", "modules"])
def test_split_backward_passes(
    schedule: list[str], sharding: str, model: str, chunk: int, mlp: str, recompute: str
) -> None:
    """The second part of a backward pass runs after the first part of the next one, with four or more microbatches.

    The first part gives a norm's gradient, the second a matrix's. A chunk with both, as here, must not mistake the
    gradients of two microbatches for all gradients of one.
    """
    replicas, overrides = SHARDINGS[sharding]
    recompute = recompute % mlp if "%" in recompute else recompute
    more = [
        "parallel.pipeline=2",
        "model.layers=4",
        "train.micro_batch=1",
        f"state.chunk={chunk}",
        f"recompute={recompute}",
    ]
    layout = Layout(2 * replicas, [*schedule, *overrides, *more])
    assert_same_as_one_process(config_of(model), [layout], 2, rtol=2e-5)


def test_the_cases_meet_everything() -> None:
    drawings = [drawn(number) for number in cases()]
    assert VALUES - {override for _, layout in drawings for override in layout.overrides} == set()
    assert {model for model, _ in drawings} == set(MODELS)
    assert {layout.ranks for _, layout in drawings} == {1, 2, 3, 4, 6, 8}
    assert sum(cost(*drawing) for drawing in drawings) <= 5600  # a quarter of which is in each run


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_the_cases_combine(pair: tuple[str, ...]) -> None:
    """Options that meet in the same code occur together in some case."""
    drawings = [" ".join(drawn(number)[1].overrides) for number in cases()]
    assert any(all(part in text for part in pair) for text in drawings)


def test_the_cases_have_every_pair() -> None:
    """The cases have every pair that any draw of the pool has, and all but rare pairs of other draws."""

    def found(numbers: Iterable[int]) -> set[object]:
        draws = [drawn(number) for number in numbers]
        return set().union(*(pairs(*draw) | split_backward(*draw) for draw in draws))

    met = found(cases())
    assert found(POOL) == met
    assert len(found(range(POOL.stop, POOL.stop + 500)) - met) <= 5


@pytest.mark.parametrize("shard", in_turns(["none", "optimizer", "gradients", "parameters"], 3, always=1))
def test_bf16_gradients_are_as_good_on_ranks(shard: str) -> None:
    """Gradients of bf16 are summed in another order, and Adam enlarges the rounding errors to the size of any gradient.

    Computation is in fp32.
    """
    layout = Layout(4, ["parallel.expert=2", f"state.shard={shard}", "state.gradient_dtype=bfloat16"])
    assert_same_as_one_process(config_of("moe"), [layout], 5, rtol=4e-2)


@pytest.mark.parametrize("shard", in_turns(["gradients", "parameters"], 2))
def test_fifty_steps_in_bf16(shard: str) -> None:
    """Sharded bf16 gradients stay within 1 % of one process."""
    config = config_of("moe")
    config["train"] |= {"precision": "bfloat16", "steps": 50}
    config["state"] |= {"gradient_dtype": "bfloat16"}
    alone = train_steps(config, 50).steps
    spread = config | {"parallel": {"expert": 2}, "state": config["state"] | {"shard": shard}}
    there = run_ranks(train_steps, 4, spread, 50)[0].steps
    assert alone[-1].loss < 0.97 * alone[0].loss  # the model has learnt
    assert there[-1].loss == pytest.approx(alone[-1].loss, rel=1e-2)
    assert max(abs(a.loss / b.loss - 1) for a, b in zip(there, alone, strict=True)) < 1e-2


@pytest.mark.parametrize("dispatch", in_turns(["alltoall", "allgather"], 2))
def test_the_global_balance_loss_knows_no_microbatches(dispatch: str) -> None:
    """The balance loss of the global batch does not depend on the number of microbatches."""
    config = config_of("moe", moe={"balance_scope": "global", "balance_coefficient": 0.5, "dispatch": dispatch})
    config["train"]["micro_batch"] = 16
    right = train_steps(config, 5)
    for ranks, micro_batch, expert in ((1, 2, 1), (4, 1, 2), (2, 8, 2)):
        spread = config | {"train": config["train"] | {"micro_batch": micro_batch}, "parallel": {"expert": expert}}
        found = run_ranks(train_steps, ranks, spread, 5)[0]
        for a, b in zip(found.steps, right.steps, strict=True):
            assert a[:-1] == pytest.approx(b[:-1], rel=1e-5), (ranks, micro_batch)
    local = train_steps(config | {"moe": {"balance_coefficient": 0.5}}, 1).steps[0]
    assert local[:-1] == pytest.approx(right.steps[0][:-1], rel=1e-5)  # equal with one microbatch
    config["train"]["micro_batch"] = 2
    smaller = train_steps(config | {"moe": {"balance_coefficient": 0.5}}, 1).steps[0]
    assert smaller.balance_loss != pytest.approx(local.balance_loss, rel=1e-4)  # unlike with several


def test_a_difference_is_found_and_named() -> None:
    config = config_of("moe")
    with pytest.raises(AssertionError, match=r"2 ranks, .*seed=1.* step 1: loss is .*, one process has"):
        _with_another_reference(config)


def _with_another_reference(config: dict[str, Any]) -> None:
    from helpers import equality

    right = equality.train_steps(config, 2)
    (found,) = run_ranks(train_steps, 2, config | {"train": config["train"] | {"seed": 1}}, 2)[:1]
    equality.compare(found, right, "2 ranks, ['train.seed=1']", 1e-5)
