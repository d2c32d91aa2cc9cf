"""The search finds the plans of an exhaustive search, and explains why a job has no plan."""

import random
import re
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.published.jobs import changed, job
from helpers.sweep import in_turns
from optimus.config import ModelConfig, load_config
from optimus.config.load import model_config_from, resolve_model
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.plan.candidate_meshes import candidates
from optimus.plan.job import Job, job_of
from optimus.plan.job_builder import configured
from optimus.plan.links import even
from optimus.plan.machine import Communicator, Machine, load_machine
from optimus.plan.memory import communicators_of, device_capacity, memory_of, usable
from optimus.plan.memory_fit import Timed, placements, recomputations, sharded
from optimus.plan.prediction import Plan, predict
from optimus.plan.profile import Profile
from optimus.plan.proposal import layout_of
from optimus.plan.search import search
from optimus.plan.step import least_time, step_time

SPARSE = ModelConfig(
    family="olmoe", hidden=512, layers=6, heads=4, intermediate=512, vocab=1024, experts=8, experts_per_token=2
)
DENSE = ModelConfig(family="olmo", hidden=512, layers=6, heads=4, intermediate=2048, vocab=1024)


GROWING = ModelConfig(
    family="pr_moe",
    hidden=512,
    layers=6,
    heads=4,
    intermediate=512,
    vocab=1024,
    experts_by_layer=[0, 0, 4, 4, 8, 8],
    expert_intermediate=256,
)


def machine(**changes: Any) -> Machine:
    """Returns a machine whose communicators have buffers as small, relative to NCCL's, as its memory is."""
    buffers = Communicator(buffer=2.0**14)
    return load_machine("dgx-a100").model_copy(update={"communicator": buffers, **changes})


def question(model: ModelConfig, ranks: int = 16, batch: int = 32, **changes: float) -> Job:
    asked = job(model, machine(**changes), Mesh(dp=ranks), 1024, 1, 1)
    return asked.changed(train={"global_batch": batch})


def everything(asked: Job) -> list[Timed]:
    """Returns every layout that fits, the fastest first."""
    layouts = [
        placed
        for candidate in candidates(asked.undivided)
        for shard, width in sharded(candidate.job)
        for recompute in recomputations(asked.model)
        for placed in placements(changed(candidate.job, shard=shard, shard_ranks=width, recompute=recompute))
    ]
    fitting = [layout for layout in layouts if memory_of(layout).total <= device_capacity(layout)]
    return sorted((Timed(step_time(layout).seconds, layout) for layout in fitting), key=lambda each: each.seconds)


def division(plan: Plan | Timed) -> tuple[int, ...]:
    mesh = plan.job.mesh
    return mesh.pp, mesh.tp_out, mesh.tp_in, mesh.cp, mesh.ep, mesh.etp


@pytest.mark.parametrize(
    "asked",
    in_turns(
        [
            question(DENSE, 4, 8),
            # So little memory that state is sharded and activations are recomputed
            question(DENSE, 8, 8, memory=4.2e8),
            question(SPARSE, 4, 4, memory=8e8),
            question(DENSE, 8, 8, alone=4.0, overlap=0.0),
            question(SPARSE, 4, 4, memory=8e8).changed(moe={"dispatch": "allgather"}, recompute_collectives="repeat"),
        ],
        2,
    ),
)
def test_nothing_faster_is_left_out(asked: Job) -> None:
    best: dict[tuple[int, ...], Timed] = {}
    for each in everything(asked):
        best.setdefault(division(each), each)
    expected = list(best.values())[:5]
    found = search(asked, 5)
    assert [plan.step.seconds for plan in found] == pytest.approx([each.seconds for each in expected])
    assert [division(plan) for plan in found] == [division(each) for each in expected]


