"""Output of the benchmark of the sparse block: a table for each case, and a plot."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Row
from optimus.errors import naming_disk_errors
from optimus.observe.machine import describe_machine, versions
from optimus.observe.table import print_table

_SHOWN = {
    "contestant": "contestant",
    "forward_ms": "forward ms",
    "accumulating_ms": "both ms",
    "fresh_ms": "both, fresh ms",
    "tflops": "TFLOP/s",
    "peak_mib": "peak MiB",
    "saved_kib_per_token": "saved KiB/token",
    "error": "error",
    "note": "note",
}
_BAR, _GAP = 0.32, 1.2  # inches: the height of a bar, and that of a case's title and axis


def print_case(rows: Sequence[Row]) -> None:
    """Prints the rows of one case."""
    first = rows[0]
    title = f"{first['shape']} ({first['dimensions']}) {first['dtype']}, {first['tokens']} tokens, {first['load']} load"
    print_table([{shown: row.get(key) for key, shown in _SHOWN.items()} for row in rows], title)


def print_machine() -> None:
    """Prints the machine and the versions of the packages."""
    machine, packages = describe_machine(), versions("torch", "transformers", "triton")
    chips = dict.fromkeys([machine["cpu"], *machine["accelerators"]])
    print(", ".join([*chips, *(f"{name} {packages[name]}" for name in ("torch", "transformers", "triton"))]))


def draw(rows: Sequence[Row], path: Path) -> None:
    """Writes a PNG with a panel for each case: TFLOP/s of every contestant, and a line for the large product's rate.

    Raises `UserError` if the file cannot be written.
    """
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(row["case"] for row in rows))
    tables = [[row for row in rows if row["case"] == case and row["tflops"] is not None] for case in cases]
    heights = [_GAP + _BAR * sum(row["role"] != "product" for row in table) for table in tables]
    figure = Figure(figsize=(8, sum(heights)), layout="constrained")
    panels = figure.subplots(len(cases), 1, squeeze=False, height_ratios=heights)[:, 0]
    for case, table, panel in zip(cases, tables, panels):
        bars = [row for row in table if row["role"] != "product"]
        colours = ["tab:blue" if row["role"] == "ours" else "tab:gray" for row in bars]
        drawn = panel.barh([row["contestant"] for row in bars], [row["tflops"] for row in bars], color=colours)
        panel.bar_label(drawn, fmt="%.3g", padding=3)
        rate = max(row["tflops"] for row in table if row["role"] == "product")
        panel.axvline(rate, color="tab:red", linestyle="--", label=f"one large product: {rate:.3g}")
        panel.invert_yaxis()
        panel.margins(x=0.1)
        panel.set_title(case, loc="left")
        panel.set_xlabel("TFLOP/s, forward and backward")
        panel.legend(loc="lower right")
    with naming_disk_errors(path, "Make room, or choose another place."):
        figure.savefig(path, dpi=120)
