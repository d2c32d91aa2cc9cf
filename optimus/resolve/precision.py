"""The type of the computation, where a run leaves it to the machine (`train.precision: auto`)."""

from collections.abc import Mapping
from typing import Any

import torch

from optimus.config import RunConfig
from optimus.resolve.decision import Decided

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def precision(config: RunConfig, bfloat16: tuple[bool, str], previous: Mapping[str, Any]) -> Decided:
    """bfloat16 on devices that compute in it, processors among them; a run that is resumed keeps its own.

    `bfloat16`: whether the device computes in it, and why."""
    if config.train.precision != "auto":
        return Decided()
    before = previous.get("train.precision")
    if before in DTYPES:
        return Decided({"train.precision": before}, "as the run has chosen before", kept=True)
    native, why = bfloat16
    return Decided({"train.precision": "bfloat16" if native else "float32"}, why, kept=True)
