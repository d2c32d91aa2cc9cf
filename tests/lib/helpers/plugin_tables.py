"""Undoes the loading of plugins, so that a test leaves the tables as they were."""

from collections.abc import Iterator
from contextlib import contextmanager

from optimus import plugins


@contextmanager
def tables_restored() -> Iterator[None]:
    """Removes, at the end of the block, the rows that plugins have added in it."""
    rows = {id(table): dict(table._added) for table in plugins._TABLES}
    loaded = dict(plugins._LOADED)
    try:
        yield
    finally:
        for table in plugins._TABLES:
            table._added.clear()
            table._added.update(rows.get(id(table), {}))
        plugins._LOADED.clear()
        plugins._LOADED.update(loaded)
