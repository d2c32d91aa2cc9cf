"""Pages in headless Chromium, driven by Playwright: for the pictures of reports, and for tests of what a user sees."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

CHROMIUM = shutil.which("chromium")  # the system's: nothing is downloaded


@contextmanager
def browser() -> Iterator[Any]:
    """Chromium, as Playwright's `Browser`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def photograph(chromium: Any, page: Path, picture: Path, width: int, most: int) -> None:
    """Write a PNG of the page, as wide as its window, and at most so many pixels high."""
    shown = chromium.new_page(viewport={"width": width, "height": 900})
    shown.goto(page.absolute().as_uri())
    height = min(most, shown.evaluate("document.documentElement.scrollHeight"))
    clip = {"x": 0, "y": 0, "width": width, "height": height}
    taken = BytesIO(shown.screenshot(full_page=True, clip=clip))
    Image.open(taken).convert("RGB").quantize(method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        picture, optimize=True
    )
    shown.close()
