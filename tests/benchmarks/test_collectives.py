"""The benchmark of collectives: programs of the ranks take the model's times, the choice of an algorithm loses little,
and measurements are written and read back."""

import errno
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.collectives import ADAPTER_EACH, BOTH, ONE_ADAPTER, Case, contestants, selections, timed
from benchmarks.collectives_ranks import Job, run_jobs
from helpers.another_backend import another_backend
from helpers.sweep import in_turns
from optimus.comm.algorithms import KINDS, MEGABYTE, OWN, OWN_LEVELS, Measured, choose, names
from optimus.comm.costs import seconds
from optimus.comm.links import Link, Links
from optimus.comm.schedules import Shape
from optimus.errors import UserError
from optimus.plan.machine import load_machine, machine_names
from optimus.plan.measure.collectives import Measurement, measure, measure_rank, merged, table, write
from optimus.plan.measure.machine import write as write_machine
from optimus.plan.measure.timing import Extent
from optimus.testing import run_ranks


@pytest.mark.parametrize("shape", in_turns([Shape(2, 2), Shape(4, 1)], 2), ids=str)
def test_times_on_ranks_are_those_of_the_model(shape: Shape) -> None:
    """Simulated programs of the ranks, those of the default algorithm included, take the times of the cost model to
    1e-12."""
    cases = [
        Case(f"{size}", shape, links, size) for links in (ADAPTER_EACH, ONE_ADAPTER) for size in (1 << 12, MEGABYTE)
    ]
    jobs = [(case, job) for case in cases for kind in BOTH for job in contestants(case, kind)]
    jobs += [
        (case, Job(name, kind, shape, case.size, number))
        for case in cases[-1:]
        for kind in BOTH
        for name in names(kind, shape)
        for number in (1, 4)
        if name != OWN
    ]
    found = zip(*run_ranks(run_jobs, shape.ranks, [job for _, job in jobs]))
    assert any(job.pieces > 1 for _, job in jobs[: len(cases) * 4]) == (shape.per > 1)
    for (case, job), ranks in zip(jobs, found, strict=True):
        right = seconds(job.algorithm, job.kind, shape, case.size, case.links, job.pieces)
        assert math.isclose(timed([program for program, _ in ranks], case), right, rel_tol=1e-12), job


@pytest.mark.in_turn(2, 3)
def test_what_is_held_back_takes_as_long_as_its_links() -> None:
    """Throttled collectives take at least the time of their links; the machine may add to it."""
    slow = Links(0.0, Link(20e-3, 1e9), Link(2e-3, 1e9), 2)
    job = Job("direct+direct", "all_gather", Shape(2, 2), 1e6, 1, slow)
    (ranks,) = zip(*run_ranks(run_jobs, 4, [job]))
    model = seconds(job.algorithm, job.kind, job.shape, job.size, slow)
    assert model > 22e-3
    assert max(took for _, took in ranks) > 0.99 * model


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_choosing_after_few_measurements_loses_little(noise: float) -> None:
    for row in selections(noise):
        assert row["mean_loss"] < (0.02 if noise == 0 else 0.05)
        assert row["worst_loss"] < (0.2 if noise == 0 else 0.8)


@pytest.mark.in_turn(0, 3)
def test_every_algorithm_is_measured_in_every_kind_of_group() -> None:
    quick = replace(Extent.for_device("cpu"), sizes=(4096, 65536), window=0.0, rounds=1)
    found = run_ranks(measure_rank, 4, 2, quick)
    assert all(theirs == found[0] for theirs in found)
    measured = table(found[0])
    for shape in (Shape(2, 2), Shape(1, 2), Shape(2, 1)):
        for kind in ("all_gather", "reduce_scatter"):
            assert set(measured.curves(kind, shape)) == {*names(kind, shape)} - {OWN}
        assert set(measured.curves("all_reduce", shape)) == {*names("all_reduce", shape)}
        assert set(measured.curves("all_to_all", shape)) == {OWN}
        for kind in KINDS:
            assert all(curve.sizes == [4096.0, 65536.0] for curve in measured.curves(kind, shape).values())


def measured_on_another_backend(quick: Extent) -> list[Measurement]:
    with another_backend():
        return measure_rank(2, quick)


