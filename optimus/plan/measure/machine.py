"""Measures the machine on which the command runs, and writes the machine's file for the planner."""

import os
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import Any

import torch
import yaml

from optimus.errors import UserError, naming_disk_errors
from optimus.observe.machine import find_device, peak_flops
from optimus.observe.report import publish
from optimus.plan.machine import Machine, machine_names
from optimus.plan.measure.fit import FitPoint, fit, points
from optimus.plan.measure.ranks import check_ranks, on_ranks, under_launcher
from optimus.plan.measure.timing import Extent, Observations, observe_rank


def run(ranks: int, output: Path, *, name: str | None = None) -> dict[str, Any] | None:
    """Measures the machine, writes `output`, and prints the errors of the file's predictions.

    Returns the report on the first rank, and None on all other ranks. `name` is by default the file's stem.
    """
    name = name or output.stem
    check_output(output, name)
    check_ranks(ranks)
    if os.environ.get("RANK", "0") == "0":
        print(
            f"measuring with {ranks} ranks for some minutes; other programs would distort the measurements", flush=True
        )
    seen = observe(ranks)
    if seen is None:
        return None
    machine = fit_machine(seen, name)
    write(machine, output)
    found = points(machine, seen)
    more = {
        "machine_file": machine.model_dump(),
        "points": [{**point._asdict(), "error": point.error} for point in found],
    }
    report = publish("machine", rows(found), ratios(found), more=more)
    print(f"{output} is written: optimus plan ... --machine {output}")
    return report


def measure(ranks: int, name: str = "measured", extent: Extent | None = None) -> Machine:
    """Measures this machine with `ranks` ranks on one node. Raises `UserError` under torchrun."""
    if under_launcher():
        raise UserError(
            "measure() starts its own ranks: call measure() without torchrun, or use `optimus bench machine` under torchrun"
        )
    seen = observe(ranks, extent)
    assert seen is not None
    return fit_machine(seen, name)


def observe(ranks: int, extent: Extent | None = None) -> Observations | None:
    """Measures operations on `ranks` ranks of each node. Under torchrun, all ranks but the first return None."""
    return on_ranks(observe_rank, ranks, extent)


def fit_machine(seen: Observations, name: str) -> Machine:
    """Returns the machine that fits the observations of this machine, with the vendor's 16-bit peak if known."""
    peak = None if seen.threads is not None else peak_flops(find_device("auto", "the device"))
    return fit(seen, name=name, source=_source(seen, peak), peaks={"bf16": peak, "fp16": peak} if peak else None)


def write(machine: Machine, path: Path) -> None:
    """Writes a new file that `load_machine` reads."""
    text = yaml.safe_dump(machine.model_dump(exclude_none=True), sort_keys=False, width=120)
    with naming_disk_errors(path, "Choose another --output"), path.open("x", encoding="utf-8") as file:
        file.write(text)


def rows(found: Sequence[FitPoint]) -> list[dict[str, Any]]:
    """Returns a row for each kernel and shape, and for each collective, group size and group stride."""
    table: dict[tuple[str, str], list[FitPoint]] = {}
    for point in found:
        table.setdefault((point.what, "" if _is_talk(point) else point.shape), []).append(point)
    return [
        {
            "what": what,
            "shape": shape or f"{len(several)} sizes",
            "milliseconds": None if shape == "" else 1e3 * several[0].seconds,
            "predicted": None if shape == "" else 1e3 * several[0].predicted,
            "median_error": median(point.error for point in several),
            "largest_error": max(point.error for point in several),
        }
        for (what, shape), several in table.items()
    ]


def ratios(found: Sequence[FitPoint]) -> dict[str, float]:
    """Returns the median relative errors of matmuls, attention, memory and collectives."""
    kinds: dict[str, list[float]] = {}
    for point in found:
        kinds.setdefault("collectives" if _is_talk(point) else point.what.split()[0], []).append(point.error)
    return {f"machine.{kind}.median_error": median(errors) for kind, errors in kinds.items() if kind != "tiny"}


def _is_talk(point: FitPoint) -> bool:
    return point.what.split()[0] not in ("matmul", "tiny", "memory", "attention")


def _source(seen: Observations, peak: float | None) -> str:
    threads = f" of {seen.threads} thread{'s' if seen.threads != 1 else ''}" if seen.threads else ""
    said = (
        f"Measured by `optimus bench machine` on {date.today()}: {seen.device}, {seen.nodes} node(s) of "
        f"{seen.ranks_per_node} rank(s){threads}, all busy, torch {torch.__version__}, {seen.backend}. "
    )
    said += (
        "The 16-bit peak is the vendor's figure. "
        if peak
        else "The peak is unknown: the file has the best measured rate instead. "
    )
    if seen.nodes * seen.ranks_per_node == 1:
        said += "One rank has no links: node and network have the bandwidth of its memory. "
    elif seen.nodes == 1:
        said += "The network was not measured: its figures are those of the node. "
    if seen.read:
        said += "The disk rates are those of the folder in which the command ran. "
    if seen.threads:
        said += "Ranks share the host's memory equally, and the link to the host is as fast as memory. "
    return said.strip()


# ---- Bad input ----


def check_output(output: Path, name: str) -> None:
    """Raises `UserError` when `output` has no YAML suffix, exists or has no writable folder, or when `name` is a known
    machine."""
    if output.suffix not in (".yaml", ".yml"):
        raise UserError(
            f"--output {output}: end the name in .yaml, so that `--machine` can tell the file from a machine's name"
        )
    if output.exists():
        raise UserError(f"--output {output} exists: remove it, or choose another name")
    if name in machine_names():
        raise UserError(f"--name {name} is the name of a machine of the library: choose another name")
    folder = output.absolute().parent
    if not folder.is_dir():
        raise UserError(f"--output {output}: there is no folder {folder}; make it first")
    with naming_disk_errors(output, "Choose another --output"), TemporaryFile(dir=folder):
        pass
