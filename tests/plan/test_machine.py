"""Machine files are valid and plausible, and predict the all-reduces measured on such machines."""

import csv
from pathlib import Path
from statistics import median

import pytest

from optimus.errors import UserError
from optimus.mesh.strided import StridedGroup
from optimus.plan import machine as machines
from optimus.plan.collectives import collective_seconds
from optimus.plan.machine import MachineRow, load_machine, machine_names

MIB = 2**20
LAPTOP = Path(__file__).parents[2] / "optimus" / "plan" / "machines" / "laptop.yaml"


def test_machines_that_are_asked_for_are_there() -> None:
    wanted = {
        "aurora",
        "frontier",
        "perlmutter",
        "alps",
        "summit",
        "dgx-a100",
        "dgx-h100",
        "dgx-b200",
        "h200",
        "laptop",
    }
    assert wanted <= set(machine_names())


@pytest.mark.parametrize("name", machine_names())
def test_file_is_valid_and_possible(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name
    assert {"bf16", "fp16"} & machine.arithmetic.keys()
    for precision, arithmetic in machine.arithmetic.items():
        assert arithmetic.achieved <= arithmetic.peak, precision
    assert machine.memory_bandwidth < 1e14
    assert machine.host.memory / machine.ranks_per_node >= machine.memory / 4
    for shape, bandwidth in machine.node.groups.items():
        stride, size = map(int, shape.split("x"))
        assert size > 1
        assert stride * size <= machine.ranks_per_node, "equation 5.7 is used beyond a node, never this look-up"
        assert 0 < bandwidth < machine.memory_bandwidth
    # A share of the node's links is at most as fast as the node's memory; a rank's share of the network as the node.
    assert machine.network.bandwidth / machine.ranks_per_node <= machine.node.bandwidth


@pytest.mark.parametrize("name", machine_names())
def test_matmul_nears_its_best_rate_and_never_passes_it(name: str) -> None:
    machine = load_machine(name)
    precision = "bf16" if "bf16" in machine.arithmetic else "fp16"
    best = machine.arithmetic[precision].sustained_rate
    assert best <= machine.arithmetic[precision].achieved
    small, large = (2 * n**3 / machine.matmul_seconds(n, n, n, precision) for n in (1024, 32768))
    assert small < large <= best
    assert large > 0.95 * best


def test_matrices_that_are_not_aligned_do_without_matrix_units() -> None:
    machine = load_machine("dgx-a100")
    aligned, half, other = (machine.matmul_seconds(4096, 4096, 4096, "fp16", units=each) for each in (1.0, 0.5, 0.0))
    assert other > 10 * aligned
    assert 2 * 4096**3 / other <= machine.arithmetic["fp32"].achieved
    assert half == pytest.approx(2 * aligned, rel=0.01)
    wide = [machine.matmul_seconds(4096, 4096, 4096, "fp32", units=each) for each in (1.0, 0.5, 0.0)]
    assert wide[0] == wide[1] == wide[2]  # a precision without matrix units


# ---- Against measurements ----


@pytest.fixture(scope="module")
def measured(shared_data: Path) -> list[dict[str, str]]:
    path = shared_data / "hardware" / "collectives.csv"
    if not path.exists():
        pytest.skip(f"measured collectives not found at {path}")
    with path.open(encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["operation"] == "all_reduce"]


def errors(rows: list[dict[str, str]], setup: str, nodes: int, name: str) -> list[float]:
    """Returns the relative errors of the predicted bus bandwidth for payloads of 32 MiB and more."""
    found = []
    for row in rows:
        if setup in row["setup"] and int(row["nodes"]) == nodes and float(row["payload_bytes"]) >= 32 * MIB:
            size, payload = int(row["n_gpus"]), float(row["payload_bytes"])
            moved = 2 * (size - 1) / size * payload
            seconds = collective_seconds("all_reduce", payload, StridedGroup(size), load_machine(name))
            found.append(abs(moved / seconds / (float(row["bus_or_bottleneck_gb_per_s"]) * 1e9) - 1))
    assert found, f"no rows for {setup}"
    return found


@pytest.mark.parametrize(
    ("setup", "name"), [("8x A100, NVLink 3", "dgx-a100"), ("8x H200", "h200"), ("8x B200", "dgx-b200")]
)
def test_all_reduce_in_a_node(measured: list[dict[str, str]], setup: str, name: str) -> None:
    found = errors(measured, setup, 1, name)
    assert len(found) == 10
    assert median(found) < 0.08
    assert max(found) < 0.35  # at 32 and 64 MiB, where NCCL changes protocol


def test_all_reduce_across_nodes(measured: list[dict[str, str]]) -> None:
    assert median(errors(measured, "32x B200", 4, "dgx-b200")) < 0.15


@pytest.mark.parametrize(
    ("setup", "nodes", "name"),
    [
        ("4x V100 32GB", 1, "jean-zay-v100-32gb"),
        ("4x V100 16GB", 1, "jean-zay-v100-16gb"),
        ("16x V100 32GB", 4, "jean-zay-v100-32gb"),
        ("64x V100 32GB", 16, "jean-zay-v100-32gb"),
        ("32x A100 80GB", 4, "jean-zay-a100"),
    ],
)
def test_all_reduce_on_jean_zay(measured: list[dict[str, str]], setup: str, nodes: int, name: str) -> None:
    assert max(errors(measured, setup, nodes, name)) < 0.03


# ---- Bad input ----


def test_an_empty_machine_file_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").touch()
    with pytest.raises(
        UserError, match=r"^machine file .*mine\.yaml must contain a mapping with the keys name, source"
    ):
        load_machine(str(tmp_path / "mine.yaml"))
    with pytest.raises(UserError, match=r"^machine file .*none\.yaml does not exist"):
        load_machine(str(tmp_path / "none.yaml"))


def test_unknown_machine_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"machine 'fronteir' is not known; did you mean 'frontier'\?"):
        load_machine("fronteir")


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        ("attention:", "atention: 0.2", "unknown key 'atention': did you mean 'attention'"),
        ("kernel_latency:", "", "'kernel_latency' is missing"),
        ("memory_bandwidth:", "memory_bandwidth: -1.0", "'?memory_bandwidth"),
        ("attention:", "attention: 1.5", "'?attention"),
        ("ranks_per_node:", "ranks_per_node: 2.5", "'?ranks_per_node"),
        ("node:", "node:\n  groups: {all: 1.0e+9}", r"groups has the key 'all': write 'G0xG1' with two numbers"),
        ("  fp32:", "  fp32: {peak: 0.0, achieved: 1.0}", r"'?arithmetic\.fp32\.peak"),
        (
            "  fp32:",
            "  fp33: {peak: 1.0e+9, achieved: 1.0e+9}",
            r"the precision 'fp33' is not known; did you mean 'fp32'",
        ),
    ],
)
def test_wrong_file_is_refused(tmp_path: Path, line: str, instead: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    lines = LAPTOP.read_text(encoding="utf-8").splitlines()
    assert sum(text.startswith(line) for text in lines) == 1
    path.write_text("\n".join(instead if text.startswith(line) else text for text in lines), encoding="utf-8")
    with pytest.raises(UserError, match=message) as raised:
        load_machine(str(path))
    assert str(path) in str(raised.value)


def test_units_of_a_machine_of_a_plugin_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.yaml"
    lines = LAPTOP.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join("kernel_latency: 5" if line.startswith("kernel_latency") else line for line in lines))
    monkeypatch.setattr(machines, "MACHINES", {"mine": MachineRow("mine", path)})
    with pytest.raises(UserError, match=r"mine\.yaml: kernel_latency is 5, but its unit is seconds"):
        load_machine("mine")


def test_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml does not exist"):
        load_machine(str(tmp_path / "none.yaml"))
