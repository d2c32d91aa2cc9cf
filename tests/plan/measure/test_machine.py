"""Fitting the times of a known machine gives that machine back; the measured file of a real one is valid and plausible."""

from collections.abc import Callable
from itertools import pairwise
from math import log
from pathlib import Path

import pytest

from optimus.errors import UserError
from optimus.mesh.strided import StridedGroup
from optimus.plan.collectives import collective_seconds, transfer_seconds
from optimus.plan.machine import Machine, Pace, load_machine
from optimus.plan.measure import machine as bench
from optimus.plan.measure.fit import fit, least_squares, points
from optimus.plan.measure.timing import (
    Attended,
    Extent,
    MatmulTime,
    Moved,
    Observations,
    Talk,
    Talked,
    disk_rates,
    group_forms,
    groups_of,
    host_bandwidth,
)
from optimus.plan.profile import Profile

KINDS: tuple[Talk, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def made_up(machine: Machine, *, nodes: int = 1, cores: int | None = None) -> Observations:
    """Returns the times that a perfect measurement of `machine` would give."""
    accelerator = machine.cores > 8
    extent = Extent.for_device("accelerator" if accelerator else "cpu")
    seen = Observations(
        machine.ranks_per_node, nodes, "made up", "gloo", None if accelerator else machine.cores,
        cores or machine.cores, machine.memory, machine.host.memory, tiny=machine.kernel_latency, link=machine.host.link,
        host_bandwidth=machine.host.bandwidth, read=machine.host.read, write=machine.host.write,
    )  # fmt: skip
    for precision in ("fp32", "bf16"):
        for m, n, k in extent.shapes:
            seen.products.append(MatmulTime(m, n, k, precision, machine.matmul_seconds(m, n, k, precision)))
    seen.moved = [Moved("copy", 1 << 31, machine.memory_seconds(1 << 31))]
    for b, s, n, d in extent.attention:
        seconds = sum(machine.attention_seconds(b * s, s, n, (d, d), "bf16", speed=Profile().attention))
        seen.attended.append(Attended(b, s, n, d, seconds))
    for place in group_forms(machine.ranks_per_node * nodes):
        for size in extent.sizes:
            for kind in KINDS:
                seconds = collective_seconds(kind, size, place, machine)  # type: ignore[arg-type]
                seen.talked.append(Talked(kind, size, place, seconds))
            if place.size == 2:
                seen.talked.append(Talked("shift", size, place, transfer_seconds(size, place, machine)))
    return seen


def groups(machine: Machine, bandwidths: dict[str, float]) -> Machine:
    return machine.model_copy(update={"node": machine.node.model_copy(update={"groups": bandwidths})})


# ---- Fitting ----


@pytest.mark.parametrize(("name", "cores"), [("laptop", None), ("h200", None), ("h200", 64), ("aurora", None)])
def test_made_up_times_give_the_machine_back(name: str, cores: int | None) -> None:
    """The fit also holds where an accelerator reports another number of cores, with which the search begins."""
    machine = load_machine(name)
    peaks = {precision: rates.peak for precision, rates in machine.arithmetic.items()}
    found = fit(made_up(machine, cores=cores), name=name, source="made up", peaks=peaks)
    for precision in ("fp32", "bf16"):
        endless = [each.matmul_seconds(1e6, 1e6, 1e6, precision) for each in (found, machine)]
        assert endless[0] == pytest.approx(endless[1], rel=0.03)
        assert found.arithmetic[precision].peak == pytest.approx(machine.arithmetic[precision].peak, rel=1e-3)
    assert found.matmul.tile == pytest.approx(machine.matmul.tile, rel=0.03)
    assert found.matmul.depth == pytest.approx(machine.matmul.depth, rel=0.05)
    assert found.cores == pytest.approx(machine.cores, rel=0.03)
    assert found.kernel_latency == pytest.approx(machine.kernel_latency, rel=0.03)
    assert found.attention == pytest.approx(machine.attention, rel=0.03)
    assert found.attention_half == pytest.approx(machine.attention_half, rel=0.05)
    assert found.memory_bandwidth == pytest.approx(machine.memory_bandwidth, rel=0.02)
    for field in ("ranks_per_node", "memory", "host"):
        assert getattr(found, field) == getattr(machine, field), field
    assert max(point.error for point in points(found, made_up(machine))) < 0.05


def test_kinds_of_collectives_with_a_pace_of_their_own_are_found() -> None:
    paces = {"all_reduce": Pace(share=0.5, start=1e-4, step=2e-4), "shift": Pace(share=2.0, start=1e-5, step=1e-5)}
    laptop = load_machine("laptop")
    given = laptop.model_copy(update={"node": laptop.node.model_copy(update={"paces": paces})})
    found = fit(made_up(given), name="mine", source="made up")
    assert max(point.error for point in points(found, made_up(given))) < 0.1
    assert "all_reduce" in found.node.paces
    assert not fit(made_up(laptop), name="mine", source="made up").node.paces


def test_what_ranks_share_is_written() -> None:
    seen = made_up(load_machine("laptop"))
    seen.alone, seen.overlap = 3.96, 0.25
    found = fit(seen, name="mine", source="made up")
    assert (found.alone, found.overlap) == (3.96, 0.25)


def test_a_group_of_its_own_is_found_and_others_are_left_out() -> None:
    given = {"1x2": 3e9, "2x2": 1.5e9, "1x4": 6e8}
    found = fit(made_up(groups(load_machine("laptop"), given)), name="mine", source="made up")
    assert found.node.bandwidth == pytest.approx(1.5e9, rel=0.03)
    assert found.node.latency == pytest.approx(5e-5, rel=0.03)
    assert set(found.node.groups) == {"1x2", "1x4"}
    for group, bandwidth in found.node.groups.items():
        assert bandwidth == pytest.approx(given[group], rel=0.03)


def test_the_network_of_several_nodes_is_found_and_that_of_one_is_the_nodes() -> None:
    machine = load_machine("laptop")
    found = fit(made_up(machine, nodes=2), name="mine", source="made up").network
    assert found.bandwidth == pytest.approx(machine.network.bandwidth, rel=0.05)
    assert found.latency == pytest.approx(machine.network.latency, rel=0.05)
    alone = fit(made_up(machine), name="mine", source="made up")
    assert (alone.network.bandwidth, alone.network.latency) == (alone.node.bandwidth, alone.node.latency)


def test_host_memory_and_disks_of_an_accelerators_node(tmp_path: Path) -> None:
    """An accelerator's node gets the rates of the bytes moved; a processor's node gets none."""
    assert fit(made_up(load_machine("laptop")), name="mine", source="made up").host.bandwidth is None

    class Second:
        def seconds(self, call: Callable[[], object]) -> float:
            call()
            return 1.0

    assert host_bandwidth(Second(), 1 << 20) == 3 << 20  # type: ignore[arg-type]
    assert disk_rates(Second(), (1 << 20) + 1, tmp_path) == ((1 << 20) + 4096,) * 2  # type: ignore[arg-type]


def test_one_rank_has_no_links(tmp_path: Path) -> None:
    machine = load_machine("laptop").model_copy(update={"ranks_per_node": 1})
    found = bench.fit_machine(made_up(machine), "mine")
    bench.write(found, tmp_path / "mine.yaml")
    assert load_machine(str(tmp_path / "mine.yaml")) == found
    assert found.node.bandwidth == found.network.bandwidth == found.memory_bandwidth
    assert "One rank has no links" in found.source


def test_peak_is_the_best_that_was_reached_where_no_vendor_states_one() -> None:
    machine = load_machine("laptop")
    found = fit(made_up(machine), name="mine", source="made up")
    assert found.arithmetic["fp32"].peak == found.arithmetic["fp32"].achieved
    # The peak is that of attention if attention is faster than any product.
    faster = made_up(machine)
    faster.attended = [each._replace(seconds=each.seconds / 10) for each in faster.attended]
    found = fit(faster, name="mine", source="made up")
    assert found.attention == 1.0
    assert found.arithmetic["bf16"].peak == pytest.approx(10 * 0.25 * machine.arithmetic["bf16"].peak, rel=0.03)
    assert found.arithmetic["bf16"].achieved == pytest.approx(machine.arithmetic["bf16"].achieved, rel=0.03)


def test_least_squares_keeps_within_its_bounds() -> None:
    """The minimum of (log x - log 8)^2 + (log x y)^2 is at x = 8, y = 1 / 8."""

    def residuals(x: list[float]) -> list[float]:
        return [log(x[0] / 8), log(x[0] * x[1])]

    assert least_squares(residuals, [1, 1], [0.01, 0.01], [100, 100]) == pytest.approx([8, 1 / 8], rel=1e-3)
    assert least_squares(residuals, [1, 1], [0.01, 0.5], [100, 100])[1] == pytest.approx(0.5)


# ---- Groups ----


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [(1, []), (2, [(2, 1)]), (4, [(2, 1), (2, 2), (4, 1)]), (6, [(2, 1), (2, 3), (3, 1), (3, 2), (6, 1)])],
)
def test_groups_of_every_kind_divide_the_ranks(ranks: int, expected: list[tuple[int, int]]) -> None:
    assert group_forms(ranks) == [StridedGroup(*place) for place in expected]
    for place in group_forms(ranks):
        parts = groups_of(place, ranks)
        assert sorted(rank for part in parts for rank in part) == list(range(ranks))
        assert {len(part) for part in parts} == {place.size}
        assert {b - a for part in parts for a, b in pairwise(part)} == {place.stride}


