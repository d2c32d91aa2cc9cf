"""Maps the library's tensors to the tensors of a Hugging Face folder.

Legend: E experts, I intermediate, H hidden.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from optimus.model.families import Key, families


class Published(NamedTuple):
    """The name and shape of a published tensor, and a view of the library's tensor.

    `view.reshape(shape)` has the layout of the published tensor.
    """

    name: str
    view: Tensor
    shape: tuple[int, ...]


def published(family: str, name: str, parameter: Tensor) -> Iterator[Published]:
    """Yields the published tensors of the library's tensor `name`."""
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
    """Returns the fused form of experts ([E, 2 I, H] or [E, H, I]) or of a router ([E, H]); None if there is none."""
    key, layer = _find(family, name)
    if key.fused is None:
        return None
    view = parameter.flatten(1, -2) if parameter.dim() > 2 else parameter
    return Published(key.fused.format(i=layer), view, tuple(view.shape))


def _find(family: str, name: str) -> tuple[Key, str]:
    layer = re.match(r"blocks\.(\d+)\.", name)
    return families()[family].keys[re.sub(r"^blocks\.\d+\.", "blocks.{i}.", name)], layer[1] if layer else ""
