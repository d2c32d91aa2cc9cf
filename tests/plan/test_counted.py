"""The planner's costs of adapted models: operations counted on shapes, against declared ones, and plans that run."""

from typing import Any

import pytest

from helpers.adapted import config_json, config_of
from helpers.planned import resolved
from helpers.sweep import in_turns
from optimus.config import Architecture, ModelConfig, RunConfig, load_config
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.model.count import forward_flops
from optimus.parallel.module_bytes import ModuleSetting
from optimus.parallel.operations import BlockOperations, MatmulSizes, block_operations
from optimus.parallel.options import StageOptions
from optimus.plan.costs import costs_of
from optimus.plan.job import Job
from optimus.plan.job_builder import asked
from optimus.plan.largest import largest
from optimus.plan.proposal import config_of as planned_config
from optimus.plan.search import search
from optimus.plan.step import step_time

TOKENS = 64


def counted(family: str, layer: int = 0, sequences: int = 2, splits: bool = True, **mesh: int) -> BlockOperations:
    model = config_of(family).model
    setting = ModuleSetting.canonical(model, Mesh(**mesh), StageOptions(), TOKENS, 4, 1.0, (), splits)
    return block_operations(setting, layer, sequences)


def flops(matmuls: tuple[MatmulSizes, ...]) -> float:
    return sum(2 * m * n * k * number for m, n, k, number in matmuls)


def products_of(family: str) -> float:
    """Returns the declared FLOPs of the weights of a block, per token."""
    model = config_of(family).model
    scores = 2 * sum(
        each.heads * (each.query + each.value) * min(each.window or TOKENS, TOKENS) for each in [model.facts.scored[0]]
    )
    seen = min(model.facts.scored[0].window or TOKENS, TOKENS)
    return sum(forward_flops(model, TOKENS).values()) - scores / 2 * (2 - seen / TOKENS)


@pytest.mark.parametrize("family", ["llama", "phi3", "stablelm", "gpt_neox", "olmo2", "gpt2", "smollm3"])
def test_matmuls_are_those_of_the_weights(family: str) -> None:
    one = counted(family)
    for each in one[:3]:
        assert flops(each.products) / (2 * TOKENS) == pytest.approx(products_of(family))
    halves = counted(family, tp=2)
    for each, half in zip(one[:3], halves[:3]):
        assert flops(half.products) == pytest.approx(flops(each.products) / 2)
    assert {each.heads for each in halves.attended} == {each.heads // 2 for each in one.attended}
    assert all(half.moved < each.moved for each, half in zip(one[:2], halves[:2]))


@pytest.mark.parametrize("family", ["granitemoe", "qwen3_moe"])
def test_experts_in_the_kernels_count_the_chosen_rows(family: str) -> None:
    """The router's logits are computed once more for the statistics, so there are at least as many FLOPs."""
    one, half = counted(family), counted(family, tp=2)
    declared = products_of(family) * 2 * TOKENS
    forward, *backward = (flops(each.products) for each in one[:3])
    assert declared <= forward <= 1.02 * declared
    assert 2 * declared <= sum(backward) <= 2.04 * declared
    assert flops(half.forward.products) < 0.52 * declared


@pytest.mark.parametrize(
    ("family", "layer"),
    in_turns([("falcon_h1", 0), ("nemotron_h", 0), ("kimi_linear", 0), ("gemma3_text", 1)], 3, always=1),
)
def test_many_sequences_follow_from_two(family: str, layer: int) -> None:
    """The operations of five sequences, extrapolated, are those of a run on five; moved bytes and matmuls are linear."""
    model = config_of(family).model
    setting = ModuleSetting.canonical(model, Mesh(tp=2), StageOptions(), TOKENS, 4, 1.0, (), True)
    found = block_operations(setting, layer, 5)
    few, more = block_operations(setting, layer, 1), block_operations(setting, layer, 2)
    for one, two, five in zip(few[:3], more[:3], found[:3]):
        assert flops(five.products) == pytest.approx(
            flops(one.products) + 4 * (flops(two.products) - flops(one.products))
        )
        assert five.moved == pytest.approx(one.moved + 4 * (two.moved - one.moved))
        assert [each.kind for each in five.sent] == [each.kind for each in one.sent]


@pytest.mark.parametrize("family", ["gpt_neox", "llama", "phi3", "gpt2", "stablelm"])
def test_a_tensor_parallel_block_sends_what_its_layers_send(family: str) -> None:
    """Two sums in the forward pass, of the residual stream each; as many in the backward pass, whatever the number of
    projections that have their input in common."""
    found, stream = counted(family, tp=2), 2 * TOKENS * 64 * 4
    for each in (found.forward, found.backward):
        assert [(sent.kind, sent.nbytes) for sent in each.sent] == [("all_reduce", stream)] * 2
    assert not found.weights.sent
    assert not any(each.sent for each in counted(family)[:3])


LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11264,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 8192,
}
OWN = {"family": "llama", "hidden": 4096, "intermediate": 11264, "layers": 4, "heads": 32, "kv_heads": 8, "vocab": 8192}


def run_of(model: dict[str, Any], **train: Any) -> RunConfig:
    given = {"output": "run", "steps": 5, "global_batch": 64, "micro_batch": 4, "sequence_length": 2048}
    return load_config({"model": model, "data": {"path": "data"}, "train": given | train})


