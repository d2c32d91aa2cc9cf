"""The planner's blocks have the projections, parameters, FLOPs and state of the modules, for every model."""

import pytest

from benchmarks.published.jobs import job
from benchmarks.published.profiles import FrameworkProfile
from benchmarks.published.program import framework_memory
from helpers.sweep import in_turns
from optimus.config import ModelConfig, preset_names, resolve_model
from optimus.config.load import model_config_from
from optimus.mesh import Mesh
from optimus.model.count import count_parameters, flops_per_token
from optimus.plan.blocks import Projection, blocks_of
from optimus.plan.chunks import chunk_groups
from optimus.plan.declared_costs import DeclaredCosts
from optimus.plan.machine import load_machine
from optimus.plan.search import search
from optimus.plan.step import counts_of, step_time

SIZES = {"hidden": 64, "layers": 4, "heads": 4, "intermediate": 96, "vocab": 128}
# No compressed queries; values are wider than the 16 columns of keys.
LATENT = {"keys": 32, "rotary": 8, "value": 24}
EXPERTS = {"experts": 8, "experts_per_token": 2, "expert_intermediate": 48, "shared_experts": 2}
MODELS = {name: model_config_from(resolve_model(name)["model"], name) for name in preset_names()} | {
    "pyramid": ModelConfig.model_validate(SIZES | {"family": "pr_moe", "experts_by_layer": [0, 4, 4, 8]}),
    "latent": ModelConfig.model_validate(
        SIZES | EXPERTS | {"family": "deepseek_v3", "latent": LATENT, "dense_layers": 1}
    ),
    "every second": ModelConfig.model_validate(
        SIZES
        | {"family": "qwen3_moe", "kv_heads": 2, "experts": 8, "experts_per_token": 2, "expert_intermediate": 24}
        | {"sparse_every": 2}
    ),
}
PLAIN = FrameworkProfile(about="a test", gradient=2.0)
MACHINE = load_machine("dgx-a100")


@pytest.mark.parametrize("name", MODELS)
def test_products_are_those_that_are_counted(name: str) -> None:
    model = MODELS[name]
    blocks, chosen, met = blocks_of(model), model.experts_per_token or 0, model.vocab * model.hidden
    for layer in model.alike:
        block = blocks[layer]
        met += sum(each.inputs * each.outputs for each in (*block.attention, *block.dense, *chosen * block.expert))
        met += model.hidden * model.experts_of(layer)  # the router
    assert 6 * met == flops_per_token(model, 0)
    scores = model.layers * model.heads * (model.query_size + model.value_size)
    assert flops_per_token(model, 1) - flops_per_token(model, 0) == 6 * scores


def test_norms_are_those_of_the_units() -> None:
    places = {"before": 2, "after": 2, "both": 4}
    llama = SIZES | {"family": "llama"}
    models = {place: ModelConfig.model_validate(llama | {"norm_place": place}) for place in places}
    assert {place: blocks_of(model)[0].norms for place, model in models.items()} == places
    times = [
        step_time(job(model, MACHINE, Mesh(), 512, 1, 8, PLAIN)).terms["memory_bound"] for model in models.values()
    ]
    assert times[0] == times[1] < times[2]


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_state_are_those_that_are_counted(name: str) -> None:
    """Gradients of two bytes make 16 bytes a parameter."""
    model = MODELS[name]
    (counts,), parameters = counts_of(model, (model.layers,)), count_parameters(model).total
    asked = job(model, MACHINE, Mesh(), 512, 1, 8, PLAIN)
    groups = chunk_groups(asked, (counts,))
    slots = [slot for group in groups for plan in group.plans for slot in plan.slots]
    assert sum(slot.shape.numel() for slot in slots) == parameters
    elements = sum(group.elements for group in groups)  # each slot begins at a multiple of 32
    assert parameters <= elements < parameters + 32 * len(slots)
    parts = framework_memory(asked, PLAIN).parts
    assert sum(parts[kind] for kind in ("parameters", "gradients", "optimizer")) == 16 * elements


def test_grouped_heads_are_one_product() -> None:
    block = blocks_of(ModelConfig.model_validate(SIZES | {"family": "llama", "kv_heads": 2}))[0]
    assert block.attention == (Projection(64, 64 + 2 * 32, "outputs"), Projection(64, 64, "inputs"))
    assert block.dense == (Projection(64, 2 * 96, "outputs"), Projection(96, 64, "inputs"))
    assert block.expert == ()


def test_latent_attention_without_compressed_queries() -> None:
    blocks = blocks_of(MODELS["latent"])
    attention = (
        Projection(64, 4 * (16 + 8), "outputs"),
        Projection(64, 32 + 8, "nothing"),
        Projection(32, 4 * (16 + 24), "outputs"),
        Projection(4 * 24, 64, "inputs"),
    )
    assert [block.attention for block in blocks.values()] == [attention, attention]
    assert blocks[0].dense == (Projection(64, 2 * 96, "outputs"), Projection(96, 64, "inputs"))
    assert blocks[1].expert == (Projection(64, 2 * 48, "outputs"), Projection(48, 64, "inputs"))
    # The dense projections of a sparse layer are those of its shared experts.
    assert blocks[1].dense == (Projection(64, 4 * 48, "outputs"), Projection(2 * 48, 64, "inputs"))


def test_blocks_are_counted_by_their_shapes() -> None:
    first, last = counts_of(MODELS["pyramid"], (3, 1))
    assert [first.count_at(layer) for layer in (0, 1, 3)] == [1, 2, 0]
    assert [last.count_at(layer) for layer in (0, 1, 3)] == [0, 0, 1]
    assert (first.blocks, last.blocks) == (3, 1)
    (every,) = counts_of(MODELS["every second"], (4,))
    assert (every.count_at(0), every.count_at(1)) == (2, 2)
    (windows,) = counts_of(MODELS["gemma-2-2b"], (26,))
    assert (windows.count_at(0), windows.count_at(1)) == (13, 13)


def test_scores_inside_a_window() -> None:
    """The causal half of a square of four windows has 8 squares of a window.

    Inside the windows are half of each window's own square and half of the one before.
    """
    model = MODELS["gemma-2-2b"].model_copy(update={"window": 512})
    found = DeclaredCosts(job(model, MACHINE, Mesh(), 2048, 1, 8, PLAIN)).scores
    inside, whole = (found[layer].forward.attention - MACHINE.kernel_latency for layer in (0, 1))
    assert inside / whole == pytest.approx((4 * 0.5 + 3 * 0.5) / 8)


def test_a_pyramid_takes_as_long_as_its_layers() -> None:
    """The time lies between those of the fewest and of the most experts, and is their mean with equally many layers of
    each."""
    shape = SIZES | {"family": "pr_moe", "hidden": 2048, "intermediate": 1024}
    few, most, both = (
        ModelConfig.model_validate(shape | {"experts_by_layer": layers})
        for layers in ([16] * 4, [128] * 4, [16, 16, 128, 128])
    )
    times = [step_time(job(model, MACHINE, Mesh(), 512, 1, 8, PLAIN)).seconds for model in (few, most, both)]
    assert times[0] < times[2] < times[1]
    assert times[2] == pytest.approx((times[0] + times[1]) / 2, rel=1e-3)


@pytest.mark.parametrize("name", in_turns(["pyramid", "latent", "every second"], 2, always=0))
def test_all_kinds_of_models_are_planned(name: str) -> None:
    plan, *_ = search(job(MODELS[name], MACHINE, Mesh(dp=8), 512, 1, 2))
    assert plan.job.mesh.size == 8
    assert 0 < plan.utilisation < 1
