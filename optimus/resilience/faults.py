"""Failures on purpose: a plan of what goes wrong on which rank in which step, to rehearse what a run does about it.

Every fault of a plan happens once in the life of a run, also when the step is run again after a restart: the event log says
which have happened.
"""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from optimus.config.yaml_text import parse_yaml
from optimus.disk import user_path
from optimus.errors import UserError, nearest
from optimus.resilience.events import EventLog

Kind = Literal["kill", "kill_agent", "nan", "hang", "slow", "tear_checkpoint", "fill_disk", "cut"]
_KINDS = get_args(Kind)


@dataclass(frozen=True)
class Fault:
    """What happens on `rank` when it begins `step`, or, of a checkpoint, when that of `step` is written."""

    kind: Kind
    rank: int
    step: int
    factor: float = 1.0  # slow: times the usual duration of a step, from this one on

    def event(self) -> dict[str, Any]:
        """What the event log says when it happens."""
        return {"rank": self.rank, "step": self.step, "detail": f"{self.kind} on rank {self.rank}, by the fault plan"}


@dataclass
class FaultPlan:
    """Faults, by methods that can be chained or from a YAML file."""

    faults: list[Fault] = field(default_factory=list)

    def kill(self, rank: int, step: int) -> "FaultPlan":
        """The rank is killed, as if it ran out of memory."""
        return self._with("kill", rank, step)

    def kill_agent(self, rank: int, step: int) -> "FaultPlan":
        """The rank's whole node is lost: its agent and its ranks are killed."""
        return self._with("kill_agent", rank, step)

    def cut(self, rank: int, step: int) -> "FaultPlan":
        """The rank's node loses its link. In the lab with network namespaces only."""
        return self._with("cut", rank, step)

    def nan(self, rank: int, step: int) -> "FaultPlan":
        """The rank computes numbers that are not finite, in its first block."""
        return self._with("nan", rank, step)

    def hang(self, rank: int, step: int) -> "FaultPlan":
        """The rank does not go on."""
        return self._with("hang", rank, step)

    def slow(self, rank: int, factor: float, step: int = 1) -> "FaultPlan":
        """The rank takes `factor` times as long for every step from `step` on."""
        return self._with("slow", rank, step, factor)

    def tear_checkpoint(self, rank: int, step: int) -> "FaultPlan":
        """Half of what the rank has written into the checkpoint of `step` is lost."""
        return self._with("tear_checkpoint", rank, step)

    def fill_disk(self, rank: int, step: int) -> "FaultPlan":
        """The rank finds the disk full when it writes its part of the checkpoint of `step`."""
        return self._with("fill_disk", rank, step)

    def _with(self, kind: Kind, rank: int, step: int, factor: float = 1.0) -> "FaultPlan":
        return FaultPlan([*self.faults, Fault(kind, rank, step, factor)])

    def of(self, rank: int) -> list[tuple[int, Fault]]:
        """The faults of a rank, with their numbers in the plan."""
        return [(number, fault) for number, fault in enumerate(self.faults) if fault.rank == rank]

    def write(self, path: Path) -> None:
        """Write the plan as a YAML list."""
        path.write_text(yaml.safe_dump([asdict(fault) for fault in self.faults]), encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> "FaultPlan":
        """The plan in a YAML file: a list such as `{kind: kill, rank: 1, step: 12}`. Raises `UserError`."""
        try:
            text = user_path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"fault plan {path} cannot be read: {error}") from error
        raw = parse_yaml(text, f"fault plan {path}")
        if not isinstance(raw, list):
            raise UserError(f"fault plan {path} is no list; one fault is {{kind: kill, rank: 1, step: 12}}")
        return cls([_fault(entry, f"fault plan {path}, entry {number}") for number, entry in enumerate(raw, start=1)])


def happens_now(run: Path, plan: FaultPlan, number: int) -> bool:
    """Whether fault `number` of the plan has not happened in this run yet; from now on it has.

    Equal faults of a plan happen one after another. Those of an earlier launch count where they are equal.
    """
    fault, log = plan.faults[number], EventLog(run)
    event = fault.event()
    happened = sum(each["kind"] == "injected" and event.items() <= each.items() for each in log.read())
    if happened > plan.faults[:number].count(fault):
        return False
    log.write("injected", **event)
    return True


def _fault(entry: Any, where: str) -> Fault:
    if not isinstance(entry, dict):
        raise UserError(f"{where} is no mapping; one is {{kind: kill, rank: 1, step: 12}}")
    names = Fault.__dataclass_fields__
    for key in entry:
        if key not in names:
            raise UserError(f"{where}: unknown key '{key}': {nearest(str(key), names)}")
    if entry.get("kind") not in _KINDS:
        raise UserError(f"{where}: kind is '{entry.get('kind')}': {nearest(str(entry.get('kind')), _KINDS)}")
    for key, least in (("rank", 0), ("step", 1)):
        if type(entry.get(key)) is not int or entry[key] < least:
            raise UserError(f"{where}: {key} is {entry.get(key)!r}: give a number from {least} on")
    factor = entry.get("factor", 1.0)
    if type(factor) not in (int, float) or not 1 <= factor < math.inf:
        raise UserError(f"{where}: factor is {factor!r}: give a number from 1 on")
    return Fault(entry["kind"], entry["rank"], entry["step"], float(factor))
