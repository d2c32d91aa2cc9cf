"""The ranks of a job as a grid: axis names, rank arithmetic, nodes, and how a parameter lies on it.

Pure arithmetic: no process group and no torch, so that 12,288 ranks can be reasoned about anywhere.
"""

from optimus.mesh.layout import Layout
from optimus.mesh.mesh import Mesh
from optimus.mesh.partition import RankPartition

__all__ = ["Layout", "Mesh", "RankPartition"]
