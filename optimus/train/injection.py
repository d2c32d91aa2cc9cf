"""The hook that lets the faults of a plan happen on this rank."""

import errno
import math
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
from torch.utils.hooks import RemovableHandle

from optimus.checkpoint import saving
from optimus.checkpoint.folder import step_folder
from optimus.checkpoint.format import file_of
from optimus.errors import UserError
from optimus.resilience.faults import FaultPlan, happens_now
from optimus.train.hooks import Hook
from optimus.train.run import Run
from optimus.train.step import StepResult


class Inject(Hook):
    """Carries out a `FaultPlan`."""

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan
        self._factor = 1.0
        self._usual = 0.0  # seconds of a step that this rank does not wait
        self._began = self._waited = 0.0
        self._poison: RemovableHandle | None = None

    def before_training(self, run: Run) -> None:
        self._own = self._plan.of(run.groups.rank)

    def before_step(self, run: Run) -> None:
        self._began, self._waited = time.perf_counter(), run.groups.recorder.seconds
        for number, fault in self._own:
            if fault.kind == "slow":
                self._factor = max(self._factor, fault.factor if run.step + 1 >= fault.step else 1.0)
            elif fault.kind != "tear_checkpoint" and run.step + 1 == fault.step and self._happens_now(run, number):
                getattr(self, f"_{fault.kind}")(run)

        time.sleep((self._factor - 1) * self._usual)

    def after_step(self, run: Run, result: StepResult) -> None:
        if self._poison is not None:
            self._poison.remove()
        waited = run.groups.recorder.seconds - self._waited
        self._usual = max(0.0, time.perf_counter() - self._began - waited) / self._factor
        for number, fault in self._own:
            if fault.kind == "tear_checkpoint":
                file = step_folder(run.folder, fault.step) / file_of(fault.rank)
                if file.exists() and self._happens_now(run, number):
                    os.truncate(file, file.stat().st_size // 2)

    def _happens_now(self, run: Run, number: int) -> bool:
        return happens_now(run.folder, self._plan, number)

    def _kill(self, run: Run) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _kill_agent(self, run: Run) -> None:
        agent = psutil.Process(os.getppid())
        for process in [agent, *(child for child in agent.children() if child.pid != os.getpid())]:
            process.kill()
        self._kill(run)

    def _cut(self, run: Run) -> None:
        if not any(os.path.samefile("/proc/self/ns/net", each) for each in Path("/run/netns").glob("*")):
            raise UserError("links can be cut in the lab only: this is the network of the machine itself")
        device = os.environ["GLOO_SOCKET_IFNAME"]  # the launcher has set it
        subprocess.run(["ip", "link", "set", device, "down"], check=True)

    def _hang(self, run: Run) -> None:
        while True:
            time.sleep(3600)

    def _nan(self, run: Run) -> None:
        blocks = next(iter(run.model.stages.values()))

        def poison(_module: Any, _inputs: Any, output: Any) -> Any:
            x, *others = output if isinstance(output, tuple) else (output,)
            if not x.requires_grad:
                return None  # in a pass that only counts or evaluates: nothing of it reaches the gradients
            return (x * math.nan, *others) if isinstance(output, tuple) else x * math.nan

        # Until the end of the step: where activations are recomputed, they must come out alike.
        self._poison = next(iter(blocks)).register_forward_hook(poison)

    def _fill_disk(self, run: Run) -> None:
        right = saving.write_boxes

        def refuse(*_: Any) -> Any:
            saving.write_boxes = right
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        saving.write_boxes = refuse  # type: ignore[assignment]
