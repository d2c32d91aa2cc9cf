"""The version check of `transformers`, and a context manager that silences the package."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from optimus.errors import UserError, how_to_install

_LEAST = (5, 17)  # the oldest supported version


def needed_transformers() -> None:
    """Raises `UserError` if `transformers` is missing or older than `_LEAST`."""
    least = ".".join(map(str, _LEAST))
    try:
        found = version("transformers")
    except PackageNotFoundError:
        raise UserError(
            f"model.transformers needs the package transformers, version {least} or newer: {how_to_install('hf')}"
        ) from None
    if release_of(found) < _LEAST:
        raise UserError(
            f"model.transformers needs transformers {least} or newer, and {found} is installed: {how_to_install('hf')}"
        )


def release_of(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version, such as (5, 17) of "5.17rc1"."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


@contextmanager
def silent_transformers() -> Iterator[None]:
    """Suppresses the warnings and progress bars of `transformers` inside the `with` block. Raises `UserError` if the
    package is missing or too old."""
    needed_transformers()
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
