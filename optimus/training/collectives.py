"""Which algorithms the collectives of a run use: the measurements that it was given, kept in its folder."""

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

KEPT = "collectives.yaml"


class _MachineFile(Section):
    """What a run needs of one."""

    model_config = ConfigDict(extra="ignore")

    name: str = ""
    ranks_per_node: int
    collectives: Measured | None = None


def measured_collectives(config: RunConfig, mesh: Mesh, resume: bool) -> tuple[Measured | None, list[str]]:
    """(what a run chooses its algorithms by, what is to be said of it).

    A run that is resumed has what it began with. Raises `UserError` for a file that is not there or has no measurements.
    """
    kept, per_node = Path(config.train.output) / KEPT, mesh.ranks_per_node or mesh.size
    if resume and kept.exists():
        return read_section(kept, Measured), []
    if config.collectives.machine is None:
        return None, []
    path = user_path(config.collectives.machine)
    file = read_section(path, _MachineFile)
    if file.collectives is None:
        raise UserError(
            f"collectives.machine: {path} has no measured collectives; `optimus bench collectives --write {path}` on the "
            "ranks of the run adds them"
        )
    if file.ranks_per_node != per_node:
        return None, [
            f"collectives.machine: {path} is of nodes with {file.ranks_per_node} ranks, and these have {per_node}; defaults "
            "are used"
        ]
    return file.collectives, []


def keep(measured: Measured | None, folder: Path) -> None:
    """Write what the run chooses by into its folder."""
    if measured is not None:
        text = yaml.safe_dump(measured.model_dump(exclude_defaults=True), sort_keys=False)
        (folder / KEPT).write_text(text, encoding="utf-8")


def partial_sums(config: RunConfig) -> Codec:
    """How sums over the ranks of a node go to other nodes."""
    return AS_THEY_ARE if config.collectives.partial_sums == "float32" else Rounded(torch.bfloat16)