# ---- Measuring ----

TINY = Extent(
    shapes=[(16, 16, 16), (64, 64, 64), (256, 256, 256)],
    attention=[(1, 64, 2, 16)],
    memory=1 << 22,
    sizes=(4096, 1 << 20),
    window=0.003,
    rounds=2,
)


def test_a_measured_machine_is_written_and_read_again(tmp_path: Path) -> None:
    machine = bench.measure(2, "mine", TINY)
    path = tmp_path / "mine.yaml"
    bench.write(machine, path)
    assert load_machine(str(path)) == machine
    assert machine.ranks_per_node == 2
    assert machine.memory * 2 == pytest.approx(machine.host.memory, rel=1e-3)
    assert {"fp32", "bf16"} <= machine.arithmetic.keys()
    assert "not measured" in machine.source  # the network
    products = [machine.matmul_seconds(n, n, n, "fp32") for n in (64, 256, 1024, 4096)]
    assert products == sorted(products)
    assert 0 < products[0] < products[-1]
    for kind in KINDS:
        times = [collective_seconds(kind, 4**i, StridedGroup(2), machine) for i in range(5, 15)]  # type: ignore[arg-type]
        assert times == sorted(times)
        assert 0 < times[0] < times[-1]


def test_report_has_every_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = made_up(load_machine("laptop"))
    monkeypatch.setattr(bench, "observe", lambda ranks: seen)
    report = bench.run(4, tmp_path / "mine.yaml")
    assert report is not None
    assert load_machine(str(tmp_path / "mine.yaml")).name == "mine"
    assert len(report["points"]) == len(seen.products) + 1 + len(seen.moved) + len(seen.attended) + len(seen.talked)
    assert report["ratios"].keys() == {
        f"machine.{kind}.median_error" for kind in ("matmul", "attention", "memory", "collectives")
    }
    assert all(error < 0.05 for error in report["ratios"].values())
    assert "all_reduce 1x4" in capsys.readouterr().out


