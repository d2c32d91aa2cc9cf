"""Groups of a model state without a run."""

from collections.abc import Mapping

from optimus.comm import Groups
from optimus.config.tree import StateConfig
from optimus.mesh import Layout, Mesh
from optimus.resolve.groups import state_divisions


def groups_for(mesh: Mesh, layouts: Mapping[str, Layout], options: StateConfig) -> Groups:
    """Those along the axes of the mesh, and those among which the state is sharded."""
    groups = Groups(mesh)
    groups.make(state_divisions(mesh, layouts, options))
    return groups
