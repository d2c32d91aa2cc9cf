"""The layout of a parameter on the mesh."""

from dataclasses import dataclass

from optimus.errors import UserError
from optimus.mesh.mesh import Mesh


@dataclass(frozen=True)
class Layout:
    """The layout of a parameter on the mesh. `shape` is the global shape, and a rank stores one slice.

    `sharded_dims` has a pair (tensor dim, mesh axis) for each split; the splits of one dim are ordered from coarse to
    fine. Ranks along `partial_axes` have the same slice, and the gradient is the sum of these ranks' gradients. Ranks
    along `replicated_axes` have the same slice and compute the same gradient, except along `embedding`, where the
    gradients of a step are added. Along a dim in `uneven`, slices may differ by one in size.
    """

    shape: tuple[int, ...]
    sharded_dims: tuple[tuple[int, str], ...] = ()
    partial_axes: tuple[str, ...] = ("dp", "cp")
    replicated_axes: tuple[str, ...] = ()
    uneven: tuple[int, ...] = ()

    def region(self, mesh: Mesh, rank: int) -> tuple[slice, ...]:
        """Returns the slice of the global tensor that `rank` stores, as one Python slice per dim.

        Raises `UserError` when the mesh does not evenly divide a dim outside `uneven`.
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
        """Returns the shape of rank 0's slice."""
        return tuple(part.stop - part.start for part in self.region(mesh, 0))

    def first_holds(self, mesh: Mesh, rank: int) -> bool:
        """Returns whether `rank` is the first of the ranks that store the same slice."""
        return rank == min(mesh.group(rank, (*self.partial_axes, *self.replicated_axes)))
