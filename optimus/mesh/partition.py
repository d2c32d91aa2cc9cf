"""Partitions of ranks into groups."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.int32]
"""An array [groups, ranks] of groups of equal size."""


class RankPartition:
    """A partition of the ranks into groups, which may differ in size.

    Two partitions are equal if they have the same groups in any order; the order of the ranks in each group matters.
    """

    def __init__(self, tables: Iterable[Table]) -> None:
        by_size: dict[int, list[Table]] = {}
        for table in tables:
            if table.size:
                by_size.setdefault(table.shape[1], []).append(table.astype(np.int32, copy=False))
        merged = [those[0] if len(those) == 1 else np.concatenate(those) for _, those in sorted(by_size.items())]
        self.tables = [joined[np.argsort(joined[:, 0])] for joined in merged]
        self._key = tuple((table.shape, table.tobytes()) for table in self.tables)

    @classmethod
    def from_groups(cls, groups: Iterable[Sequence[int]]) -> "RankPartition":
        """Makes a partition from the ranks of each group."""
        return cls(np.array([group], np.int32) for group in groups)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RankPartition) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __len__(self) -> int:
        """Returns the number of groups."""
        return sum(map(len, self.tables))

    def __iter__(self) -> Iterator[list[int]]:
        """Yields the ranks of each group, in ascending order of (size, first rank)."""
        for table in self.tables:
            yield from table.tolist()

    @property
    def largest(self) -> int:
        """Number of ranks of the largest group."""
        return max((table.shape[1] for table in self.tables), default=0)

    def group(self, rank: int) -> list[int]:
        """Returns the ranks of the group that contains `rank`. Raises `ValueError` when no group contains `rank`."""
        for table in self.tables:
            if len(positions := np.flatnonzero(table == rank)):
                found: list[int] = table[positions[0] // table.shape[1]].tolist()
                return found
        raise ValueError(f"rank {rank} is in none of the groups")

    def size_of(self, rank: int) -> int:
        """Returns the number of ranks of the group that contains `rank`. A group must contain `rank`."""
        return self.largest if len(self.tables) == 1 else len(self.group(rank))

    def cut(self, into: Callable[[Table], Table]) -> "RankPartition":
        """Divides or regroups the groups: `into` maps a table of groups to the table of the new groups."""
        return RankPartition(map(into, self.tables))
