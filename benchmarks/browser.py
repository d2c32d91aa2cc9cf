"""Pages in headless Chromium, driven by Playwright, for the pictures of reports and for tests of pages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CHROMIUM = shutil.which("chromium")  # the system's Chromium: nothing is downloaded


@contextmanager
def browser() -> Iterator[Any]:
    """Yields Chromium as Playwright's `Browser`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def photograph(
    chromium: Any,
    page: Path,
    picture: Path,
    width: int,
    most: int | None = None,
    *,
    dark: bool = False,
    until: str | None = None,
    scale: float = 1.0,
) -> None:
    """Writes a PNG of the page in a window of `width`; one pixel of the page is `scale` pixels of the picture.

    The picture ends below the first element that the CSS selector `until` finds, or after `most` pixels of the page.
    """
    mode = "dark" if dark else "light"
    shown = chromium.new_page(
        viewport={"width": width, "height": 900}, color_scheme=mode, device_scale_factor=scale, reduced_motion="reduce"
    )
    shown.goto(page.absolute().as_uri())
    height = shown.evaluate("document.documentElement.scrollHeight")
    if until is not None:
        box = shown.locator(until).first.bounding_box()
        height = min(height, round(box["y"] + box["height"] + 6))  # ends above the next element
    clip = {"x": 0, "y": 0, "width": width, "height": min(height, most or height)}
    taken = BytesIO(shown.screenshot(full_page=True, clip=clip))
    with_palette(Image.open(taken).convert("RGB")).save(picture, optimize=True)
    shown.close()


def with_palette(image: Image.Image) -> Image.Image:
    """Returns the image with its 256 most frequent colours, a third of the bytes.

    Surfaces, curves and most of the text keep their exact colours.
    """
    red, green, blue = np.moveaxis(np.asarray(image).astype(np.int32), 2, 0)
    found, where, counts = np.unique(red << 16 | green << 8 | blue, return_inverse=True, return_counts=True)
    colours = np.stack([found >> 16, found >> 8 & 255, found & 255], 1)
    palette = colours[np.argsort(-counts, kind="stable")[:256]]
    # Pillow's own search is not exact
    nearest = np.array([np.square(palette - colour).sum(1).argmin() for colour in colours], np.uint8)
    made = Image.frombytes("P", image.size, nearest[where.reshape(-1)].tobytes())
    made.putpalette(palette.astype(np.uint8).tobytes())
    return made
