"""The section `pruning`."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from optimus.section import Section


class PruningConfig(Section):
    """Pruning of parameters during the run (SAMO)."""

    sparsity: float = Field(gt=0, lt=1, description="Final sparsity: fraction of the targets that is pruned.")
    at: list[int] = Field(min_length=1)
    """Step after which pruning takes place (0: before the first step), or steps for iterative pruning. With early-bird:
    the step of the first mask."""
    method: Literal["magnitude", "random", "early-bird"] = "magnitude"
    """Choice of the pruned weights. magnitude: the smallest; random: by train.seed; early-bird: the smallest, once the
    masks hardly change (early-bird tickets)."""
    schedule: Literal["geometric", "cubic"] = "geometric"
    """With several steps: growth of the sparsity. geometric: each step prunes the same fraction of the remaining
    weights; cubic: the early steps prune most."""
    scope: Literal["global", "layer", "block 16x16"] = "global"
    """Comparison of weights. global: over all targets; layer: within each tensor; block 16x16: whole blocks of 16 x 16
    weights, over all targets."""
    targets: list[str] | None = None
    """Roles (matrix, expert) or shell patterns of names, as in optimizer.groups. Default: all matrices and experts."""
    rewind: int | None = Field(None, ge=0)
    """Step to whose weights pruning resets the unpruned parameters, with fresh optimizer state: 0 (initial weights), or
    a step whose weights the run keeps (checkpoint.weights_every). Default: no rewinding."""
    every: int = Field(25, gt=0, description="With early-bird: steps between the masks that are compared.")
    distance: float = Field(0.1, gt=0, lt=1)
    """With early-bird: prune once the last five distances between masks, as shares of the remaining weights, are below
    this value."""
    indices: Literal["int32", "bits"] = "int32"
    """Storage of masks. int32: 4 bytes for each unpruned parameter; bits: one bit for each parameter."""

    @field_validator("at", mode="before")
    @classmethod
    def _one(cls, value: Any) -> Any:
        return [value] if isinstance(value, int) else value

    @model_validator(mode="after")
    def _steps(self) -> "PruningConfig":
        if self.at != sorted({*self.at}) or self.at[0] < 0:
            raise ValueError(f"at {self.at}: give steps in ascending order, each once, from 0 on")
        if self.method == "early-bird" and len(self.at) > 1:
            raise ValueError("at: method early-bird chooses the step: give only the step of the first mask")
        if self.rewind is not None and self.rewind > self.at[0]:
            raise ValueError(
                f"rewind {self.rewind} is after the first pruning, at step {self.at[0]}: give an earlier step"
            )
        return self

    @property
    def comes_first(self) -> bool:
        """True if the first pruning takes place before the first step."""
        return self.at[0] == 0 and self.method != "early-bird"

    def shares(self, *, begins: bool = True) -> list[float | None]:
        """Returns the unpruned shares of the targets: at the first step (None if no pruning precedes the step), then
        after each later pruning. Without `begins` (a resumed or branched run), returns None, then the share after every
        pruning."""
        first = int(self.comes_first and begins)
        events = [self.unpruned(event) for event in range(len(self.at))]
        return [events[0] if first else None, *events[first:]]

    def unpruned(self, event: int) -> float:
        """Returns the unpruned share of the targets after pruning number `event`, counted from 0."""
        done = (event + 1) / len(self.at)
        if self.schedule == "geometric":
            return float((1 - self.sparsity) ** done)
        return float(1 - self.sparsity * (1 - (1 - done) ** 3))
