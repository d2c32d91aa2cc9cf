"""The checksums of the rows that a run has read, in files beside the run."""

import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimus.errors import naming_disk_errors

BYTES = 4  # of a row's checksum


class RowChecksums:
    """The CRC-32 of each row in the file `path`, which has `rows` times `BYTES` bytes; 0 for a row that no rank has read.

    The ranks and the restarts of a run share the file, which needs no lock: all of them write the same bytes.
    """

    def __init__(self, path: Path, rows: int) -> None:
        self.path = path
        with self._naming():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            os.ftruncate(self._file, BYTES * rows)

    def is_same(self, row: int, content: NDArray[Any]) -> bool:
        """Returns False if the run has read `row` before, with another content. Raises `UserError` if the file cannot
        be written."""
        found = zlib.crc32(np.ascontiguousarray(content).data) or 1
        with self._naming():
            known = int.from_bytes(os.pread(self._file, BYTES, BYTES * row), "little")
            if not known:
                os.pwrite(self._file, found.to_bytes(BYTES, "little"), BYTES * row)
        return known in (0, found)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def _naming(self) -> Any:
        return naming_disk_errors(self.path, "Free space, or correct the folder's permissions")


@contextmanager
def checksums_in(folder: Path, index: dict[str, Any], rows: int) -> Iterator[RowChecksums]:
    """Opens the checksums of the rows with the description `index` in `folder`."""
    name = hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()[:16]
    found = RowChecksums(folder / f"{name}.crc32", rows)
    try:
        yield found
    finally:
        found.close()
