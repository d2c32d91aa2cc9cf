"""Gloo in the place of a backend without tags, such as NCCL."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist


@contextmanager
def another_backend() -> Iterator[None]:
    """Makes Gloo pass for a backend other than Gloo. Its waits make the host wait, so collectives of rounds end before
    the call that begins them returns."""
    new_group = dist.new_group

    def of_gloo(*args: Any, backend: str, **options: Any) -> Any:
        assert backend == "another"
        return new_group(*args, **options)

    another = mock.patch.object(dist, "get_backend", return_value="another")
    with another, mock.patch.object(dist, "new_group", of_gloo):
        yield
