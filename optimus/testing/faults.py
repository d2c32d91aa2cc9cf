"""Fault injection by rank and step, to rehearse a run's recovery."""

import errno
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml
from pydantic import ConfigDict, Field
from torch.utils.hooks import RemovableHandle

from optimus.checkpoint.folder import step_folder
from optimus.checkpoint.format import file_of
from optimus.config.load import validated
from optimus.config.yaml_text import parse_yaml
from optimus.disk import user_path
from optimus.errors import UserError
from optimus.launch.rank import run_as_rank
from optimus.resilience.events import EventLog
from optimus.section import Section
from optimus.training.record import StepRecord
from optimus.training.trainer import Hook, Order, Trainer

FaultKind = Literal["kill", "segfault", "kill_agent", "nan", "hang", "slow", "tear_checkpoint", "fill_disk", "cut"]


class Fault(Section):
    """A fault on `rank` at `step`."""

    model_config = ConfigDict(frozen=True)

    kind: FaultKind
    rank: int = Field(ge=0)
    step: int = Field(ge=1)
    factor: float = Field(1.0, ge=1, allow_inf_nan=False)
    """slow: the duration of a step as a multiple of the usual duration, from `step` on."""

    def event(self) -> dict[str, Any]:
        """Returns the fields that identify the fault in the event log."""
        return {"rank": self.rank, "step": self.step, "detail": f"{self.kind} on rank {self.rank}, by the fault plan"}


@dataclass
class FaultPlan:
    """A list of faults to inject. The methods named after a fault return a plan with this fault added."""

    faults: list[Fault] = field(default_factory=list)

    def kill(self, rank: int, step: int) -> "FaultPlan":
        """Kills the rank at the start of `step`."""
        return self._with("kill", rank, step)

    def segfault(self, rank: int, step: int) -> "FaultPlan":
        """Ends the rank by SIGSEGV, which names hardware, at the start of `step`."""
        return self._with("segfault", rank, step)

    def kill_agent(self, rank: int, step: int) -> "FaultPlan":
        """Kills the node's agent and ranks at the start of `step`."""
        return self._with("kill_agent", rank, step)

    def cut(self, rank: int, step: int) -> "FaultPlan":
        """Cuts the link of the rank's node at the start of `step`. Works only in network namespaces."""
        return self._with("cut", rank, step)

    def nan(self, rank: int, step: int) -> "FaultPlan":
        """Makes the rank's first block return NaN in the training passes of `step`."""
        return self._with("nan", rank, step)

    def hang(self, rank: int, step: int) -> "FaultPlan":
        """Makes the rank hang for ever at the start of `step`."""
        return self._with("hang", rank, step)

    def slow(self, rank: int, factor: float, step: int = 1) -> "FaultPlan":
        """Slows the rank's steps down by about `factor`, from `step` on."""
        return self._with("slow", rank, step, factor)

    def tear_checkpoint(self, rank: int, step: int) -> "FaultPlan":
        """Cuts off half of the rank's file in the checkpoint of `step`."""
        return self._with("tear_checkpoint", rank, step)

    def fill_disk(self, rank: int, step: int) -> "FaultPlan":
        """Simulates a full disk at the rank's first write to a checkpoint after the start of `step`."""
        return self._with("fill_disk", rank, step)

    def _with(self, kind: FaultKind, rank: int, step: int, factor: float = 1.0) -> "FaultPlan":
        return FaultPlan([*self.faults, Fault(kind=kind, rank=rank, step=step, factor=factor)])

    def faults_of(self, rank: int) -> list[tuple[int, Fault]]:
        """Returns the faults of a rank, with their numbers in the plan."""
        return [(number, fault) for number, fault in enumerate(self.faults) if fault.rank == rank]

    def write(self, path: Path) -> None:
        """Writes the plan as a YAML list."""
        path.write_text(yaml.safe_dump([fault.model_dump() for fault in self.faults]), encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> "FaultPlan":
        """Reads a plan from a YAML file, a list of entries like `{kind: kill, rank: 1, step: 12}`."""
        try:
            text = user_path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"fault plan {path} cannot be read: {error}") from error
        raw = parse_yaml(text, f"fault plan {path}")
        if not isinstance(raw, list):
            raise UserError(f"fault plan {path} is not a list of faults such as {{kind: kill, rank: 1, step: 12}}")
        return cls([_fault(entry, f"fault plan {path}, entry {number}") for number, entry in enumerate(raw, start=1)])


