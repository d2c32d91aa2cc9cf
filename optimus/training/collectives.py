"""Reads and writes the measurements from which a run chooses the algorithms of its collectives."""

from pathlib import Path

import torch
import yaml
from pydantic import ConfigDict

from optimus.comm.algorithms import Measured
from optimus.comm.exchange import AS_THEY_ARE, Codec, Rounded
from optimus.config import RunConfig
from optimus.config.load import read_section
from optimus.disk import user_path
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.section import Section

FILE = "collectives.yaml"


class _MachineFile(Section):
    """The fields of a machine file that a run reads."""

    model_config = ConfigDict(extra="ignore")

    name: str = ""
    ranks_per_node: int
    collectives: Measured | None = None


def measured_collectives(config: RunConfig, mesh: Mesh, resume: bool) -> tuple[Measured | None, list[str]]:
    """Returns (measurements, notes for the user). Without measurements (None), the run uses the default algorithms.

    A resumed run uses the measurements in the run's folder, if any. Raises `UserError` when the machine file has no
    measurements.
    """
    saved, per_node = Path(config.train.output) / FILE, mesh.ranks_per_node or mesh.size
    if resume and saved.exists():
        return read_section(saved, Measured, "file of measured collectives"), []
    if config.collectives.machine is None:
        return None, []
    path = user_path(config.collectives.machine)
    file = read_section(path, _MachineFile, "machine file")
    if file.collectives is None:
        raise UserError(
            f"collectives.machine: {path} has no measured collectives; `optimus bench collectives --write {path}` on the "
            "ranks of the run adds them"
        )
    if file.ranks_per_node != per_node:
        return None, [
            f"collectives.machine: {path} describes nodes of {file.ranks_per_node} ranks, but the nodes of this run have "
            f"{per_node}; the run uses the default algorithms"
        ]
    return file.collectives, []


def keep(measured: Measured | None, folder: Path) -> None:
    """Writes the run's measurements, if any, into `folder`."""
    if measured is not None:
        text = yaml.safe_dump(measured.model_dump(exclude_defaults=True), sort_keys=False)
        (folder / FILE).write_text(text, encoding="utf-8")


def partial_sums(config: RunConfig) -> Codec:
    """Returns the codec for partial sums sent between nodes."""
    return AS_THEY_ARE if config.collectives.partial_sums == "float32" else Rounded(torch.bfloat16)
