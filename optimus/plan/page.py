"""Plans as an HTML page."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optimus.config.sizes import count_text
from optimus.disk import user_path
from optimus.errors import naming_disk_errors
from optimus.mesh import Mesh
from optimus.model.count import count_parameters
from optimus.plan.memory import device_capacity
from optimus.plan.prediction import Plan
from optimus.plan.report import as_json, rows_of
from optimus.plan.scaling import ScalingPoint
from optimus.report.page import render

_NODES = 64  # maximum number of nodes that the page draws


def write_page(plans: Sequence[Plan], points: Sequence[ScalingPoint], path: Path) -> None:
    """Writes an HTML file that needs no network. Raises `UserError` when the file cannot be written."""
    path = user_path(path)
    text = render(page_data(plans, points), script="plan.js")
    with naming_disk_errors(path, "Choose another place for --report"):
        path.write_text(text, encoding="utf-8")


def page_data(plans: Sequence[Plan], points: Sequence[ScalingPoint]) -> dict[str, Any]:
    """Returns the data of the page, ready for JSON."""
    job = plans[0].job
    parameters = count_text(count_parameters(job.model).total)
    return {
        "title": f"Plans of {job.model.family} with {parameters} parameters on {job.machine.name}",
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        "tokens": job.tokens,
        "room": device_capacity(job),
        "memory": job.machine.memory,
        "rows": rows_of(plans, wide=True),
        "plans": [
            {"name": row["layout"], "ranks": plan.job.mesh.size, **as_json(plan)}
            for row, plan in zip(rows_of(plans), plans)
        ],
        "scaling": [
            {"ranks": each.ranks, "efficiency": each.efficiency, "tokens_per_second": each.plan.tokens_per_second}
            for each in points
        ],
        "placement": placed(job.mesh),
    }


def placed(mesh: Mesh) -> dict[str, Any]:
    """Returns the `axes` with more than one rank, the axes' `sizes`, and the number of `all` nodes.

    `nodes` has the coordinates of each rank on the first `_NODES` nodes.
    """
    axes = [axis for axis in ("pp", "dp", "cp", "tp", "edp", "ep", "etp") if mesh.axis_size(axis) > 1]
    per_node = mesh.ranks_per_node or mesh.size
    nodes = [
        [{"rank": rank, **{axis: mesh.coordinate(rank, axis) for axis in axes}} for rank in ranks]
        for ranks in [range(first, min(first + per_node, mesh.size)) for first in range(0, mesh.size, per_node)][
            :_NODES
        ]
    ]
    return {
        "axes": axes,
        "sizes": [mesh.axis_size(axis) for axis in axes],
        "nodes": nodes,
        "all": -(-mesh.size // per_node),
    }
