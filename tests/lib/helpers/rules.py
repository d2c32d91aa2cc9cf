"""Update rules with the configuration's defaults."""

from collections import defaultdict
from collections.abc import Mapping

import torch

from optimus.config.tree import OptimizerConfig, StateConfig
from optimus.mesh import Layout, Mesh
from optimus.optim.adamw import AdamW
from optimus.optim.lion import Lion
from optimus.optim.muon import Muon
from optimus.optim.schedule_free import ScheduleFree
from optimus.state.plan import ChunkPlan, StateSpec, divide_chunks, place_chunks

_CONFIG = OptimizerConfig()
_BETA1, _BETA2 = _CONFIG.betas
_DECAY = _CONFIG.weight_decay

ADAMW = AdamW(beta1=_BETA1, beta2=_BETA2, eps=_CONFIG.eps, weight_decay=_DECAY)
LION = Lion(beta1=_BETA1, beta2=_BETA2, weight_decay=_DECAY)
MUON = Muon(momentum=_CONFIG.momentum, weight_decay=_DECAY)
SCHEDULE_FREE = ScheduleFree(beta1=_BETA1, beta2=_BETA2, eps=_CONFIG.eps, weight_decay=_DECAY)


def plan_chunks(
    layouts: Mapping[str, Layout], mesh: Mesh, rank: int, options: StateConfig, state_spec: StateSpec
) -> list[ChunkPlan]:
    """Returns the chunks of `rank`, divided and placed."""
    return place_chunks(divide_chunks(layouts, mesh, rank, options, state_spec), options, state_spec)


def state_spec(compute: torch.dtype = torch.float32) -> StateSpec:
    """Returns a state with AdamW for every parameter."""
    return StateSpec(compute, defaultdict(lambda: ADAMW))
