"""Maps the library's parameters to the tensors of a Hugging Face folder, by the key table of the family.

Every tensor in the table is a view of one of the library's parameters or buffers (`model/families/family.py`). The
export writes these views, and the import copies into these views.

Legend: E experts, I intermediate, H hidden.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from optimus.model.families import Key, families


class Published(NamedTuple):
    """A published tensor, and a view of the library's parameter with the same elements in the same order. `shape` may
    differ from the shape of `view`."""

    name: str
    view: Tensor
    shape: tuple[int, ...]


def published(family: str, name: str, parameter: Tensor) -> Iterator[Published]:
    """Yields every published tensor of the library's parameter `name`."""
    key, layer = _find(family, name)
    per_expert = "{e}" in key.names[0]
    for e, expert in enumerate(parameter) if per_expert else [(0, parameter)]:
        stacked = expert if len(key.names) > 1 else expert[None]
        for pattern, view in zip(key.names, stacked, strict=True):
            tensor = view.flatten(0, 1) if key.joined else view
            tensor = tensor.mT if key.transposed else tensor
            shape = tuple(tensor.shape)
            if key.interleaved:
                tensor, shape = tensor.movedim(1, -1), (shape[0], *shape[2:-1], 2 * shape[-1])
            yield Published(pattern.format(i=layer, e=e), tensor, shape)


def fused(family: str, name: str, parameter: Tensor) -> Published | None:
    """Returns the fused form of experts ([E, 2 I, H] or [E, H, I]) or of a router ([E, H]); None for parameters without
    a fused form."""
    key, layer = _find(family, name)
    if key.fused is None:
        return None
    view = parameter.flatten(1, -2) if parameter.dim() > 2 else parameter
    return Published(key.fused.format(i=layer), view, tuple(view.shape))


def _find(family: str, name: str) -> tuple[Key, str]:
    layer = re.match(r"blocks\.(\d+)\.", name)
    return families()[family].keys[re.sub(r"^blocks\.\d+\.", "blocks.{i}.", name)], layer[1] if layer else ""
