"""A page in headless Chromium, and what it says of itself."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

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
    text: document.body.innerText, legend: first.querySelector(".u-value").textContent,
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
