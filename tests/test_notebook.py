"""The notebook in `examples/` runs from its first cell to its last in an empty folder, and once more in the same folder."""

import json
import re
from pathlib import Path
from typing import Any

import matplotlib
import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "first_run.ipynb"


@pytest.mark.in_turn(1, 3)
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    page = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert all(not cell.get("outputs") for cell in page["cells"])
    cells = ["".join(cell["source"]) for cell in page["cells"] if cell["cell_type"] == "code"]
    for source in cells:
        assert source.count("STEPS = ") == source.count("STEPS = 200")
    for _ in range(2):
        names: dict[str, Any] = {}
        for source in cells:
            exec(compile(source.replace("STEPS = 200", "STEPS = 10"), str(NOTEBOOK), "exec"), names)
        printed = capsys.readouterr().out
        assert "async def" in printed
        assert "run finished 10/10" in printed
        assert "% of the peak" in printed
        assert len(names["records"]) == 10
        assert 0 < names["scores"]["bits_per_byte"] < 8
    assert [path.name for path in tmp_path.iterdir()] == ["notebook-run"]
    made = {path.name for path in (tmp_path / "notebook-run").iterdir()}
    assert made == {"text", "data", "run", "huggingface"}
    assert (tmp_path / "notebook-run" / "run" / "report.html").stat().st_size > 50_000


def test_the_notebook_uses_the_functions_of_the_commands() -> None:
    """The notebook uses exported functions only; others may change."""
    text = NOTEBOOK.read_text(encoding="utf-8")
    used = {"config", "doctor", "list_checkpoints", "plan", "report", "runs", "verify_checkpoints"}
    assert set(re.findall(r"\bapi\.(\w+)\(", text)) == used
    assert set(re.findall(r"\boptimus\.(\w+)\(", text)) == {
        "sample_text",
        "prepare",
        "train",
        "evaluate",
        "generate",
        "export",
    }