@pytest.mark.in_turn(0, 3)
def test_what_a_configuration_says_is_part_of_every_plan() -> None:
    asked = question(SPARSE, 8, 8).changed(
        moe={"dispatch": "allgather"}, parallel={"context_method": "ulysses"}, state={"reshard_after_forward": False}
    )
    plans = search(replace(asked, imbalance=1.5), 1000)
    assert any(plan.job.mesh.cp > 1 for plan in plans)
    for found in (plan.job for plan in plans):
        assert (found.config.moe.dispatch, found.parallel.context_method, found.imbalance) == (
            "allgather",
            "ulysses",
            1.5,
        )
        assert not found.state.reshard_after_forward
        assert SPARSE.heads // found.mesh.tp_out % found.mesh.cp == 0  # Ulysses divides the heads


@pytest.mark.in_turn(0, 3)
def test_a_vocabulary_that_does_not_divide_is_divided_all_the_same() -> None:
    even, odd = (
        {plan.job.mesh.tp_out for plan in search(question(DENSE.model_copy(update={"vocab": vocab}), 4, 8), 1000)}
        for vocab in (1024, 1023)
    )
    assert odd == even > {1, 2}


def test_a_small_memory_is_met_by_sharding_and_recomputation() -> None:
    roomy, tight = search(question(DENSE, 8, 16), 1)[0], search(question(DENSE, 8, 16, memory=4.2e8), 1)[0]
    assert roomy.job.state.shard == "none" or roomy.step.seconds < tight.step.seconds
    assert tight.job.state.shard != "none" or tight.job.recompute
    assert tight.memory.total <= 4.2e8 < roomy.memory.total


@pytest.mark.parametrize("shares", [{}, {"alone": 4.0, "overlap": 0.0}])
def test_a_bound_is_never_above_what_is_predicted(shares: dict[str, float]) -> None:
    for model in (DENSE, SPARSE):
        asked = question(model, **shares)
        ways = list(candidates(asked.undivided))
        for candidate in random.Random(0).sample(ways, min(60, len(ways))):
            for placed in placements(candidate.job):
                least = least_time(placed, candidate.timing.work)
                assert candidate.bound <= least * (1 + 1e-9)
                assert least <= step_time(placed).seconds * (1 + 1e-9), placed


def test_twelve_thousand_ranks_fill_whole_nodes() -> None:
    model = model_config_from(resolve_model("mula-220b-a10b")["model"], "")
    aurora = load_machine("aurora")
    with pytest.raises(UserError, match=r"^100 ranks do not fill nodes of 12 ranks \(aurora\): use 96 or 108$"):
        search(job(model, aurora, Mesh(dp=100), 4096, 1, 1))
    assert job(model, aurora, Mesh(dp=12288), 4096, 1, 1).checked().node_count == 1024


def test_a_batch_that_no_layout_divides() -> None:
    with pytest.raises(
        UserError, match=r"no layout divides a global batch of 3 sequences over 7 ranks: use a multiple of 7"
    ):
        search(question(DENSE, 7, 3))


def test_a_model_that_fits_nowhere() -> None:
    with pytest.raises(UserError, match=r"no layout fits: a rank of dgx-a100 has 1 MB, but every layout of ") as error:
        search(question(DENSE, 8, 16, memory=1e6))
    assert "the smallest known machine with this memory is laptop" in str(error.value)


def test_state_that_the_host_has_no_memory_for() -> None:
    asked = question(DENSE, 8, 16)
    host = asked.machine.host.model_copy(update={"memory": 3e7})
    asked = replace(asked, machine=asked.machine.model_copy(update={"host": host})).changed(state={"offload": "all"})
    with pytest.raises(
        UserError, match=r"a rank of dgx-a100 may take 3\.\d+ MB of its host's memory, but with "
    ) as error:
        search(asked)
    assert re.search(r"state\.offload=all every layout of 8 ranks takes at least [\d.]+ MB there: ", str(error.value))


# ---- Tensor-parallel groups across nodes ----


