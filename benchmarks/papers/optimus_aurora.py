"""The Optimus paper's scaling study (section 2.3)."""

from collections.abc import Sequence

from benchmarks.papers.figure import Figure, Point
from benchmarks.published.jobs import job
from benchmarks.published.profiles import load_profile
from optimus.config.load import model_config_from, resolve_model
from optimus.mesh import Mesh
from optimus.plan.machine import load_machine
from optimus.plan.step import step_time

# Tiles, and per cent of the speed at 384 tiles: a drop of 3 % at 768, of 10 % from 1,536 on.
EFFICIENCY = {384: 100.0, 768: 97.0, 1536: 90.0, 3072: 90.0, 6144: 90.0, 12288: 90.0}


def efficiency() -> list[Point]:
    """Returns the efficiency of Mula-220B-A10B with the paper's layout, relative to the fewest tiles.

    Pipelines of 8 nodes, experts over the 12 tiles of a node, norms, attention and experts recomputed, and a sequence of
    2,048 tokens for each tile, as in section 2.1. Data-parallel ranks are assumed furthest apart.
    """
    model = model_config_from(resolve_model("mula-220b-a10b")["model"], "")
    speeds = []
    for tiles in EFFICIENCY:
        mesh = Mesh(pp=8, dp=tiles // 8, ep=12, ranks_per_node=12, pipeline_stride=12)
        how = {"shard": "optimizer", "recompute": {"norm", "attention", "moe"}}
        run = job(model, load_machine("aurora"), mesh, 2048, 1, 8, load_profile("optimus-aurora"), **how)
        speeds.append(run.tokens / step_time(run).seconds / tiles)
    return [
        Point(f"{tiles:,} tiles", published, 100 * speed / speeds[0])
        for (tiles, published), speed in list(zip(EFFICIENCY.items(), speeds))[1:]
    ]


FIGURES: Sequence[Figure] = (
    Figure(
        "Optimus 4b", "% of the speed at 384 tiles", efficiency, "nothing fitted; data-parallel ranks furthest apart"
    ),
)
