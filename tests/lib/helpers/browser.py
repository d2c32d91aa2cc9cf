"""Checks a page as users see it: in headless Chromium, wide and narrow, by keyboard, and by the rules of axe-core."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.browser import CHROMIUM

HAS_BROWSER = CHROMIUM is not None and find_spec("axe_playwright_python") is not None
needs_browser = pytest.mark.skipif(
    not HAS_BROWSER,
    reason="needs chromium (Debian's package `chromium`) and axe-playwright-python (`make install-dev`)",
)
_RULES = "wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"  # wcag2aa includes text contrast
_LOOK = """async () => {
  await new Promise(done => requestAnimationFrame(() => setTimeout(done)));  // until a new width is drawn
  const inked = ({ width, height }, number, all) => {
    const copy = new OffscreenCanvas(width, height).getContext("2d");
    copy.drawImage(all[number], 0, 0);
    return copy.getImageData(0, 0, width, height).data.some(value => value);
  };
  const all = document.querySelectorAll("select, button, input, summary, [tabindex]");
  window.tabbed = [...all].filter(each => each.checkVisibility());
  return {
    charts: document.querySelectorAll(".chart").length, canvases: [...document.querySelectorAll("canvas")].map(inked),
    letters: Math.min(...Array.from(document.querySelectorAll("svg text"), each => each.getBoundingClientRect().height)),
    lanes: document.querySelectorAll(".lanes rect").length, requests: performance.getEntriesByType("resource").length,
    wide: document.documentElement.scrollWidth - innerWidth, text: document.body.innerText, controls: tabbed.length };
}"""
_FOCUSED = """() => {
  const here = document.activeElement, seen = getComputedStyle(here).outlineStyle !== "none";
  return [tabbed.indexOf(here), seen];
}"""


def opened(
    chromium: Any, page: Path, widths: Sequence[int] = (1280, 390), scheme: str = "light", *, canvases: bool = True
) -> tuple[Any, dict[str, Any]]:
    """Opens the page in a window of each of these widths, light or dark; returns the page and its contents in the last
    one. `canvases` is False for a page without curves.

    Fails if the console shows a message, the page requests anything or is wider than its window, a chart is empty, or
    the letters of a drawing are lower than 9 pixels.
    In the last width, also fails if a rule of axe-core is broken, or Tab does not reach every control in order.
    """
    said: list[str] = []
    shown = chromium.new_page(color_scheme=scheme)
    shown.on("console", lambda message: said.append(message.text))
    shown.on("pageerror", lambda error: said.append(str(error)))
    shown.goto(page.absolute().as_uri())
    for width in widths:
        shown.set_viewport_size({"width": width, "height": 900})
        found = shown.evaluate(_LOOK)
        assert found["requests"] == 0
        assert found["wide"] <= 0
        assert found["letters"] >= 9, "the letters of a drawing are too small to read"
        assert bool(found["canvases"]) is canvases
        assert all(found["canvases"])
    assert violations(shown, *_RULES) == []
    reached = []
    for _ in range(found["controls"]):
        shown.keyboard.press("Tab")
        reached.append(shown.evaluate(_FOCUSED))
    assert reached == [[number, True] for number in range(found["controls"])]
    assert not said, said
    return shown, found


def violations(shown: Any, *rules: str) -> list[tuple[str, list[str]]]:
    """Returns the rules of axe-core, of these or in these groups, that an open page breaks, each with the elements."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(shown, options={"runOnly": list(rules)}).response["violations"]
    return [(each["id"], [node["html"] for node in each["nodes"]]) for each in found]
