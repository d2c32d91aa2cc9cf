"""Pages in a browser: the verdict first, every chart drawn, no console output, no request.

Pages are readable wide and narrow, light and dark, and by keyboard. The page of a run with failures is in
`tests/testing/test_lab.py`.
"""

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.browser import browser
from helpers.browser import needs_browser, opened
from optimus.cli import app
from optimus.report.page import write_report

pytestmark = needs_browser


def draws_anew(shown: Any, *keys: str) -> bool:
    """Returns whether the keys change the first chart."""
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
    write_samples(run)
    write_report([run, *others], tmp_path / "three.html")
    with browser() as chromium:
        # Seven curves, one of the score; for each run time and memory, and two canvases of the expert load.
        for name, charts, canvases, widths in (("one", 9, 11, (1280, 390)), ("three", 13, 19, (390, 1280))):
            shown, found = opened(chromium, tmp_path / f"{name}.html", widths)
            assert (found["charts"], len(found["canvases"]), found["lanes"]) == (charts, canvases, 4)
            assert "sciq" in found["text"]
        keys_do_what_the_mouse_does(shown)


def test_a_run_with_little_in_its_files(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    """A step without the load of a layer, a simulation without events, and events that take no time."""
    for name, stop, rectangles in (("one", 1.0, 1), ("none", 0.0, 0)):
        run = make_run(tmp_path / name)
        loads = ({"step": 10, "load": {"1": [1.0]}}, {"step": 20, "load": {"3": [0.5, 1.5]}})
        (run / "experts.jsonl").write_text("".join(json.dumps(load) + "\n" for load in loads))
        events = [[0, "forward", 0, 0, 0.0, stop]]
        (run / "timeline.json").write_text(json.dumps({"ranks": 1, "events": events, "simulated": []}))
        write_report([run], tmp_path / f"{name}.html")
        with browser() as chromium:
            _, found = opened(chromium, tmp_path / f"{name}.html")
            assert "step 20, expert 0: no load in this step" in found["text"]
            assert found["lanes"] == rectangles
            assert not {"NaN", "Infinity"}.intersection(found["text"].split())


def keys_do_what_the_mouse_does(shown: Any) -> None:
    """Keys do the same as the mouse, on a page of three runs."""
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
    said = [each.inner_text() for each in chart.locator(".u-value").all() if each.is_visible()]
    assert said[0].replace(",", "").isdecimal()  # the tokens
    assert all(each in shown.locator("#said").inner_text() for each in said)

    entry = chart.locator(".u-series th").last
    for key, pressed in (("Enter", "false"), ("Space", "true")):
        entry.focus()
        assert draws_anew(shown, key)
        assert entry.get_attribute("aria-pressed") == pressed

    shown.get_by_label("Smoothing").focus()
    assert draws_anew(shown, "ArrowRight")
    shown.get_by_label("Along").focus()
    shown.keyboard.press("ArrowUp")
    assert chart.locator("th").first.inner_text().startswith("step")

    for key, is_open in (("Enter", True), ("Space", False)):
        shown.locator("summary").first.focus()
        shown.keyboard.press(key)
        assert shown.locator("details").first.evaluate("each => each.open") == is_open
    refreshed(shown)
    heat, said = shown.locator(".heat").first, shown.locator(".panel [aria-live]").first
    before = said.inner_text()
    heat.focus()
    shown.keyboard.press("ArrowLeft")
    assert said.inner_text() != before


def refreshed(shown: Any) -> None:
    """New data of `--serve` keeps zoom, hidden curves, open sections and the focus."""
    chart, summary = shown.locator(".chart").first, shown.locator("summary").first
    chart.focus()
    shown.keyboard.press("+")
    chart.locator(".u-series th").last.press("Enter")
    summary.press("Enter")
    before = picture(shown)
    shown.evaluate("refresh(structuredClone(data))")
    assert picture(shown) == before
    # The measured values are hidden, the smoothed ones are visible.
    assert [each.is_visible() for each in chart.locator(".u-series.u-off").all()] == [False, True]
    assert shown.locator("details").first.evaluate("each => each.open")
    assert summary.evaluate("each => each === document.activeElement")


def test_a_value_that_is_not_finite_is_said(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    write_report([make_run(tmp_path / "run", loss=float("-inf"))], tmp_path / "page.html")
    with browser() as chromium:
        shown, _ = opened(chromium, tmp_path / "page.html")
        chart = shown.locator(".chart").first
        assert chart.locator(".u-value").last.inner_text() == "-inf"
        chart.focus()
        smoothed = (0.9 * 0.1 * 4.975 + 0.1 * 4.95) / 0.19  # the mean of the first two steps
        for key, value in (
            ("ArrowRight", "-inf"),
            ("Shift+ArrowLeft", f"{smoothed:.3f}"),
            ("Shift+ArrowRight", "-inf"),
        ):
            shown.keyboard.press(key)
            assert chart.locator(".u-value").last.inner_text() == value


def write_samples(run: Path) -> None:
    rows = [
        {
            "step": step,
            "samples": [{"prompt": "def f(", "text": f"x{step}\n" * 30}, {"prompt": "import", "text": " \n"}],
        }
        for step in (10, 20)
    ]
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_comes_first_and_what_is_folded(tmp_path: Path, make_run: Callable[..., Path], scheme: str) -> None:
    """The page is in order in each window, and passes the rules of axe-core in its colours."""
    run = make_run(tmp_path / "run", z_loss=0.0, skipped_steps=0)
    write_samples(run)
    with (run / "events.jsonl").open("a") as file:
        file.write(
            json.dumps({"time": 1e9 + 50, "kind": "error", "detail": "a " + 40 * "long word " + 90 * "x"}) + "\n"
        )
    page = tmp_path / "page.html"
    write_report([run], page)
    with browser() as chromium:
        for widths in ((390, 1280), (1280, 390)):
            shown, found = opened(chromium, page, widths, scheme)
            comes_first(shown, found["text"])
            has_the_colours(shown, dark=scheme == "dark")
        reads_events_without_scrolling(shown)
        unfolds_what_is_zero(shown)


def comes_first(shown: Any, text: str) -> None:
    """The verdict comes first, then four numbers, the loss, and the rest."""
    shown.evaluate("scrollTo(0, 0)")  # the controls stay in the window
    tops = [
        shown.locator(each).first.bounding_box()["y"]
        for each in (".verdict", ".numbers", "section .chart", ".controls", "section:nth-of-type(2)")
    ]
    assert tops == sorted(set(tops))
    assert tops[0] < 100
    assert shown.locator(".verdict").inner_text() == (
        "finished after 40 of 40 steps in 80 s; best 2 bits per byte at step 10; slowest: computation, 75.0 %"
    )
    numbers = [each.inner_text() for each in shown.locator(".numbers .large").all()]
    assert numbers == ["2", "4.037", "256", "20,480"]
    assert shown.locator("section h2").first.inner_text().startswith("Loss")
    # Generated samples, newest first
    assert text.index("x20") < text.index("(white space alone)") < text.index("Earlier")


def has_the_colours(shown: Any, dark: bool) -> None:
    """The page and a chart have the colours of the system's scheme; changing the scheme redraws the chart."""
    light = "each => getComputedStyle(each).backgroundColor.match(/[0-9.]+/g).slice(0, 3).every(part => part > 128)"
    assert [shown.locator(each).first.evaluate(light) for each in ("body", ".panel")] == [not dark] * 2
    before = picture(shown)
    for other in (True, False):
        shown.emulate_media(color_scheme="dark" if dark != other else "light")
        is_so = "([before, other]) => (document.querySelector('canvas').toDataURL() !== before) === other"
        shown.wait_for_function(is_so, arg=[before, other])  # a busy machine draws later
        assert (picture(shown) != before) == other


def reads_events_without_scrolling(shown: Any) -> None:
    """Each event is a list of its fields at 390 pixels, while a screen reader gets the table."""
    events = shown.locator("section", has=shown.get_by_role("heading", name="Events"))
    region = events.get_by_role("region")
    assert region.evaluate("each => each.scrollWidth - each.clientWidth") <= 0
    rows = events.get_by_role("row").all()
    assert len(rows) == 4
    cells = [[each for each in row.get_by_role("cell").all() if each.is_visible()] for row in rows[1:]]
    assert [len(each) for each in cells] == [6, 4, 4]  # fields without a value are left out
    for cell in chain(*cells):
        box = cell.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
    shown.set_viewport_size({"width": 1280, "height": 900})
    assert len({cell.bounding_box()["y"] for cell in cells[0]}) == 1
    shown.set_viewport_size({"width": 390, "height": 900})


def unfolds_what_is_zero(shown: Any) -> None:
    """A key unfolds the charts of metrics that are 0 throughout; inside, charts are as wide as the others."""
    fold, widths = shown.locator("details.zero"), "all => all.map(each => each.clientWidth)"
    assert fold.locator("summary").inner_text() == "0 throughout: Skipped steps, Router z-loss"
    assert fold.locator(".chart").count() == 2
    assert not fold.locator(".chart").first.is_visible()
    shown.locator("details.zero summary").focus()
    shown.keyboard.press("Enter")
    shown.wait_for_function("document.querySelector('.zero .uplot').clientWidth > 300")
    assert fold.locator(".chart").first.is_visible()
    assert (
        fold.locator("canvas").evaluate_all(widths)
        == [shown.locator("canvas").first.evaluate("each => each.clientWidth")] * 2
    )
    assert shown.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


_RED_ROWS = """(canvas, colour) => {
  const { width, height } = canvas, all = canvas.getContext("2d").getImageData(0, 0, width, height).data, rows = [];
  for (let at = 0; at < all.length; at += 4) {
    const is = colour.every((part, i) => Math.abs(all[at + i] - part) < 12) && all[at + 3] > 200;
    if (is) rows.push(Math.floor(at / 4 / width));
  }
  return [rows[0], rows.at(-1), height];
}"""  # for a canvas: first and last row of pixels with the colour, and the height


def test_runs_of_unequal_length(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    """Runs are compared on tokens and on their share of the run, and a failure marks only the curve of its own run.

    Legends have the last values, also those of a shorter run after its end.
    """
    short, long = make_run(tmp_path / "short"), make_run(tmp_path / "long", steps=200)
    (short / "events.jsonl").unlink()
    write_report([short, long], tmp_path / "two.html")
    write_report([long], tmp_path / "one.html")
    write_report([short, make_run(tmp_path / "same")], tmp_path / "equal.html")
    red = [163, 22, 26]
    with browser() as chromium:
        one, _ = opened(chromium, tmp_path / "one.html")
        first, last, height = one.locator(".chart canvas").first.evaluate(_RED_ROWS, red)
        assert last - first > 0.6 * height
        equal, _ = opened(chromium, tmp_path / "equal.html")
        assert equal.get_by_label("Along").input_value() == "step"

        shown, _ = opened(chromium, tmp_path / "two.html")
        chart, along = shown.locator(".chart").first, shown.get_by_label("Along")
        first, last, _ = chart.locator("canvas").evaluate(_RED_ROWS, red)
        assert 10 <= last - first <= 20
        assert along.input_value() == "tokens"

        def legend() -> list[str]:
            return [each.inner_text() for each in chart.locator(".u-value").all() if each.is_visible()]

        slider = shown.get_by_label("Smoothing")
        slider.focus()
        shown.keyboard.press("Home")  # no smoothing
        assert legend() == ["last", "4", "4"]
        assert "short: 4" in chart.get_attribute("aria-label")
        for name, ends in (("share", ["100 %", "4", "4"]), ("seconds", ["6.7 min", "4 (last)", "4"])):
            along.select_option(name)
            chart.focus()
            shown.keyboard.press("0")
            for _ in range(15):
                shown.keyboard.press("Shift+ArrowRight")
            assert legend() == ends


def test_plans(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    asked = "plan mula-1b --machine dgx-h100 --ranks 16 --as-is --scale 16,32 --set parallel.tensor=2 --report"
    assert CliRunner().invoke(app, [*asked.split(), str(page)], catch_exceptions=False).exit_code == 0
    with browser() as chromium:
        opened(chromium, page, scheme="dark")
        shown, found = opened(chromium, page)
        assert found["charts"] == 1
        assert shown.locator(".chart .u-value").first.inner_text() == "32"  # the most
        select, ranks = shown.get_by_label("Coordinate along"), shown.locator(".ranks").first
        select.focus()
        before = ranks.inner_text()
        shown.keyboard.press("ArrowDown")
        assert ranks.inner_text() != before
