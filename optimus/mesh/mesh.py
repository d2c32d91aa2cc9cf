"""Rank arithmetic over two views of the same ranks (MoE parallel folding).

    dense view:   pp x dp  x cp x tp       with tp = tp_in x tp_out
    expert view:  pp x edp x ep x etp      with dp * cp * tp = edp * ep * etp

A group along `embedding` joins the first and the last rank along `pp`; each other rank along `pp` is alone in its
group. The tensor-parallel grid of `tp_in` and `tp_out` is from AxoNN. The last axis of a view is innermost. The axes
of `runs_of_tensor(n)` divide `tp_out`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from optimus.errors import UserError
from optimus.mesh.partition import RankPartition, Table

DENSE = ("pp", "dp", "cp", "tp_in", "tp_out")
EXPERT = ("pp", "edp", "ep", "etp")
_RUNS, _IN_RUN = "tp_out/", "tp_out:"


def runs_of_tensor(ranks: int) -> tuple[str, str]:
    """Returns two axes that replace `tp_out`: runs of `ranks` neighbours along `tp_out`, and the ranks of a run.

    Fewer ranks along `tp_out` are one run.
    """
    return f"{_RUNS}{ranks}", f"{_IN_RUN}{ranks}"


def divides_data(axis: str) -> bool:
    """Returns True for an axis of data parallelism, also within a layer: its ranks compute with different tokens."""
    return axis in ("dp", "cp", "edp") or axis.startswith(_RUNS)


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes, and the order of the ranks.

    `ranks_per_node` None means one node. With `pipeline_stride`, a stage's ranks form blocks of `pipeline_stride`
    consecutive ranks, and one block of every stage comes before any stage's next block.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    tp_in: int = 1
    ranks_per_node: int | None = None
    pipeline_stride: int | None = None

    def __post_init__(self) -> None:
        """Raises `UserError` when the sizes of the axes or `pipeline_stride` do not fit together."""
        if self.tp % self.tp_in:
            raise UserError(f"tp_in {self.tp_in} does not divide tp {self.tp}")
        stage, experts = self.stage, self.ep * self.etp
        if stage % experts:
            fitting = [n for n in range(1, stage + 1) if stage % (n * self.etp) == 0]
            near = sorted(fitting, key=lambda n: (abs(n - self.ep), n))[:3]
            raise UserError(
                f"expert ranks do not fit: ep {self.ep} x etp {self.etp} = {experts} does not divide "
                f"dp {self.dp} x cp {self.cp} x tp {self.tp} = {stage}; "
                + (f"the nearest ep that fit: {', '.join(map(str, sorted(near)))}" if near else "change etp")
            )
        least = math.lcm(self.cp * self.tp, experts)
        if self.pipeline_stride is not None and (self.pipeline_stride % least or stage % self.pipeline_stride):
            fitting = [n for n in range(least, stage + 1, least) if stage % n == 0]
            raise UserError(
                f"pipeline_stride {self.pipeline_stride} cuts a stage's {stage} ranks into blocks that do not hold whole "
                f"context-, tensor- and expert-parallel groups: choose one of {', '.join(map(str, fitting))}"
            )

    @classmethod
    def from_sizes(
        cls,
        ranks: int,
        *,
        pipeline: int = 1,
        data: int | None = None,
        context: int = 1,
        tensor: Sequence[int] = (1, 1),
        expert: int = 1,
        expert_tensor: int = 1,
        ranks_per_node: int | None = None,
        pipeline_stride: int | None = None,
    ) -> "Mesh":
        """Returns the mesh of `ranks` ranks.

        `tensor` is (tp_out, tp_in). `data` is the size of dp, by default `ranks` divided by `pipeline`, `context` and
        both sizes of `tensor`. Raises `UserError` when the product of the dense view's sizes is not `ranks`.
        """
        tp = math.prod(tensor)
        others = pipeline * context * tp
        if data is None and ranks % others == 0:
            data = ranks // others
        if data is None or data * others != ranks:
            sizes = f"parallel.context {context} x parallel.tensor {tp} = {others}"
            if pipeline > 1:
                sizes = f"parallel.pipeline {pipeline} x {sizes}"
            if data is None:
                raise UserError(
                    f"{sizes} does not divide {ranks} ranks: use `ranks={max(1, ranks // others) * others}` or change these "
                    "sizes"
                )
            raise UserError(
                f"parallel.data {data} x {sizes} makes {data * others}, but there are {ranks} ranks: "
                f"use `ranks={data * others}`, or leave parallel.data out"
            )
        return cls(
            pipeline, data, context, tp, expert, expert_tensor, tensor[1],
            ranks_per_node=ranks_per_node, pipeline_stride=pipeline_stride,
        )  # fmt: skip

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.pp * self.stage

    @property
    def stage(self) -> int:
        """Number of ranks of a pipeline stage."""
        return self.dp * self.cp * self.tp

    @property
    def block(self) -> int:
        """Number of ranks in a block of a stage; without `pipeline_stride`, a stage is one block."""
        return self.pipeline_stride or self.stage

    @property
    def alternates(self) -> bool:
        """True if the stages alternate in blocks of ranks."""
        return self.block < self.stage

    @property
    def edp(self) -> int:
        """Number of ranks of a pipeline stage that store the same slice of the same experts."""
        return self.stage // (self.ep * self.etp)

    @property
    def tp_out(self) -> int:
        """Number of ranks along the innermost axis of the dense view."""
        return self.tp // self.tp_in

    @property
    def embedding(self) -> int:
        """Number of ranks in a group of the first and the last rank along `pp`."""
        return min(self.pp, 2)

    def axis_size(self, *axes: str) -> int:
        """Returns the product of the sizes of `axes`."""
        return math.prod(map(self._axis_size, axes))

    def coordinate(self, rank: int, axis: str) -> int:
        """Returns the index of `rank` on `axis`."""
        if axis == "pp":
            return rank // self.block % self.pp
        within = rank // (self.block * self.pp) * self.block + rank % self.block  # rank within the stage
        return within // self._inner(axis) % self.axis_size(axis)

    def group(self, rank: int, axes: Sequence[str]) -> list[int]:
        """Returns the group of `rank` along `axes` of one view, in rank order."""
        view, axes = view_of(axes), _single(axes)
        ranges: list[Sequence[int]] = [
            range(self.axis_size(axis)) if axis in axes else (self.coordinate(rank, axis),) for axis in view
        ]
        if "embedding" in axes and self.coordinate(rank, "pp") in (0, self.pp - 1):
            ranges[0] = sorted({0, self.pp - 1})
        return sorted(map(sum, product(*map(self._offsets, view, ranges))))

    def groups(self, axes: Sequence[str]) -> RankPartition:
        """Returns all groups along `axes` of one view."""
        view, single = view_of(axes), _single(axes)
        block, sizes = self.block, [self.axis_size(axis) for axis in view]
        ranks = np.arange(self.size, dtype=np.int32).reshape(-1, self.pp, block).swapaxes(0, 1).reshape(sizes)
        along = [dim for dim, axis in enumerate(view) if axis in single or (axis == "pp" and "embedding" in single)]

        def table(ranks: Table) -> Table:
            rows = np.moveaxis(ranks, along, range(-len(along), 0))
            return np.sort(rows.reshape(-1, math.prod(rows.shape[len(view) - len(along) :])), axis=1)

        if "embedding" not in single or self.pp == 1:
            return RankPartition([table(ranks)])
        alone = [table(stage[None]) for stage in ranks[1:-1]]  # stages between the first and the last stage
        return RankPartition([table(ranks[[0, -1]]), *alone])

    def node(self, rank: int) -> int:
        """Returns the index of the node of `rank`."""
        return rank // (self.ranks_per_node or self.size)

    def _axis_size(self, axis: str) -> int:
        if axis.startswith((_RUNS, _IN_RUN)):
            run = min(int(axis[len(_RUNS) :]), self.tp_out)
            return run if axis.startswith(_IN_RUN) else self.tp_out // run
        size: int = getattr(self, axis)
        return size

    def _offsets(self, axis: str, indices: Sequence[int]) -> list[int]:
        """Returns the amounts that `indices` on `axis` add to the number of a rank."""
        block = self.block
        if axis == "pp":
            return [index * block for index in indices]
        inner, blocks = self._inner(axis), self.pp * block
        return [index * inner // block * blocks + index * inner % block for index in indices]

    def _inner(self, axis: str) -> int:
        """Returns the distance, in ranks of a stage, between neighbours on `axis`."""
        view = view_of((axis,))
        return 1 if axis == "tp" else self.axis_size(*view[view.index(axis) + 1 :])


def view_of(axes: Sequence[str]) -> tuple[str, ...]:
    """Returns the first view that has all of `axes` except `embedding`. Raises `ValueError` if no view does."""
    runs = {runs_of_tensor(int(axis[len(_RUNS) :])) for axis in axes if axis.startswith((_RUNS, _IN_RUN))}
    for view in (DENSE, EXPERT, *((*DENSE[:-1], *each) for each in runs)):
        if set(_single(axes)) - {"embedding"} <= set(view):
            return view
    raise ValueError(f"no view of the mesh has all of the axes {', '.join(axes)}")


def _single(axes: Sequence[str]) -> list[str]:
    """Replaces `tp` in `axes` by `tp_in` and `tp_out`."""
    return [single for axis in axes for single in (("tp_in", "tp_out") if axis == "tp" else (axis,))]
