"""The choice of the token dispatcher for `moe.dispatch: auto`."""

from optimus.comm.algorithms import Measured
from optimus.config import RunConfig
from optimus.mesh import Mesh
from optimus.parallel.dispatch.choice import dispatcher
from optimus.resolve.decision import Decided
from optimus.resolve.precision import DTYPES


def dispatch(config: RunConfig, mesh: Mesh, measured: Measured | None) -> Decided:
    """Decides on the token dispatcher."""
    if config.moe.dispatch != "auto":
        return Decided()
    train = config.train
    tokens = train.micro_batch * train.sequence_length // (mesh.cp * mesh.tp)
    itemsize = DTYPES[train.precision].itemsize
    found = dispatcher("auto", config.model, mesh, tokens, itemsize, measured)
    return Decided({"moe.dispatch": found}, "its collectives take less time")
