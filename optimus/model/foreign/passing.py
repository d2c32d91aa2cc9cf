"""The state of a forward pass through a `ForeignModel`, and the interface of the model to its modules.

Legend: B batch, S sequence, H hidden.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from optimus.model.foreign.columns import Columns
from optimus.model.sequence import SequenceSplit
from optimus.step_context import StepContext


@dataclass
class Passing:
    """The state of one forward pass through a stage."""

    blocks: range
    first: bool
    last: bool
    sequence: SequenceSplit
    documents: bool
    received_BSH: Tensor | None
    stream_BSH: Tensor | None = None  # residual stream that leaves the stage
    hidden_BSH: Tensor | None = None  # input of the output layer


class ModelHost(Protocol):
    """The attributes of a `ForeignModel` that its modules use."""

    passing: Passing | None
    step: StepContext

    @property
    def columns(self) -> Columns:
        """The collectives on sharded activations."""

    @property
    def current(self) -> Passing:
        """The state of the running forward pass."""

    def entered(self, x: Tensor) -> Tensor:
        """Returns `columns.enter(x)`, cached for consecutive calls with the same `x`."""

    def running(self, passing: Passing | None) -> AbstractContextManager[None]:
        """Makes the modules read and write `passing` inside the `with` block."""