def test_tensor_parallel_groups_divide_a_node_or_fill_whole_nodes() -> None:
    """The search lists the grids that fit evenly, up to 8 nodes, and no others."""
    model = DENSE.model_copy(update={"hidden": 1536, "heads": 96, "kv_heads": 96, "intermediate": 6144, "vocab": 1536})
    asked = job(model, machine(ranks_per_node=6), Mesh(dp=96, ranks_per_node=6), 1152, 1, 1)
    asked = asked.changed(train={"global_batch": 96})
    found = {(each.timing.mesh.tp_out, each.timing.mesh.tp_in) for each in candidates(asked.undivided)}
    expected = {
        (out, inner)
        for out in range(1, 97)
        for inner in range(1, 97)
        if 96 % (out * inner) == 0  # of the ranks and of the heads
        and (6 % (out * inner) == 0 or ((out * inner) % 6 == 0 and out * inner <= 48))
        and (6 % out == 0 or out % 6 == 0)
        and 1536 % inner == 0
    }
    assert found == expected
    assert {(6, 2), (3, 8), (24, 1), (48, 1)} < found
    assert not {(4, 3), (8, 3), (16, 6), (96, 1)} & found


def test_a_group_across_nodes_is_found_where_it_is_fastest() -> None:
    """One rank a node and a fast network: the best plan has a group over several nodes (dissertation, section 5.1.2).

    One sequence is the whole batch, so neither data nor pipeline parallelism has work for more ranks.
    """
    network = load_machine("dgx-a100").network.model_copy(update={"bandwidth": 6e11, "latency": 1e-6, "taper": 1.0})
    single = machine(ranks_per_node=1, network=network, memory=4e10)
    wide = DENSE.model_copy(update={"hidden": 4096, "heads": 32, "kv_heads": 32, "intermediate": 16384, "layers": 2})
    asked = job(wide, single, Mesh(dp=4, ranks_per_node=1), 512, 1, 1)
    asked = asked.changed(Mesh(dp=4, ranks_per_node=1), train={"global_batch": 1})
    best, every = search(asked, 3)[0], everything(asked)
    assert best.job.mesh.tp > 1
    assert best.step.seconds == pytest.approx(every[0].seconds)
    assert all(best.step.seconds < each.seconds for each in every if each.job.mesh.tp == 1)


# ---- Places of stages, and nodes with unlike links ----


def test_stages_side_by_side_send_on_the_node_and_reduce_between_nodes() -> None:
    asked = replace(question(DENSE, 32, 32), machine=_thin(network=1e9))
    asked = changed(asked, Mesh(pp=4, dp=8, ranks_per_node=8), 4)
    together, beside = placements(asked)
    assert (together.mesh.pipeline_stride, beside.mesh.pipeline_stride) == (None, 1)
    apart, near = (step_time(each).terms for each in (together, beside))
    assert near["pipeline"] < apart["pipeline"]
    assert near["data_parallel"] > apart["data_parallel"]
    assert list(placements(changed(asked, Mesh(dp=32)))) == [changed(asked, Mesh(dp=32))]


def _thin(network: float, links: list[list[float]] | None = None) -> Machine:
    candidate = machine()
    return candidate.model_copy(
        update={"network": candidate.network.model_copy(update={"bandwidth": network, "links": links})}
    )


def clusters(kinds: list[int], near: float = 1e11, far: float = 1e9) -> list[list[float]]:
    """Returns links that are fast between nodes of one kind (even or odd) and slow between the kinds."""
    return [[near if (a - b) % 2 == 0 else far for b in kinds] for a in kinds]


