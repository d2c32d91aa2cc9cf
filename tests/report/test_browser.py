"""Pages in a browser: all charts drawn, nothing on the console, no request, wide and narrow, by keyboard, readable. That of
a run with failures is in `tests/testing/test_lab.py`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from benchmarks.browser import browser
from helpers.browser import needs_browser, opened
from optimus.cli import app
from optimus.report.page import write_report

pytestmark = needs_browser


def draws_anew(shown: Any, *keys: str) -> bool:
    """Whether the keys change the first chart."""
    before = picture(shown)
    for key in keys:
        shown.keyboard.press(key)
    return picture(shown) != before


def picture(shown: Any) -> str:
    return str(shown.evaluate("document.querySelector('canvas').toDataURL()"))


def test_runs(tmp_path: Path, make_run: Callable[..., Path]) -> None:
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
    with browser() as chromium:
        # Six curves; of each run time and memory, and two canvases of the load of experts.
        for name, charts, canvases, widths in (("one", 8, 10, (1280, 390)), ("three", 12, 18, (390, 1280))):
            shown, found = opened(chromium, tmp_path / f"{name}.html", widths)
            assert (found["charts"], len(found["canvases"]), found["lanes"]) == (charts, canvases, 4)
            assert "sciq" in found["text"]
        keys_do_what_the_mouse_does(shown)


def keys_do_what_the_mouse_does(shown: Any) -> None:
    """On a page of three runs."""
    whole = picture(shown)
    chart, button = shown.locator(".chart").first, shown.get_by_role("button", name="Whole curves")
    for key in ("Enter", "Space"):
        chart.focus()
        assert draws_anew(shown, "+")
        button.focus()
        shown.keyboard.press(key)
        assert picture(shown) == whole
    chart.focus()
    assert draws_anew(shown, "+", "+", "-")
    shown.keyboard.press("0")
    assert picture(shown) == whole
    shown.keyboard.press("ArrowRight")
    assert chart.locator(".u-value").first.inner_text() not in ("", "-", "--")

    entry = chart.locator(".u-series th").last
    for key, pressed in (("Enter", "false"), ("Space", "true")):
        entry.focus()
        assert draws_anew(shown, key)
        assert entry.get_attribute("aria-pressed") == pressed

    shown.get_by_label("Smoothing").focus()
    assert draws_anew(shown, "ArrowRight")
    shown.get_by_label("Along").focus()
    shown.keyboard.press("ArrowDown")
    assert chart.locator("th").first.inner_text().startswith("tokens")

    for key, is_open in (("Enter", True), ("Space", False)):
        shown.locator("summary").first.focus()
        shown.keyboard.press(key)
        assert shown.locator("details").first.evaluate("each => each.open") == is_open
    refreshed(shown)
    heat, said = shown.locator(".heat").first, shown.locator("[aria-live]").first
    before = said.inner_text()
    heat.focus()
    shown.keyboard.press("ArrowLeft")
    assert said.inner_text() != before


def refreshed(shown: Any) -> None:
    """With `--serve`, new data leaves zoom, hidden curves, what is open, and the focus as they are."""
    chart, summary = shown.locator(".chart").first, shown.locator("summary").first
    chart.focus()
    shown.keyboard.press("+")
    chart.locator(".u-series th").last.press("Enter")
    summary.press("Enter")
    before = picture(shown)
    shown.evaluate("refresh(structuredClone(data))")
    assert picture(shown) == before
    assert chart.locator(".u-series.u-off").count() == 1
    assert shown.locator("details").first.evaluate("each => each.open")
    assert summary.evaluate("each => each === document.activeElement")


def test_plans(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    asked = "plan mula-1b --machine dgx-h100 --ranks 16 --as-is --scale 16,32 --set parallel.tensor=2 --report"
    assert CliRunner().invoke(app, [*asked.split(), str(page)], catch_exceptions=False).exit_code == 0
    with browser() as chromium:
        shown, found = opened(chromium, page)
        assert found["charts"] == 1
        select, ranks = shown.get_by_label("Coordinate along"), shown.locator(".ranks").first
        select.focus()
        before = ranks.inner_text()
        shown.keyboard.press("ArrowDown")
        assert ranks.inner_text() != before
