"""Training whose collectives are rounds of group calls, as on an accelerator by measurement, equals one process."""

from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import yaml

from helpers.another_backend import another_backend
from helpers.drawing import config_of
from helpers.equality import Trained, compare, train_steps
from helpers.sweep import in_turns
from optimus.comm.exchange import GroupedChannel
from optimus.testing import run_ranks

STEPS = 3
# Algorithms by the shape of a group.
CHOSEN = {"2x2": "doubling+ring", "1x2": "doubling", "2x1": "doubling", "1x4": "ring", "4x1": "doubling"}


class Case(NamedTuple):
    """A model, and a layout of 4 ranks."""

    model: str
    sections: dict[str, Any]
    per_node: int


CASES = {
    "data": Case("dense", {"parallel": {}}, 2),
    "sharded parameters": Case("dense", {"state": {"chunk": 2000, "shard": "parameters"}}, 2),
    "tensor": Case("dense", {"parallel": {"tensor": 2}}, 2),
    "tensor on two nodes": Case("dense", {"parallel": {"tensor": 4}}, 2),
    "pipeline": Case("dense", {"parallel": {"pipeline": 2}}, 2),
    "context": Case("dense", {"parallel": {"context": 2}}, 4),
    "experts": Case("moe", {"parallel": {"expert": 2}}, 1),
}


def machine_file(folder: Path, per_node: int) -> Path:
    curve = {"sizes": [1.0], "seconds": [1.0]}
    curves = {shape: {name: curve} for shape, name in CHOSEN.items()}
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    path = folder / "machine.yaml"
    path.write_text(yaml.safe_dump({"ranks_per_node": per_node, "collectives": dict.fromkeys(kinds, curves)}))
    return path


def by_group_calls(config: dict[str, Any], per_node: int) -> tuple[Trained, int]:
    """Returns the training, and the number of rounds."""
    post, calls = GroupedChannel.post, [0]

    def counted(*args: Any) -> Any:
        calls[0] += 1
        return post(*args)

    with another_backend(), mock.patch.object(GroupedChannel, "post", counted):
        return train_steps(config, STEPS, per_node), calls[0]


@pytest.mark.parametrize("name", in_turns([*CASES], 3))
def test_equals_one_process(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    config = config_of(case.model, **case.sections)
    alone = {key: value for key, value in config.items() if key not in ("parallel", "state")}
    right = train_steps(alone, STEPS)
    machine = {"collectives": {"machine": str(machine_file(tmp_path, case.per_node))}}
    for rank, (found, calls) in enumerate(run_ranks(by_group_calls, 4, config | machine, case.per_node)):
        assert calls > 10 * STEPS
        compare(found, right, f"{name}, rank {rank}", 2e-5)
