"""The precision of a run that leaves it to the machine (`train.precision: auto`)."""

from functools import partial
from pathlib import Path

import torch

from optimus.comm import Group
from optimus.config import RunConfig
from optimus.observe.machine import bfloat16_of
from optimus.train.start import chosen_before

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def with_precision(
    config: RunConfig, device: torch.device, resume: bool = False, world: Group | None = None
) -> tuple[RunConfig, str]:
    """`config` with a precision that says a type, and why it is that one, for the user.

    A run that is resumed keeps its own. Else it is bfloat16 on devices that compute in it, processors among them: what else
    runs there is no part of it. All ranks of `world` must call: its first one decides for all, as nodes may differ.
    """
    if config.train.precision != "auto":
        return config, ""
    choose = partial(_chosen, config, device, resume)
    precision, why = choose() if world is None else world.on_first(choose)
    return config.changed(train={"precision": precision}), why


def _chosen(config: RunConfig, device: torch.device, resume: bool) -> tuple[str, str]:
    before = chosen_before(Path(config.train.output)).get("precision") if resume else None
    if before in ("float32", "bfloat16"):
        return before, " (as the run has chosen before)"
    native, why = bfloat16_of(device)
    return "bfloat16" if native else "float32", f" (auto: {why})"
