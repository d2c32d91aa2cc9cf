"""What a rank would hold, from the real parts of a run: the model on meta tensors, cut into stages, laid out on the real
mesh, planned in chunks, under the real schedule. It takes seconds where the planner's arithmetic takes microseconds, and is
what that arithmetic is checked with.
"""

from itertools import accumulate

from optimus.config import RunConfig
from optimus.errors import UserError
from optimus.parallel.activations import activation_bytes
from optimus.parallel.recompute import Recomputation
from optimus.pipeline.schedule import live_changes
from optimus.pipeline.simulation import simulate
from optimus.state.plan import bytes_by_kind
from optimus.train.collectives import with_dispatcher
from optimus.train.pipeline import partition_of, schedule_of
from optimus.train.recomputation import activation_shapes
from optimus.train.run import DTYPES, mesh_of, planned_chunks


def dry_run(config: RunConfig, ranks: int, rank: int, load: float = 1.0) -> dict[str, int]:
    """Bytes that `rank` of `ranks` holds, by kind: parameters, gradients, master, moments, activations (of all microbatches
    that the schedule keeps) and working (what a backward pass holds besides). Its experts have `load` times the mean number
    of tokens.

    Raises `UserError` when there is no such rank, or the model cannot be divided as configured.
    """
    if not 0 <= rank < ranks:
        raise UserError(f"--dry-run {rank}: the ranks are 0 to {ranks - 1}")
    mesh = mesh_of(config, ranks)
    config = with_dispatcher(config, mesh)
    found = bytes_by_kind(planned_chunks(config, mesh, [rank])[0])
    partition = partition_of(config, mesh, rank)
    stages = {
        stage: activation_bytes(
            config.model,
            Recomputation(tuple(config.recompute), config.recompute_every),
            layers=partition.blocks[stage],
            first=stage == 0,
            last=stage == len(partition.blocks) - 1,
            load=load,
            **activation_shapes(config, mesh, DTYPES[config.train.precision].itemsize),
        )
        for stage in partition.here
    }
    microbatches = max(1, config.train.global_batch // (mesh.dp * config.train.micro_batch))
    computed = simulate(schedule_of(config, microbatches)).computations[mesh.coordinate(rank, "pp")]
    changes = (change * stages[stage].kept for stage, change in live_changes(computed))
    return found | {
        "activations": max(accumulate(changes)),
        "working": max(each.peak - each.kept for each in stages.values()),
    }
