"""A run makes the groups that `run_groups` predicts, and connects the predicted groups for messages."""

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from helpers.drawing import MODELS, short_run
from optimus.config import load_config
from optimus.pipeline.executor import links_of
from optimus.pipeline.schedule import Kind, partner
from optimus.resolve.groups import communicators, run_groups
from optimus.resolve.parameters import full_model, layouts_of
from optimus.resolve.ranks import mesh_of
from optimus.resolve.stages import schedule_of
from optimus.testing import run_ranks
from optimus.testing.steps import Steps

LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {  # ranks, model, sections
    "one rank": (1, MODELS["moe"], {}),
    "data": (4, MODELS["dense"], {"state": {"shard": "optimizer"}}),
    "nested shards": (
        8,
        MODELS["dense"],
        {"state": {"shard": "parameters", "shard_ranks": {"parameters": 2, "gradients": 4, "optimizer": 8}}},
    ),
    "shards over part": (
        4,
        MODELS["moe"],
        {"state": {"shard": "gradients", "shard_ranks": 2}, "parallel": {"expert": 2}},
    ),
    "tensor": (8, MODELS["dense"], {"parallel": {"tensor": [2, 2]}}),
    "blocks of matrices": (8, MODELS["dense"], {"parallel": {"tensor": [2, 2]}, "optimizer": {"name": "muon"}}),
    "expert": (
        4,
        MODELS["moe"],
        {"parallel": {"expert": 2, "tensor": 2, "expert_tensor": 2}, "moe": {"dispatch": "allgather"}},
    ),
    "tied ends": (6, MODELS["tied dense"], {"parallel": {"pipeline": 3}, "state": {"shard": "optimizer"}}),
    "ends on one rank": (
        2,
        MODELS["tied"] | {"layers": 4},
        {"parallel": {"pipeline": 2, "schedule": "zbv", "stages_per_rank": 2}},
    ),
    "vocabulary": (4, MODELS["tied"], {"parallel": {"pipeline": 2, "vocabulary": True}}),
    "context": (4, MODELS["dense"], {"parallel": {"context": 2}, "state": {"shard": "parameters"}}),
    "unclipped": (2, MODELS["dense"], {"optimizer": {"clip_norm": None}}),
    "unclipped stages": (4, MODELS["dense"], {"parallel": {"pipeline": 2}, "optimizer": {"clip_norm": None}}),
}


def made(run: dict[str, Any], backend: str) -> tuple[list[list[int]], list[list[int]]]:
    """Returns (the groups that this rank makes, the predicted groups) for a backend; with Gloo also trains a step."""
    calls: list[list[int]] = []
    real = dist.new_group

    def noted(ranks: list[int], **options: Any) -> Any:
        calls.append(ranks)
        return real(ranks, **options | {"backend": "gloo"})

    with mock.patch.object(dist, "new_group", noted), mock.patch.object(dist, "get_backend", return_value=backend):
        steps = Steps(run)
        if backend == "gloo":
            steps.train()
    mesh, rank = steps.groups.mesh, steps.groups.rank
    layouts = layouts_of(full_model(steps.config), steps.config)
    said: list[list[int]] = []
    for each in run_groups(steps.config, mesh, layouts, tags=backend == "gloo"):
        if each.apart or len(each.partition) > 1:  # the group of all ranks exists already
            said += (each.apart or 1) * [each.partition.group(rank)]
    return sorted(calls), sorted(said)


@pytest.mark.swept
@pytest.mark.parametrize("backend", ["gloo", "another"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_makes_the_groups_that_are_said(name: str, backend: str) -> None:
    ranks, model, sections = LAYOUTS[name]
    found = run_ranks(made, ranks, short_run(model, context=24, **sections), backend)
    for rank, (calls, said) in enumerate(found):
        assert calls == said
        assert all(rank in group for group in calls)
    assert len({len(calls) for calls, _ in found}) == 1  # torch's names of groups require equal numbers on all ranks


@pytest.mark.parametrize(
    "parallel",
    [
        {"pipeline": 4},
        {"pipeline": 2, "schedule": "interleaved-1f1b", "stages_per_rank": 4},
        {"pipeline": 4, "schedule": "zbv", "stages_per_rank": 2},
    ],
    ids=lambda parallel: parallel.get("schedule", "1f1b"),
)
def test_each_direction_between_neighbours_has_a_communicator(parallel: dict[str, Any]) -> None:
    """Each rank has a communicator for every stream in which the schedule sends or receives (`Links`)."""
    config = load_config(short_run(MODELS["dense"] | {"layers": 8}, context=24, parallel=parallel))
    mesh, schedule = mesh_of(config, config.parallel.pipeline), schedule_of(config, 8)
    said = communicators(config, mesh, layouts_of(full_model(config), config), range(mesh.pp))
    connected = []
    for actions, theirs in zip(schedule.actions, said, strict=True):
        transfers = [action for action in actions if not action.kind.computes]
        receives = [partner(action) if action.kind.sends else action for action in transfers]
        streams = {(receive.stage, receive.kind) for receive in receives}
        assert [(each.size, each.number) for each in theirs if each.what == "messages of pp"] == [(2, len(streams))]
        connected.append({2 * stage + (kind is Kind.RECEIVE_BACKWARD) for stage, kind in streams})
    links = links_of(schedule)  # connected at the beginning, one after the other
    assert links == sorted(set(links))
    assert connected == [{stream for stream, ranks in links if rank in ranks} for rank in range(mesh.pp)]
