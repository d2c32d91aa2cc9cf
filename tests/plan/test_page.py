"""The page of plans embeds the plans of the search."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from optimus import api
from optimus.cli import app
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.plan.page import placed
from optimus.plan.scaling import figure
from tests.report.conftest import embedded

ASKED = ["plan", "mula-1b", "--machine", "dgx-h100", "--ranks", "16"]


def test_the_page_holds_the_plans(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    result = CliRunner().invoke(app, [*ASKED, "--best", "3", "--report", str(page), "--json"], catch_exceptions=False)
    plans = json.loads(result.output)["plans"]
    found = embedded(page.read_text())
    assert len(plans) == 3
    assert [{key: each[key] for key in plans[0]} for each in found["plans"]] == plans
    assert found["memory"] > found["room"] > plans[0]["memory_bytes"]["total"]
    assert [len(node) for node in found["placement"]["nodes"]] == [8, 8]


def test_scaling(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    words = [*ASKED, "--as-is", "--scale", "16,32", "--report", str(page), "--json"]
    result = json.loads(CliRunner().invoke(app, words, catch_exceptions=False).output)
    found = embedded(page.read_text())["scaling"]
    assert [(each["ranks"], each["efficiency"]) for each in found] == [
        (each["ranks"], each["efficiency"]) for each in result["scaling"]
    ]


@pytest.mark.parametrize("most", [32, 256])
def test_the_speeds_of_a_plot_can_be_read(most: int) -> None:
    """The axis has two numbers or more, all different."""
    pytest.importorskip("matplotlib", reason="needs matplotlib (`make install-plot`)")
    found = api.plan("mula-1b", machine="dgx-h100", ranks=16, as_is=True, scale=[16, most])
    axes = figure(found.points).axes[0]
    low, high = axes.get_ylim()
    labels = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
    shown = [label.get_text() for tick, label in labels if low <= tick <= high]
    assert len(set(shown)) == len(shown) >= 2
    assert shown[-1].endswith(" M")


def test_placement() -> None:
    found = placed(Mesh.from_sizes(8, pipeline=2, tensor=(2, 1), ranks_per_node=4))
    assert found["axes"][:3] == ["pp", "dp", "tp"]
    assert found["nodes"][1][3] == {"rank": 7, "pp": 1, "dp": 1, "tp": 1} | {
        axis: found["nodes"][1][3][axis] for axis in found["axes"][3:]
    }
    assert len(placed(Mesh.from_sizes(4096, ranks_per_node=8))["nodes"]) == 64


def test_a_place_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--report"):
        CliRunner().invoke(
            app, [*ASKED, "--as-is", "--report", str(tmp_path / "no" / "p.html")], catch_exceptions=False
        )
