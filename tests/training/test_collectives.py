"""Measurements that choose the collective algorithms: read from a machine file and kept in the run folder."""

from pathlib import Path

import pytest
import torch
import yaml

from helpers.drawing import config_of
from optimus.comm.exchange import AS_THEY_ARE, Rounded
from optimus.config import RunConfig, load_config
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.training.collectives import keep, measured_collectives, partial_sums

CURVES = {"2x2": {"direct": {"sizes": [1e3], "seconds": [2e-3]}, "ring": {"sizes": [1e3], "seconds": [1e-3]}}}


def run_of(folder: Path, machine: Path | None = None) -> RunConfig:
    sections = {} if machine is None else {"collectives": {"machine": str(machine)}}
    return load_config(config_of("dense", **sections), [f"train.output={folder}"])


def written(path: Path, **values: object) -> Path:
    path.write_text(yaml.safe_dump({"name": "here", "memory": 1e9, "ranks_per_node": 2} | values))
    return path


def test_measurements_are_kept_with_the_run(tmp_path: Path) -> None:
    machine = written(tmp_path / "machine.yaml", collectives={"all_gather": CURVES})
    config = run_of(tmp_path, machine)
    measured, said = measured_collectives(config, Mesh(dp=2), False)
    assert measured is not None
    assert said == []
    assert measured.model_dump(exclude_defaults=True) == {"all_gather": CURVES}
    keep(measured, tmp_path)
    written(machine, collectives={"all_gather": {}})  # the machine has been measured again
    assert measured_collectives(config, Mesh(dp=2), True) == (measured, [])
    assert measured_collectives(run_of(tmp_path), Mesh(dp=2), True) == (measured, [])


def test_by_default_there_are_none(tmp_path: Path) -> None:
    assert measured_collectives(run_of(tmp_path), Mesh(dp=2), True) == (None, [])
    keep(None, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_other_nodes_is_named(tmp_path: Path) -> None:
    machine = written(tmp_path / "machine.yaml", collectives={"all_gather": CURVES})
    measured, said = measured_collectives(run_of(tmp_path, machine), Mesh(dp=4), False)
    assert measured is None
    assert said == [
        f"collectives.machine: {machine} describes nodes of 2 ranks, but the nodes of this run have 4; the run uses the "
        "default algorithms",
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, r"machine\.yaml has no measured collectives; `optimus bench collectives --write"),
        ({"collectives": {"all_gather": {"2x2": {"rign": CURVES["2x2"]["ring"]}}}}, r"no algorithm 'rign'.*ring"),
        ({"collectives": {"all_gather": {"2*2": {}}}}, r"'2\*2' is not a group's shape"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, values: dict[str, object], message: str) -> None:
    machine = written(tmp_path / "machine.yaml", **values)
    with pytest.raises(UserError, match=message):
        measured_collectives(run_of(tmp_path, machine), Mesh(dp=2), False)


def test_partial_sums(tmp_path: Path) -> None:
    assert partial_sums(run_of(tmp_path)) is AS_THEY_ARE
    config = load_config(config_of("dense", collectives={"partial_sums": "bfloat16"}))
    assert isinstance(codec := partial_sums(config), Rounded)
    assert codec.form(3, torch.float32) == (3, torch.bfloat16)
