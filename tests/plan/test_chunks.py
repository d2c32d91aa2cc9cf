"""The planner's chunks are those of the run."""

import itertools

import pytest

from helpers.sweep import in_turns
from optimus.config.tree import StateConfig, shard_widths
from optimus.mesh import Mesh
from optimus.plan.chunks import _sharding, chunk_groups, chunk_plans, held_in
from optimus.plan.job_builder import as_configured, asked, configured
from optimus.plan.memory import ranks_of
from optimus.plan.proposal import run_of
from optimus.resolve.memory import state_specs_of
from optimus.state.plan import ChunkPlan, shard_partitions

MODELS = {
    "dense": ["mula-tiny"],
    "tied": ["mula-tiny", "model.tie_embeddings=true"],
    "experts": ["mula-tiny-moe"],
    "first-dense": ["mula-tiny-moe", "model.family=deepseek_v3", "model.dense_layers=1", "model.intermediate=768"],
    "alternating": [
        "mula-tiny-moe",
        "model.family=qwen3_moe",
        "model.sparse_every=2",
        "model.layers=7",
        "model.intermediate=768",
    ],
}
LAYOUTS = {
    "data": [],
    "tensor": ["parallel.tensor=2"],
    "grid": ["parallel.tensor=[2, 2]"],
    "pipeline": ["parallel.pipeline=2"],
    "rounds": ["parallel.pipeline=2", "parallel.schedule=interleaved-1f1b", "parallel.stages_per_rank=2"],
    "v": ["parallel.pipeline=2", "parallel.schedule=zbv", "parallel.stages_per_rank=2"],
    "stride": ["parallel.pipeline=2", "parallel.pipeline_stride=4"],
    "vocabulary": ["parallel.pipeline=2", "parallel.vocabulary=true"],
    "layers": [
        "parallel.tensor=4",
        "model.heads=4",
        "train.micro_batch=4",
        "parallel.layers=[{layers: 1-2, tensor: 1}, {layers: 0, tensor: 2}]",
    ],
    "layers-pipeline": [
        "parallel.tensor=2",
        "train.micro_batch=2",
        "parallel.pipeline=2",
        "parallel.layers=[{layers: 1, tensor: 1}]",
    ],
    "expert": ["parallel.expert=4"],
    "expert-grid": ["parallel.tensor=[2, 2]", "parallel.expert=4"],  # replicas of norms are unevenly spaced
    "expert-tensor": ["parallel.tensor=2", "parallel.expert=2", "parallel.expert_tensor=2"],
    "expert-layers": [
        "parallel.tensor=4",
        "model.heads=4",
        "train.micro_batch=4",
        "parallel.expert=2",
        "parallel.expert_tensor=2",
        "parallel.layers=[{layers: 1, tensor: 2}, {layers: 2-3, tensor: 1}]",
    ],
}
STATES = {
    "none": [],
    "optimizer": ["state.shard=optimizer"],
    "over-data": ["state.shard=optimizer", "state.shard_over=data"],
    "near": ["state.shard=parameters", "state.shard_ranks={parameters: 2, gradients: 2}"],
    "parameters": ["state.shard=parameters", "state.chunk=100000"],
    "small": ["state.shard=parameters", "state.unsharded_below=70000", "state.chunk_sizes=[1M,3M]"],
    "small on the device": ["state.shard=optimizer", "state.offload=all", "state.unsharded_below=70000"],
    "muon": ["state.shard=gradients", "optimizer.name=muon"],
    "frozen": ["state.shard=parameters", "train.freeze=[embedding]"],
    "host": ["state.shard=optimizer", "state.offload=all", "state.resident_fraction=0.5", "train.precision=bfloat16"],
    "pruned": ["state.shard=optimizer", "pruning.sparsity=0.5", "pruning.at=[0, 3]"],
    "pruned later": ["state.shard=optimizer", "pruning.sparsity=0.5", "pruning.at=[3, 5]", "train.precision=float32"],
}
CASES = [
    case
    for case in itertools.product(MODELS, LAYOUTS, STATES)
    if not case[1].startswith("expert") or case[0] not in ("dense", "tied")
]


def told(plan: ChunkPlan) -> tuple[object, ...]:
    """Returns the properties of a chunk that do not depend on the names of parameters and axes."""
    ranks = tuple(step.ranks for step in plan.shard_steps)
    return plan.size, tuple(plan.borders), ranks, plan.replica_count, plan.depths, plan.rule, plan.buffers, plan.mask


@pytest.mark.parametrize(("model", "layout", "state"), in_turns(CASES))
def test_chunks_of_a_representative_rank_are_those_of_the_run(model: str, layout: str, state: str) -> None:
    """Chunks agree on one rank of each pipeline rank, at the beginning and after each pruning."""
    preset, *shape = MODELS[model]
    config = configured(preset, ["train.global_batch=64", *shape, *LAYOUTS[layout], *STATES[state]], 8)
    job = as_configured(asked(config, "dgx-a100", 8, []))
    run = run_of(job)
    shares = job.config.pruning.shares() if job.config.pruning is not None else [None]
    for rank, ours in zip(run.stage_ranks, ranks_of(job)):
        for unpruned, state_spec in zip(shares, state_specs_of(run), strict=True):
            own = [told(plan) for counts in held_in(job, ours.stages) for plan in chunk_plans(job, counts, unpruned)]
            assert sorted(own, key=str) == sorted(map(told, run.chunk_plans(rank, state_spec=state_spec)), key=str)
        last = run.chunk_plans(rank, state_spec=state_specs_of(run)[-1])
        held = [plan for group in chunk_groups(job, ours.stages) for plan in group.plans]
        assert sum(plan.updated for plan in held) == sum(plan.updated for plan in last)


@pytest.mark.parametrize(
    ("mesh", "shard_ranks"),
    [
        (Mesh(dp=8, ep=4, ranks_per_node=4), None),
        (Mesh(dp=16, ep=4, tp=2, ranks_per_node=4), None),
        (Mesh(dp=16, ep=4), 2),  # neighbours of each group of experts shard, so replicas are in runs of four
        (Mesh(pp=2, dp=16, ep=4, pipeline_stride=8), None),
        (Mesh(pp=2, dp=16, ep=4, pipeline_stride=8), 2),
        (Mesh(pp=2, dp=16, ep=4, pipeline_stride=4), 2),
    ],
)
@pytest.mark.parametrize("over", ["data", "replicas"])
def test_the_ranks_that_update_the_same_elements_are_those_of_the_run(
    mesh: Mesh, shard_ranks: int | None, over: str
) -> None:
    options = StateConfig(shard="optimizer", shard_over=over, shard_ranks=shard_ranks)  # type: ignore[arg-type]
    *_, copies = shard_partitions(mesh, ("dp",), options)
    *_, group, _ = _sharding(("dp",), mesh, over == "data", shard_widths("optimizer", shard_ranks))
    near = group.near or group.size
    placed = [i % near * group.stride + i // near * group.far for i in range(group.size)]
    assert placed == list(copies.group(0))
