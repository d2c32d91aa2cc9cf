"""The device mesh and the layout of parameters on the mesh. The package needs neither torch nor process groups."""

from optimus.mesh.layout import Layout
from optimus.mesh.mesh import Mesh
from optimus.mesh.partition import RankPartition

__all__ = ["Layout", "Mesh", "RankPartition"]
