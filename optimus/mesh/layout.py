"""The layout of a parameter on the mesh: its sharded dims, and the axes along which ranks store the same part."""

from dataclasses import dataclass

from optimus.errors import UserError
from optimus.mesh.mesh import Mesh


@dataclass(frozen=True)
class Layout:
    """The layout of a parameter with the global shape `shape`. A part is the slice that a rank stores.

    `sharded_dims` has a pair (tensor dim, mesh axis) for each split; of two splits of one dim, the coarser comes first.
    Along `partial_axes` all ranks have the same part, and the gradient is the sum of the ranks' gradients. Along
    `replicated_axes` all ranks have the same part and compute the same gradient, except along `embedding`, where the
    ranks add their gradients at the end of a step. Parts of a dim in `uneven` may differ by one in size, and no part is
    larger than the first part.
    """

    shape: tuple[int, ...]
    sharded_dims: tuple[tuple[int, str], ...] = ()
    partial_axes: tuple[str, ...] = ("dp", "cp")
    replicated_axes: tuple[str, ...] = ()
    uneven: tuple[int, ...] = ()

    def region(self, mesh: Mesh, rank: int) -> tuple[slice, ...]:
        """Returns the slices of the global tensor that `rank` stores, one for each dim.

        Raises `UserError` when the mesh does not divide a dim outside `uneven` evenly.
        """
        slices = [slice(0, size) for size in self.shape]
        for dim, axis in self.sharded_dims:
            parts, extent = mesh.axis_size(axis), slices[dim]
            size, remainder = divmod(extent.stop - extent.start, parts)
            if remainder and dim not in self.uneven:
                raise UserError(
                    f"dim {dim} of a parameter of shape {list(self.shape)} cannot be split over {axis} {parts}: "
                    f"{extent.stop - extent.start} is not a multiple of {parts}"
                )
            index = mesh.coordinate(rank, axis)
            start = extent.start + index * size + min(index, remainder)
            slices[dim] = slice(start, start + size + (index < remainder))
        return tuple(slices)

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Returns the shape of the largest part that a rank stores."""
        return tuple(part.stop - part.start for part in self.region(mesh, 0))

    def first_holds(self, mesh: Mesh, rank: int) -> bool:
        """Returns whether `rank` is the first of the ranks that store the same part."""
        return rank == min(mesh.group(rank, (*self.partial_axes, *self.replicated_axes)))
