"""Prints the table of docs/results.md of adapted families on all layouts: the worst relative differences of four steps.

    PYTHONPATH=tests/lib python -m helpers.adapted_table FILE [FAMILY ...]

FILE gets a line of JSON per pair of family and layout; a later call measures the pairs that FILE lacks.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from helpers.adapted import LAYOUTS, SETTINGS, config_of, expected, on_layout, refused
from optimus.errors import UserError
from optimus.testing.ranks import RankError

GROUPS = {
    "One rank": ("one",),
    "ZeRO-1, ZeRO-3, HSDP": ("zero1", "zero3", "hsdp"),
    "Offload, disk": ("offload", "disk"),
    "Tensor 2": ("tensor",),
    "Pipeline 2, four forms": ("1f1b", "zero-bubble", "interleaved", "message-driven"),
    "Ring, Ulysses": ("context", "ulysses"),
    "Recomputation": ("recompute", "recompute attention", "recompute modules x tensor"),
    "Three mixtures": ("tensor x pipeline", "tensor x zero3 x recompute", "pipeline x zero3 x offload"),
    "Experts on 2 ranks, in five forms": (
        "expert",
        "expert x tensor x zero3 x offload",
        "expert x pipeline x recompute",
        "expert x pruning x zero3",
        "expert x muon",
    ),
    "Pruning, with ZeRO-3 and tensor 2": ("pruning", "pruning x tensor"),
    "Muon with ZeRO-3": ("muon x zero3",),
}
assert sorted(layout for group in GROUPS.values() for layout in group) == sorted(LAYOUTS)


def measured(family: str, layout: str) -> dict[str, Any]:
    """Returns the worst relative differences of the losses and of the norms, or why the pair does not train."""
    if refused(family, layout):
        try:
            config_of(family, **LAYOUTS[layout].sections)
        except UserError as error:
            return {"refused": str(error)}
    try:
        pairs = list(zip(on_layout(family, layout), expected(family, layout), strict=True))
    except (RankError, UserError) as error:
        return {"failed": str(error)}
    loss, norm = (max(abs(found[i] / right[i] - 1) for found, right in pairs) for i in (0, 1))
    return {"loss": loss, "norm": norm}


def cell(rows: list[dict[str, Any]]) -> str:
    """Returns the worst row of a group, as loss / norm."""
    if any("failed" in row for row in rows):
        return "failed"
    if all("refused" in row for row in rows):
        return "refused"
    return " / ".join(f"{max(row[kind] for row in rows if kind in row):.0e}" for kind in ("loss", "norm"))


def table(rows: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Returns the table of docs/results.md."""
    lines = [["Family", *GROUPS], ["---"] * (1 + len(GROUPS))]
    for family in SETTINGS:
        if all((family, layout) in rows for layout in LAYOUTS):
            lines.append([family, *(cell([rows[family, layout] for layout in group]) for group in GROUPS.values())])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("e-0", "e-").replace("e+00", "")


def main(file: Path, families: list[str]) -> None:
    """Measures what `file` lacks, and prints the table."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    found = {(row["family"], row["layout"]): row for row in map(json.loads, lines)}
    with tempfile.TemporaryDirectory() as folder, file.open("a", encoding="utf-8") as output:
        os.chdir(folder)  # the file of `disk` is in the run's folder
        for family in families or SETTINGS:
            for layout in LAYOUTS:
                if (family, layout) not in found:
                    began = time.monotonic()
                    row = {"family": family, "layout": layout} | measured(family, layout)
                    found[family, layout] = row | {"seconds": round(time.monotonic() - began, 1)}
                    output.write(json.dumps(found[family, layout]) + "\n")
                    output.flush()
    print(table(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
