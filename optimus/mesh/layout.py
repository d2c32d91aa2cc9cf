"""How one parameter lives on the mesh: what every user of the model state reads, set once per parameter."""

from dataclasses import dataclass

from optimus.errors import UserError
from optimus.mesh.mesh import Mesh


@dataclass(frozen=True)
class Layout:
    """`shape` is global. `sharded_dims` pairs a tensor dim with the mesh axis that it is split over, the coarser split of
    a dim first; along `partial_axes` every rank holds the same part (Elixir's parallel pattern: a group of replicas and a
    group of parts), and the part's gradient is the sum of what they have. Along `replicated_axes` they hold the same part,
    and find the same gradient by themselves; those along `embedding` add theirs up at the end of a step. The parts of a dim
    in `uneven` may differ by one in size; the first are the largest."""

    shape: tuple[int, ...]
    sharded_dims: tuple[tuple[int, str], ...] = ()
    partial_axes: tuple[str, ...] = ("dp", "cp")
    replicated_axes: tuple[str, ...] = ()
    uneven: tuple[int, ...] = ()

    def region(self, mesh: Mesh, rank: int) -> tuple[slice, ...]:
        """The part of the global tensor that `rank` holds. Raises `UserError` when a dim cannot be split as asked."""
        slices = [slice(0, size) for size in self.shape]
        for dim, axis in self.sharded_dims:
            parts, whole = mesh.axis_size(axis), slices[dim]
            size, left = divmod(whole.stop - whole.start, parts)
            if left and dim not in self.uneven:
                raise UserError(
                    f"dim {dim} of a parameter of shape {list(self.shape)} cannot be split over {axis} {parts}: "
                    f"{whole.stop - whole.start} is not a multiple of {parts}"
                )
            index = mesh.coordinate(rank, axis)
            start = whole.start + index * size + min(index, left)
            slices[dim] = slice(start, start + size + (index < left))
        return tuple(slices)

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """The shape of the largest part that a rank holds."""
        return tuple(part.stop - part.start for part in self.region(mesh, 0))

    def first_holds(self, mesh: Mesh, rank: int) -> bool:
        """Whether `rank`, which holds a part, is the first of all that hold the same."""
        return rank == min(mesh.group(rank, (*self.partial_axes, *self.replicated_axes)))
