"""What a rank will hold, planned on meta tensors: no memory and no process group, for any number of ranks."""

from optimus.config import RunConfig
from optimus.state.plan import bytes_by_kind
from optimus.train.run import mesh_of, planned_chunks


def state_bytes(config: RunConfig, ranks: int, rank: int) -> dict[str, int]:
    """Bytes that `rank` of `ranks` will hold at rest, by kind (parameters, gradients, master, moments)."""
    (plans,) = planned_chunks(config, mesh_of(config, ranks), [rank])
    return bytes_by_kind(plans)
