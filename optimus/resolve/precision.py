"""The choice of the compute precision for `train.precision: auto`."""

from collections.abc import Mapping
from typing import Any

import torch

from optimus.config import RunConfig
from optimus.resolve.decision import Decided

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def precision(config: RunConfig, bfloat16: tuple[bool, str], previous: Mapping[str, Any]) -> Decided:
    """Decides on bfloat16 for a device with native support, otherwise on float32.

    `bfloat16` is a pair: True if the device has native support, and the evidence. A precision in `previous` takes
    precedence.
    """
    if config.train.precision != "auto":
        return Decided()
    before = previous.get("train.precision")
    if before in DTYPES:
        return Decided({"train.precision": before}, "as the run chose at its start", persistent=True)
    native, why = bfloat16
    return Decided({"train.precision": "bfloat16" if native else "float32"}, why, persistent=True)