def rank_program(inject: str | Path, ranks: int) -> list[str]:
    """Returns [module, first argument] of a rank program that carries out the plan in file `inject`."""
    plan = FaultPlan.read(inject)
    if far := [fault for fault in plan.faults if fault.rank >= ranks]:
        raise UserError(f"fault plan {inject}: there is no rank {far[0].rank}: the run has ranks 0 to {ranks - 1}")
    return ["optimus.testing.faults", str(user_path(inject).absolute())]


def is_due(run: Path, plan: FaultPlan, number: int) -> bool:
    """Returns True if fault `number` of the plan has yet to happen in this run, and then records the fault."""
    event, log = plan.faults[number].event(), EventLog(run)
    injected = sum(each["kind"] == "injected" and event.items() <= each.items() for each in log.read())
    if injected > sum(earlier.event() == event for earlier in plan.faults[:number]):
        return False
    log.write("injected", **event)
    return True


def _fault(entry: Any, where: str) -> Fault:
    if not isinstance(entry, dict):
        raise UserError(f"{where} is not a fault such as {{kind: kill, rank: 1, step: 12}}")
    return validated(Fault, entry, where, Fault)


class Inject(Hook):
    """Carries out this rank's faults of a `FaultPlan`."""

    order = Order.FIRST

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan
        self._usual = 0.0  # seconds of the previous step, without waiting for other ranks
        self._began = self._waited = 0.0
        self._poison: RemovableHandle | None = None

    def before_training(self, trainer: Trainer) -> None:
        self._faults = self._plan.faults_of(trainer.groups.rank)

    def before_step(self, trainer: Trainer) -> None:
        step, factor = trainer.progress.step + 1, 1.0
        for number, fault in self._faults:
            if fault.kind == "slow":
                factor = max(factor, fault.factor if step >= fault.step else 1.0)
            elif fault.kind != "tear_checkpoint" and step == fault.step and self._is_due(trainer, number):
                getattr(self, f"_{fault.kind}")(trainer)

        time.sleep((factor - 1) * self._usual)
        self._began, self._waited = time.perf_counter(), trainer.groups.recorder.seconds

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        if self._poison is not None:
            self._poison.remove()
        waited = trainer.groups.recorder.seconds - self._waited
        self._usual = max(0.0, time.perf_counter() - self._began - waited)
        for number, fault in self._faults:
            if fault.kind == "tear_checkpoint":
                file = step_folder(trainer.folder, fault.step) / file_of(fault.rank)
                if file.exists() and self._is_due(trainer, number):
                    os.truncate(file, file.stat().st_size // 2)

    def _is_due(self, trainer: Trainer, number: int) -> bool:
        return is_due(trainer.folder, self._plan, number)

    def _kill(self, trainer: Trainer) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _segfault(self, trainer: Trainer) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def _kill_agent(self, trainer: Trainer) -> None:
        agent = psutil.Process(os.getppid())
        for process in [agent, *(child for child in agent.children() if child.pid != os.getpid())]:
            process.kill()
        self._kill(trainer)

    def _cut(self, trainer: Trainer) -> None:
        if not any(os.path.samefile("/proc/self/ns/net", each) for each in Path("/run/netns").glob("*")):
            raise UserError(
                "a fault plan can cut links in the lab only: this rank is in the network of the machine itself"
            )
        device = os.environ["GLOO_SOCKET_IFNAME"]  # the launcher sets this variable
        subprocess.run(["ip", "link", "set", device, "down"], check=True)

    def _hang(self, trainer: Trainer) -> None:
        while True:
            time.sleep(3600)

    def _nan(self, trainer: Trainer) -> None:
        blocks = next(iter(trainer.model.stages.values())).row

        def poison(_module: Any, _inputs: Any, output: Any) -> Any:
            x, *others = output if isinstance(output, tuple) else (output,)
            if not x.requires_grad:
                return None  # a pass without gradients, such as validation
            return (x * math.nan, *others) if isinstance(output, tuple) else x * math.nan

        # The hook stays until the end of the step, because recomputation must reproduce the activations.
        self._poison = next(iter(blocks)).register_forward_hook(poison)

    def _fill_disk(self, trainer: Trainer) -> None:
        saver = trainer.checkpointer.saver
        right = saver.write

        def refuse(*_: Any) -> Any:
            saver.write = right
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        saver.write = refuse


if __name__ == "__main__":
    run_as_rank(sys.argv[2:], [Inject(FaultPlan.read(sys.argv[1]))])
