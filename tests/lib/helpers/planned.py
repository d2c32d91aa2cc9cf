"""The state that a rank will hold, planned on meta tensors without memory or process groups, for any number of ranks."""

from collections.abc import Mapping
from typing import Any

from optimus.config import RunConfig
from optimus.observe.machine import Bfloat16
from optimus.resolve.facts import Facts
from optimus.resolve.resolve import resolve
from optimus.resolve.run import ResolvedRun, RunInputs
from optimus.state.plan import ChunkPlan, bytes_by_kind


def resolved(
    config: RunConfig,
    ranks: int = 1,
    per_node: int | None = None,
    *,
    sequences: int | None = None,
    unpruned: Mapping[str, float] | None = None,
    **facts: Any,
) -> ResolvedRun:
    """Returns the resolved run on such a machine, by default with processors that only compute in fp32."""
    known = {"device": "cpu", "bfloat16": Bfloat16(False, "made up")} | facts
    return resolve(config, Facts(ranks, per_node or ranks, **known), RunInputs(sequences, unpruned=unpruned or {}))


def planned_chunks(config: RunConfig, ranks: int, rank: int, **facts: Any) -> list[ChunkPlan]:
    """Returns the chunks of rank `rank` of `ranks`."""
    return resolved(config, ranks, **facts).chunk_plans(rank)


def state_bytes(config: RunConfig, ranks: int, rank: int) -> dict[str, int]:
    """Returns the bytes that rank `rank` of `ranks` will hold at rest, by kind (parameters, gradients, master, moments)."""
    return bytes_by_kind(planned_chunks(config, ranks, rank))