@pytest.mark.parametrize("mesh", [{}, {"tp": 2}, {"cp": 2}, {"tp": 4, "cp": 2}])
def test_costs_are_those_of_our_own_modules(mesh: dict[str, int]) -> None:
    """Matmuls of q, k and v, and of gate and up, are one matmul in the library's modules, which is a little faster."""
    sizes = Mesh(**mesh, ranks_per_node=8)

    def costs(model: dict[str, Any]) -> Any:
        job = asked(run_of(model), "dgx-a100", 8, []).changed(sizes, parallel={"sequence": False})
        return costs_of(job)

    adapted, own = costs({"transformers": LLAMA}), costs(OWN)
    ((block, _),) = adapted.modules[0].values()
    for number in range(3):
        declared = [
            getattr(passes[number], term) * times
            for term in ("matmul", "attention", "tensor", "context", "memory")
            for passes, times in own.modules[0].values()
        ]
        matmul, attention, tensor, context, memory = (sum(declared[at : at + 3]) for at in range(0, 15, 3))
        found = block[number]
        assert matmul <= found.matmul <= 1.25 * matmul
        assert found.attention == pytest.approx(attention)
        assert found.context == pytest.approx(context)
        assert found.tensor >= tensor
        assert found.memory >= memory
    assert adapted.head == own.head
    assert adapted.embedding == own.embedding


# ---- Plans ----

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"transformers": config_json("llama")},
    "moe": {"transformers": config_json("granitemoe")},
    "hybrid": {"transformers": config_json("falcon_h1")},
    "chunked": {"transformers": config_json("deepseek_v4")},
}


PLANNED = [("llama", "dgx-a100", 8), ("hybrid", "laptop", 2), ("moe", "laptop", 2)]
PLANNED += [(name, *machine) for name in MODELS for machine in (("dgx-a100", 8), ("laptop", 2))][1:]


@pytest.mark.parametrize(("name", "machine", "ranks"), in_turns([*dict.fromkeys(PLANNED)], 4, always=3))
def test_a_plan_is_a_run_that_passes_its_checks(name: str, machine: str, ranks: int) -> None:
    job = asked(run_of(MODELS[name], sequence_length=256), machine, ranks, [])
    plans = search(job, best=6)
    assert plans
    assert len({plan.job.mesh for plan in plans}) > 1
    for plan in plans:
        config = planned_config(plan.job)
        mesh, limits = plan.job.mesh, config.model.limits
        assert mesh.tp_in == 1
        assert "tensor" not in limits or mesh.tp == 1
        assert plan.memory.total > 0
        assert 0 < plan.utilisation < 1
        node = min(ranks, plan.job.machine.ranks_per_node)
        device = "cpu" if plan.job.machine.host.shared else "cuda"
        resolved(config, ranks, node, device=device, device_bytes=int(plan.job.machine.memory))


def test_a_plan_recomputes_whole_blocks_where_memory_is_short() -> None:
    job = asked(run_of({"transformers": LLAMA}), "dgx-a100", 2, [])
    roomy = search(job, best=1)[0]
    tight = asked(run_of({"transformers": LLAMA}), "dgx-a100", 2, [f"memory={int(0.8 * roomy.memory.total / 0.92)}"])
    found = search(tight, best=1)[0]
    assert found.job.recompute <= {"block"}
    assert found.step.seconds >= roomy.step.seconds
    assert found.memory.total < roomy.memory.total


def test_recomputation_repeats_the_forward_pass() -> None:
    job = asked(run_of({"transformers": LLAMA}), "dgx-a100", 8, [])
    plain, again = step_time(job), step_time(job.changed(recompute=["block"]))
    ((block, _),) = costs_of(job).modules[0].values()
    assert again.seconds - plain.seconds == pytest.approx(job.microbatches * 4 * block.forward.seconds)


def test_recomputation_of_modules_repeats_their_forward_passes() -> None:
    job = asked(run_of({"transformers": LLAMA}), "dgx-a100", 8, [])
    plain, costs = step_time(job).seconds, costs_of(job)
    parts, ((block, _),) = costs.inside(0), costs.modules[0].values()
    assert set(parts) == {"norm", "attention", "mlp"}
    for kind, (passes, _) in parts.items():
        again = step_time(job.changed(recompute=[kind])).seconds
        assert again - plain == pytest.approx(job.microbatches * 4 * passes.forward.seconds)
    beside = block.forward.seconds - sum(passes.forward.seconds for passes, _ in parts.values())
    assert 0 < beside < 0.1 * block.forward.seconds  # the residual stream's additions


def test_the_largest_model_needs_our_own_modules() -> None:
    with pytest.raises(UserError, match="--largest needs one of the library's own models"):
        largest(asked(run_of({"transformers": LLAMA}), "dgx-a100", 8, []))


def test_teachers_may_be_adapted_and_own() -> None:
    """Distillation adds the teacher's forward pass, whichever modules the teacher has."""
    job = asked(run_of(OWN), "dgx-a100", 8, [])

    def seconds(model: dict[str, Any]) -> float:
        teacher: Architecture = run_of(model).model
        return step_time(Job(job.config, job.mesh, job.machine, teachers=(teacher,))).seconds

    alone = step_time(job).seconds
    own, adapted = seconds(OWN), seconds({"transformers": LLAMA})
    assert alone < own < adapted < 3 * alone


def test_own_models_stay_as_they_are_declared() -> None:
    model = ModelConfig.model_validate(OWN)
    assert isinstance(costs_of(asked(run_of(OWN), "dgx-a100", 8, [])).model, ModelConfig)
    assert model.refuse_ways(3) is None
