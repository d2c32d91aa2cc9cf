"""The page in a browser: nothing on its console, no request, all charts drawn, at two widths and by keyboard. That of a run
with failures is in `tests/testing/test_lab.py`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.browser import CHROMIUM, look
from optimus.report.page import write_report


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian's package `chromium`)")
def test_reports_in_a_browser(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    run = make_run(tmp_path / "run", loss=float("nan"))
    events = [[0, "forward", 0, 0, 0.0, 1.0], [1, "backward", 1, 0, 1.0, 3.0]]
    (run / "timeline.json").write_text(json.dumps({"ranks": 2, "events": events, "simulated": events}))
    (run / "evaluations").mkdir()
    (run / "evaluations" / "end.json").write_text(
        json.dumps({"tasks": {"sciq": {"acc": 0.5}}, "checkpoint": {"step": 40}})
    )
    others = [make_run(tmp_path / "other", steps=100), make_run(tmp_path / "third", grad_norm=None)]
    write_report([run], tmp_path / "one.html")
    write_report([run, *others], tmp_path / "three.html")
    # Six curves; of each run time and memory, and two canvases of the load of experts.
    for name, width, charts, lanes in (("one", 1280, 8, 4), ("one", 500, 8, 4), ("three", 500, 12, 4)):
        found = look(tmp_path / f"{name}.html", width, tmp_path)
        assert found["charts"] == charts
        assert len(found["canvases"]) == charts + (2 if name == "one" else 6)
        assert all(found["canvases"])
        assert found["lanes"] == lanes
        assert found["requests"] == 0
        assert found["wide"] <= 0
        assert found["focused"]
        assert found["legend"] not in ("", "-", "--")
        assert found["nameless"] == 0
        assert "sciq" in found["text"]
