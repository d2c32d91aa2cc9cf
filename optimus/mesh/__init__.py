"""The device mesh: axis names, rank arithmetic, nodes, and the layout of parameters on the mesh.

The package is pure arithmetic without process groups and torch, so that any machine can compute a mesh of 12,288 ranks.
"""

from optimus.mesh.layout import Layout
from optimus.mesh.mesh import Mesh
from optimus.mesh.partition import RankPartition

__all__ = ["Layout", "Mesh", "RankPartition"]