# ---- Bad input ----


@pytest.mark.parametrize("ranks", [0, 65])
def test_ranks_that_no_node_has(ranks: int, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"--ranks {ranks}: a node has 1 to 64 ranks"):
        bench.run(ranks, tmp_path / "mine.yaml")
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("precious", encoding="utf-8")
    with pytest.raises(UserError, match=r"mine\.yaml exists: remove it, or choose another name"):
        bench.run(2, path)
    with pytest.raises(UserError, match=r"cannot write .*mine\.yaml: File exists"):  # created during the measurement
        bench.write(load_machine("laptop"), path)
    assert path.read_text(encoding="utf-8") == "precious"


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("mine.json", r"--output .*mine\.json: end the name in \.yaml"),
        ("none/mine.yaml", r"--output .*: there is no folder .*none; make it first"),
        ("h200.yaml", r"--name h200 is the name of a machine of the library"),
    ],
)
def test_output_that_cannot_be(out: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        bench.run(2, tmp_path / out)


def test_a_folder_that_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(dir: Path) -> None:  # the tests may run as root, which may write anywhere
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(bench, "TemporaryFile", refuse)
    with pytest.raises(UserError, match=r"cannot write .*mine\.yaml: Permission denied\. Choose another --output"):
        bench.run(2, tmp_path / "mine.yaml")


def test_ranks_that_torchrun_has_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(UserError, match="--ranks 2: torchrun has started 4 ranks on each node"):
        bench.run(2, tmp_path / "mine.yaml")