@pytest.mark.in_turn(1, 3)
def test_nodes_of_two_clusters_are_put_in_order() -> None:
    """Neighbours in the order of ranks belong to one of the two clusters, whose nodes alternate.

    A step takes as long as with nodes that are already sorted, and less than in the given order.
    """
    links = clusters([0, 1, 2, 3])
    asked = replace(question(DENSE, 32, 32), machine=_thin(1e11, links))
    best = search(asked, 3)[0]
    assert best.job.nodes in [
        (0, 2, 1, 3),
        (0, 2, 3, 1),
        (2, 0, 1, 3),
        (2, 0, 3, 1),
        (1, 3, 0, 2),
        (1, 3, 2, 0),
        (3, 1, 0, 2),
        (3, 1, 2, 0),
    ]
    sorted_links = replace(asked, machine=_thin(1e11, clusters([0, 2, 1, 3])))
    assert best.step.seconds <= search(sorted_links, 3)[0].step.seconds * (1 + 1e-9)
    assert best.step.seconds <= step_time(replace(best.job, nodes=None)).seconds


def test_a_job_takes_the_nodes_that_are_near() -> None:
    """A job on two of four nodes takes the second and the fourth, which are near to each other."""
    links = clusters([0, 1, 2, 3])
    links[0][2] = links[2][0] = 2e9
    asked = replace(question(DENSE, 16, 16), machine=_thin(1e11, links))
    assert set(search(asked, 1)[0].job.nodes or ()) == {1, 3}
    with pytest.raises(
        UserError, match=r"64 ranks need 8 nodes of 8 ranks \(dgx-a100\), but network.links has 4 nodes"
    ):
        changed(asked, Mesh(dp=64)).checked()


def test_links_that_are_alike_change_nothing() -> None:
    asked = replace(question(DENSE, 32, 32), machine=_thin(1e11))
    alike = replace(asked, machine=_thin(1.0, [[1e11] * 4 for _ in range(4)]))
    assert even(alike.machine).network.bandwidth == 1e11
    assert [plan.step.seconds for plan in search(alike, 5)] == pytest.approx([p.step.seconds for p in search(asked, 5)])


# ---- The Optimus paper's layouts on 3,072 tiles of Aurora ----


PAPER = [  # pipeline ranks and expert ranks
    ("mula-1b", 1, 1),
    ("mula-7b-a1b", 1, 1),
    ("mula-20b-a2b", 1, 12),
    ("mula-100b-a7b", 4, 12),
    ("mula-220b-a10b", 8, 12),
]


def on_aurora(name: str) -> Job:
    """Returns the job with a sequence of 2,048 tokens for each tile and gradients reduced in bf16 (section 2.1)."""
    model = model_config_from(resolve_model(name)["model"], "")
    halved = Profile().model_copy(update={"gradient": 2.0, "reduced": 2.0})
    return job(model, load_machine("aurora"), Mesh(dp=3072), 2048, 1, 1, halved)


def test_the_papers_layout_of_mula_1b_is_among_the_ten_best() -> None:
    assert (1, 1, 1, 1, 1, 1) in map(division, search(on_aurora("mula-1b")))