@pytest.mark.in_turn(1, 3)
def test_the_backends_own_is_measured_beside_ours() -> None:
    quick = replace(Extent.for_device("cpu"), sizes=(4096,), window=0.0, rounds=1)
    measured = table(run_ranks(measured_on_another_backend, 4, quick)[0])
    for shape in (Shape(2, 2), Shape(1, 2), Shape(2, 1)):
        for kind in KINDS[:3]:
            assert set(measured.curves(kind, shape)) == {*names(kind, shape, by_messages=False)}
    assert {OWN, OWN_LEVELS, "doubling", "doubling+ring"} <= set(measured.curves("all_reduce", Shape(2, 2)))


def test_a_table_is_written_beside_what_the_file_has(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    write_machine(load_machine(machine_names()[0]), path)
    text = f"# A note that stays.\n{path.read_text(encoding='utf-8')}"
    path.write_text(text, encoding="utf-8")
    assert load_machine(str(path)).collectives is None
    first = table(
        [
            Measurement("all_gather", "2x2", "ring", 4096, 0.12345),
            Measurement("all_gather", "2x2", "ring", 65536, 1.0),
        ]
    )
    write(path, first)
    again = table(
        [
            Measurement("all_gather", "2x4", "ring", 4096, 5.0),
            Measurement("all_gather", "2x4", "direct", 4096, 4.0),
        ]
    )
    write(path, merged(first, again))
    written = path.read_text(encoding="utf-8")
    assert written.startswith(text.rstrip("\n"))
    assert written.count("collectives:") == 1
    measured = load_machine(str(path)).collectives
    assert measured is not None
    assert measured.all_gather["2x2"]["ring"].seconds == [0.123, 1.0]
    assert choose("all_gather", Shape(2, 4), 4096, measured) == "direct"
    write(path, Measured())
    assert path.read_text(encoding="utf-8").startswith(text.rstrip("\n"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a: 1\ncollectives: {}", "a: 1\n"),
        ("a: 1\ncollectives:\n  b:\n    c: 2", "a: 1\n"),
        ("collectives:\n  b: 2\n\n# what d is\nd: 3\n# at the end\n", "# what d is\nd: 3\n# at the end\n"),
        ("collectives:\n# between\n\n  b: 2\n  # of b\n# of d\nd: 3", "# of d\nd: 3\n"),
        ("# of all\ncollectives:  # old\n# of d\nd: 3\n", "# of all\n# of d\nd: 3\n"),
    ],
)
def test_only_the_section_is_replaced(tmp_path: Path, before: str, after: str) -> None:
    """The section may end without a newline. Comments at the margin after its last line belong to what follows."""
    path = tmp_path / "machine.yaml"
    path.write_text(before, encoding="utf-8")
    write(path, Measured())
    assert path.read_text(encoding="utf-8").replace("\n\n", "\n").removeprefix("\n") == f"{after}collectives: {{}}\n"


def test_a_full_disk_leaves_the_machine_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text("a: 1\n", encoding="utf-8")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        write(path, Measured())
    assert path.read_text(encoding="utf-8") == "a: 1\n"
    assert [each.name for each in tmp_path.iterdir()] == ["machine.yaml"]


def test_there_must_be_a_machine_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such machine file"):
        measure(2, tmp_path / "none.yaml")


PLUGIN = """
from optimus.comm.schedules import ring
from optimus.extend import AllGatherRow

ROWS = [AllGatherRow("ring-of-plugin", lambda rank, shape: ring(rank, shape.ranks))]
"""


def measured_with_a_plugin(folder: str) -> list[Measurement]:
    sys.path.insert(0, folder)
    quick = replace(Extent.for_device("cpu"), sizes=(4096,), window=0.0, rounds=1)
    return measure_rank(2, quick, ["ring_of_plugin"])


def test_algorithms_of_plugins_are_measured(tmp_path: Path) -> None:
    (tmp_path / "ring_of_plugin.py").write_text(PLUGIN)
    found = run_ranks(measured_with_a_plugin, 2, str(tmp_path), reuse=False)
    measured = {point.kind for point in found[0] if point.algorithm == "ring-of-plugin"}
    assert measured == {"all_gather", "reduce_scatter", "all_reduce"}
