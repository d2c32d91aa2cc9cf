"""The device mesh: axis names, rank arithmetic, nodes, and the layout of parameters on the mesh.

Everything here is pure arithmetic without process groups and torch, so that any machine can reason about 12,288 ranks.
"""

from optimus.mesh.layout import Layout
from optimus.mesh.mesh import Mesh
from optimus.mesh.partition import RankPartition

__all__ = ["Layout", "Mesh", "RankPartition"]
