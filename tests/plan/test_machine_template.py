"""The template of a machine file has all keys, and describes the machine of its example."""

import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel
from typer.testing import CliRunner

from optimus.cli import app
from optimus.errors import UserError
from optimus.plan.machine import Machine, load_machine
from optimus.plan.machine_template import _EXAMPLE, _model_in, machine_template


def required(kind: type[BaseModel], values: dict[str, object]) -> dict[str, object]:
    """Returns the required keys of a section."""
    found = {name: values[name] for name, field in kind.model_fields.items() if field.is_required()}
    for name, value in found.items():
        inner = _model_in(kind.model_fields[name])
        if inner is not None and isinstance(value, dict) and name != "arithmetic":
            found[name] = required(inner, value)
    return found


def test_it_is_a_machine(tmp_path: Path) -> None:
    """Required keys have the figures of the example, except for names; the others have their defaults."""
    path = tmp_path / "mine.yaml"
    path.write_text(machine_template())
    made, example = load_machine(str(path)), load_machine(_EXAMPLE)
    found = yaml.safe_load(path.read_text())
    assert found == required(Machine, example.model_dump(exclude_unset=True)) | {
        "name": made.name,
        "source": made.source,
    }
    assert made.name == "my-machine"


def test_what_is_left_out_is_as_it_stands(tmp_path: Path) -> None:
    """Defaults in the template's comments are the real defaults: uncommenting all changes nothing."""
    text, times = re.subn(
        r"^(\s*)# ([a-z_]+: (?:null|false|\{\}|[\d.e+-]+))$", r"\1\2", machine_template(), flags=re.MULTILINE
    )
    assert times > 10
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    plain = tmp_path / "plain.yaml"
    plain.write_text(machine_template())
    whole, short = load_machine(str(path)), load_machine(str(plain))
    assert whole == short
    assert len(whole.model_fields_set) > len(short.model_fields_set)


@pytest.mark.parametrize(
    ("figure", "instead", "said"),
    [
        ("peak", 989, r"arithmetic\.[a-z0-9]+\.peak is 989, but its unit is FLOP/s: 989 TFLOP/s are 989e12"),
        ("memory_bandwidth", 3350, r"memory_bandwidth is 3350, but its unit is bytes/s: 400 GB/s are 400e9"),
        ("memory", 80, r"memory is 80, but its unit is bytes: 80 GB are 80e9"),
        ("kernel_latency", 4.5, r"kernel_latency is 4\.5, but its unit is seconds: 5 microseconds are 5e-6"),
    ],
)
def test_figures_in_other_units(tmp_path: Path, figure: str, instead: float, said: str) -> None:
    tree = yaml.safe_load(machine_template())
    path = tmp_path / "mine.yaml"
    if figure == "peak":
        first = next(iter(tree["arithmetic"].values()))
        first["peak"], first["achieved"] = instead, 794
    else:
        tree[figure] = instead
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(UserError, match=rf"mine\.yaml: {said}"):
        load_machine(str(path))


def test_every_key_says_what_it_is() -> None:
    lines = [line.strip() for line in machine_template().splitlines()]
    for number, line in enumerate(lines):
        key = line.removeprefix("# ").partition(":")[0]
        if key in {*Machine.model_fields} and not line.startswith("# arithmetic"):
            assert lines[number - 1].startswith("# "), line


def test_the_command(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["plan", "--machine-template"])
    assert (done.exit_code, done.output) == (0, machine_template())
    path = tmp_path / "mine.yaml"
    path.write_text(done.output)
    done = CliRunner().invoke(app, ["plan", "mula-tiny", "--machine", str(path), "--ranks", "8"])
    assert done.exit_code == 0
    assert "8 ranks of my-machine" in done.output
