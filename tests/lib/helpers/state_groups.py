"""Groups of a model state, and the units of its model, without a run."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from optimus.comm import Groups
from optimus.config.tree import StateConfig
from optimus.mesh import Layout, Mesh
from optimus.model import Transformer
from optimus.model.units import replace_all, units_of
from optimus.parallel.parallelize import always
from optimus.parallel.recompute import Recomputation, Recompute
from optimus.resolve.groups import state_groups
from optimus.state.gathering import ParameterPrefetcher
from optimus.state.model_state import ModelState
from optimus.state.plan import StateSpec, divide_chunks
from optimus.step_context import StepContext


def groups_for(mesh: Mesh, layouts: Mapping[str, Layout], options: StateConfig) -> Groups:
    """Returns the groups along the axes of the mesh, and those that shard the state."""
    groups = Groups(mesh)
    groups.make(state_groups(mesh, layouts, options))
    return groups


def model_state(
    module: nn.Module,
    layouts: Mapping[str, Layout],
    groups: Groups,
    options: StateConfig,
    *,
    spec: StateSpec,
    **more: Any,
) -> ModelState:
    """Returns the state of a model with one stage."""
    divided = {0: divide_chunks(layouts, groups.mesh, groups.rank, options, spec)}
    return ModelState(module, layouts, groups, options, divided, spec=spec, **more)


def gather_units(model: Transformer, gathering: ParameterPrefetcher, recompute: tuple[str, ...] = ()) -> None:
    """Makes each unit gather its parameters, and send their gradients to the gradient buffers."""
    replace_all(model, {"gradients": always(gathering.gradient_buffers)})
    Recompute(Recomputation(recompute), StepContext(), gathering.unit).arrange([model.blocks], units_of(model))
