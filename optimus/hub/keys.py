"""Our parameters and the tensors they are in a Hugging Face folder, by the key table of the family.

Every published tensor is a view of one of our parameters (`model/families/family.py`). Export writes these views and import
copies into them, so both directions are the same table and exact.

Legend: E experts, I intermediate, H hidden.
"""

import re
from collections.abc import Iterator

from torch import Tensor

from optimus.model.families import Key, families


def published(family: str, name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(published name, view of `parameter`) for every tensor that our parameter `name` is made of."""
    key, layer = _find(family, name)
    per_expert = "{e}" in key.names[0]
    for e, expert in enumerate(parameter) if per_expert else [(0, parameter)]:
        stacked = expert if len(key.names) > 1 else expert[None]
        for pattern, view in zip(key.names, stacked, strict=True):
            whole = view.flatten(0, 1) if key.joined else view
            yield pattern.format(i=layer, e=e), whole.T if key.transposed else whole


def fused(family: str, name: str, parameter: Tensor) -> tuple[str, Tensor] | None:
    """(name, view of `parameter`, of experts [E, 2 I, H] or [E, H, I]) of the fused form; None where there is none."""
    key, layer = _find(family, name)
    if key.fused is None:
        return None
    return key.fused.format(i=layer), parameter.flatten(1, -2) if parameter.dim() > 2 else parameter


def _find(family: str, name: str) -> tuple[Key, str]:
    layer = re.match(r"blocks\.(\d+)\.", name)
    return families()[family].keys[re.sub(r"^blocks\.\d+\.", "blocks.{i}.", name)], layer[1] if layer else ""
