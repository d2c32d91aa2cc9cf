"""The page in a browser: nothing on its console, no request, all charts drawn, at two widths and by keyboard."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optimus.report.page import write_report

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--virtual-time-budget=3000", "--enable-logging=stderr", "--dump-dom",
]  # fmt: skip
# What the page looks like when it is there, into the title.
LOOK = """<script>addEventListener("load", () => setTimeout(() => {
  const inked = canvas => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some(value => value);
  const first = document.querySelector(".chart");
  first.focus();
  const press = key => first.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  press("ArrowRight");
  document.title = JSON.stringify({
    charts: document.querySelectorAll(".chart").length, canvases: [...document.querySelectorAll("canvas")].map(inked),
    lanes: document.querySelectorAll(".lanes rect").length, requests: performance.getEntriesByType("resource").length,
    wide: document.documentElement.scrollWidth - innerWidth, focused: document.activeElement === first,
    legend: first.querySelector(".u-value").textContent,
    nameless: [...document.querySelectorAll("[tabindex], button, select, input")].filter(
      each => !each.getAttribute("aria-label") && !each.labels?.length && !each.textContent).length });
}, 500))</script></body>"""


def look(page: Path, width: int, tmp_path: Path) -> Any:
    """What the page says of itself; fails where its console says anything."""
    assert CHROMIUM is not None
    observed = page.with_name(f"observed-{page.name}")
    observed.write_text(page.read_text().replace("</body>", LOOK))
    profile = tmp_path / f"profile-{page.stem}-{width}"
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},900", observed.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not said, said
    title = re.search("<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stdout[:2000]
    return json.loads(title[1].replace("&amp;", "&"))


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian's package `chromium`)")
def test_reports_in_a_browser(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    run = make_run(tmp_path / "run", loss=float("nan"))
    events = [[0, "forward", 0, 0, 0.0, 1.0], [1, "backward", 1, 0, 1.0, 3.0]]
    (run / "timeline.json").write_text(json.dumps({"ranks": 2, "events": events, "simulated": events}))
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
