"""The notebook in `examples/` runs from its first cell to its last."""

import json
from pathlib import Path

import matplotlib
import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "first_run.ipynb"


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    page = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert all(not cell.get("outputs") for cell in page["cells"])
    names: dict[str, object] = {}
    for cell in page["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).replace("STEPS = 200", "STEPS = 10")
            exec(compile(source, str(NOTEBOOK), "exec"), names)
    assert "async def" in capsys.readouterr().out
    assert (tmp_path / "notebook-run" / "report.html").stat().st_size > 50_000
    assert len(names["records"]) == 10  # type: ignore[arg-type]