@pytest.mark.parametrize(
    ("name", "pp", "ep", "recompute", "better"),
    [
        ("mula-7b-a1b", 1, 1, [], Mesh(pp=6, dp=512, ep=2, ranks_per_node=12)),
        ("mula-20b-a2b", 1, 12, [], Mesh(pp=12, dp=256, ep=2, ranks_per_node=12)),
        ("mula-100b-a7b", 4, 12, ["moe"], Mesh(pp=16, dp=192, ep=3, ranks_per_node=12)),
        ("mula-220b-a10b", 8, 12, ["norm", "attention", "moe"], Mesh(pp=24, dp=128, ep=4, ranks_per_node=12)),
    ],
)
def test_why_others_are_better(name: str, pp: int, ep: int, recompute: list[str], better: Mesh) -> None:
    """The paper's layouts lose most time to reducing gradients and sending tokens to experts (docs/planner.md).

    Smaller stages, fewer expert ranks and a schedule with a smaller bubble lose less, and fit.
    """
    asked = on_aurora(name)
    mesh = Mesh(pp=pp, dp=3072 // pp, ep=ep, ranks_per_node=12)
    paper = changed(asked, mesh, pp, sequence=False, shard="optimizer", recompute=recompute)
    other = changed(paper, better, better.pp, schedule="zbv", stages_per_rank=2, recompute=())
    theirs, found = predict(paper), predict(other)
    assert theirs.memory.total <= device_capacity(theirs.job)
    assert found.memory.total <= device_capacity(found.job)
    assert found.step.seconds < 0.85 * theirs.step.seconds
    moved = [sum(plan.step.terms[kind] for kind in ("data_parallel", "expert_parallel")) for plan in (theirs, found)]
    assert moved[1] < 0.75 * moved[0]


@pytest.mark.in_turn(2, 3)
def test_room_is_left_for_the_buffers_of_communicators() -> None:
    """The search leaves room for communicators: its fourth plan would take 76.5 GB without them, and 17 of them take
    3.8 GB."""
    asked = job_of(configured("mula-7b-a1b", [], 32), load_machine("dgx-h100"), Mesh(dp=32, ranks_per_node=8))
    plans, memory = search(asked, best=4), asked.machine.memory
    buffers = [communicators_of(plan.job)[1] for plan in plans]
    assert all(each > 0 for each in buffers)
    assert all(plan.memory.total + each <= 0.92 * memory for plan, each in zip(plans, buffers))
    assert [usable(asked.machine) - each for each in buffers] == [device_capacity(plan.job) for plan in plans]
    # With the memory that the first plan needs without communicators, another plan is best.
    tight = replace(asked, machine=asked.machine.model_copy(update={"memory": plans[0].memory.total / 0.92 + 1}))
    (plan,) = search(tight, best=1)
    assert plan.memory.total + communicators_of(plan.job)[1] <= 0.92 * tight.machine.memory
    assert layout_of(plan.job) != layout_of(plans[0].job)


@pytest.mark.parametrize("tiles", [384, 12_288])
@pytest.mark.parametrize(("name", "pp", "ep"), PAPER)
def test_communicators_of_the_papers_layouts(name: str, pp: int, ep: int, tiles: int) -> None:
    """A tile has at most 10 communicators, whose buffers take at most 3 GB, 5 % of its memory, on any number of tiles."""
    aurora = load_machine("aurora")
    mesh = Mesh(pp=pp, dp=tiles // pp, ep=ep, ranks_per_node=12, pipeline_stride=12 if pp > 1 else None)
    asked = job_of(configured(name, [], tiles), aurora, mesh)
    found, buffers = communicators_of(asked.changed(mesh, state={"shard": "optimizer"}))
    assert 1 <= sum(each.number for each in found) <= 10
    assert buffers <= 3e9 < 0.05 * aurora.memory


@pytest.mark.parametrize(
    ("model", "feed_forward"),
    [(DENSE, {"mlp"}), (SPARSE, {"moe"}), (GROWING, {"mlp", "moe"})],
    ids=["dense", "sparse", "growing"],
)
def test_what_is_recomputed_is_what_a_model_has(model: ModelConfig, feed_forward: set[str]) -> None:
    sets = recomputations(model)
    assert len(set(sets)) == 9
    assert {"norm", "attention", *feed_forward} in sets
    for kinds in sets:
        assert feed_forward <= kinds or not feed_forward & kinds
        tree = {"model": model.model_dump(exclude_unset=True), "data": {"path": "-"}, "recompute": sorted(kinds)}
        train = {"output": "-", "steps": 1, "global_batch": 8, "micro_batch": 8, "sequence_length": 64}
        assert set(load_config(tree | {"train": train}).recompute) == kinds


@pytest.mark.in_turn(2, 3)
def test_models_with_dense_layers_and_experts_are_planned_where_they_only_fit_recomputed() -> None:
    whole = search(question(GROWING, ranks=4, batch=16))[0]
    tight = search(question(GROWING, ranks=4, batch=16, memory=0.3 * whole.memory.total))
    assert any({"mlp", "moe"} <= plan.job.recompute for plan in tight)
