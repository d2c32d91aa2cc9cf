"""The facts of the second stage of `prepare`: the streams of all tasks, and the plan of what to write of them."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from optimus.data.gather import PLAN, Stream
from optimus.data.helpers import Helpers
from optimus.data.journal import Counts
from optimus.data.selection import Dedup
from optimus.data.tokenizer import TokenizerInfo
from optimus.data.units import WorkUnit, do_units, naming_damage
from optimus.disk import parse_json, write_json

ENDS = "ends.npy"
PACKED = "packed.npy"

Done = Callable[[WorkUnit], None]


@dataclass
class ShardPlan:
    """The numbers of instances, of tokens and of documents (by input), and the streams of the instances."""

    instances: int
    tokens: int
    counts: list[Counts]
    streams: list[Stream]
    packed: dict[str, int] = field(default_factory=dict)  # numbers of padding tokens and cut documents
    borders: list[int] = field(default_factory=list)  # first tokens of token files, and the end of the last one

    def write(self, folder: Path) -> None:
        """Writes the plan into `folder`, which contains the streams."""
        streams = [[str(stream.path.relative_to(folder)), stream.tokens] for stream in self.streams]
        write_json(folder / PLAN, {**asdict(self), "streams": streams})

    @classmethod
    def read(cls, folder: Path) -> "ShardPlan":
        with naming_damage(folder / PLAN, folder / PLAN):
            stored = parse_json((folder / PLAN).read_bytes())
            stored["counts"] = [Counts(**each) for each in stored["counts"]]
            stored["streams"] = [Stream(folder / name, tokens) for name, tokens in stored["streams"]]
            return cls(**stored)


class OutputWork(NamedTuple):
    """The units that write an output.

    `amounts` are the sizes of the units in `bytes_each` bytes. A helper process calls `make(*setup)` for the function
    that does the units. `stage` is the name of the work in progress reports.
    """

    stage: str
    units: list[WorkUnit]
    amounts: list[int]
    bytes_each: int
    make: Callable[..., Callable[..., Any]]
    setup: tuple[Any, ...]


class Output(Protocol):
    """A form in which `prepare` writes the documents."""

    @property
    def format(self) -> str:
        """The format of the index."""

    def check(self, text_field: str, changed: Sequence[str]) -> None:
        """Raises `UserError` for options without effect. `changed` names the options that do not have their defaults."""

    def least_tokens(self, joint: "Joint") -> int:
        """Returns the number of tokens that an output needs."""

    def needs_ends(self, joint: "Joint") -> bool:
        """Returns True if the plan needs the ends of the documents."""

    def plan(self, joint: "Joint", plan: ShardPlan) -> None:
        """Completes the plan of documents that are not packed."""

    def work(self, joint: "Joint", plan: ShardPlan) -> OutputWork:
        """Returns the work of writing the output."""

    def finish(self, joint: "Joint", plan: ShardPlan) -> None:
        """Writes what is left when all units are done."""

    def sizes(self, joint: "Joint", plan: ShardPlan) -> dict[str, Any]:
        """Returns entries of the index: the type and the number of the tokens, and others."""

    def parts(self, joint: "Joint", plan: ShardPlan) -> dict[str, Any]:
        """Returns entries of the index: the list of the files."""


@dataclass
class Joint:
    """The facts that the steps need.

    `folders` contain the streams, and `counts` has the counts of the documents of each stream by input. `memory` is in
    bytes, for each of the helper processes. Units begin with number `first`.
    """

    folder: Path
    folders: Sequence[Path]
    counts: Sequence[list[Counts]]
    info: TokenizerInfo
    context: int
    seed: int
    shard_size: int
    best_fit: bool
    dedup: Dedup
    memory: int
    first: int
    is_finished: Callable[[], bool]
    output: Output
    helpers: Helpers

    @property
    def item(self) -> int:
        return np.dtype(self.info.dtype).itemsize

    def do(
        self, units: Sequence[WorkUnit], make: Callable[..., Any], *setup: Any, done: Done = lambda unit: None
    ) -> None:
        """Does the missing units with the function `make(*setup)` in the helper processes."""
        do_units(
            self.folder,
            units,
            self.helpers.serving(make, *setup),
            first=self.first % max(1, len(units)),
            is_finished=self.is_finished,
            done=done,
        )
