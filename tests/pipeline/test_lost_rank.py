"""The loss of a rank in mid-pipeline ends the other ranks with one message, which names the action and the peer."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.sweep import in_turns

# Runs first in every Python process. The rank of the middle stage is killed in its third step, before the backward pass
# of microbatch 2.
KILLED = """
import os

if os.environ.get("RANK") == "1":
    import signal
    from optimus.pipeline.executor import StageRunner

    run, seen = StageRunner.run, []

    def run_or_be_killed(self, action, received):
        if (action.kind.value, action.microbatch) == ("backward", 2):
            seen.append(action)
            if len(seen) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        return run(self, action, received)

    StageRunner.run = run_or_be_killed
"""
ACTION = "|".join(
    rf"{kind}\(stage {stage}, microbatch \d\)"  # actions of the neighbours, with the lost stage
    for stage, kinds in ((0, ("send_forward", "receive_backward")), (2, ("send_backward", "receive_forward")))
    for kind in kinds
)


@pytest.mark.slow
@pytest.mark.parametrize("executor", in_turns(["scheduled", "message-driven"], 2, always=1))
def test_the_others_name_the_action_and_the_peer(executor: str, small_run: dict[str, Any], tmp_path: Path) -> None:
    small_run["model"]["layers"] = 3
    small_run["train"] |= {"global_batch": 8, "micro_batch": 1, "precision": "float32"}
    small_run["parallel"] = {"pipeline": 3, "executor": executor}
    small_run["checkpoint"] = {"every": 1, "keep": 2}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(small_run))
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "sitecustomize.py").write_text(KILLED)
    path = os.pathsep.join(filter(None, (str(tmp_path / "first"), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "optimus", "train", str(file), "--ranks=3"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    (message,) = re.findall("^error: (.*)", done.stderr, re.M)
    parts = re.fullmatch(
        r"rank 1 was lost \(killed by SIGKILL\); the others stopped: step (\d): "
        rf"(?P<action>{ACTION}) (from|to) rank 1 of [\d,]+ bytes over ranks 0, 1, 2 failed on rank [02]: .+\. "
        r"Run again with --resume \(the run is saved up to step (\d)\)",
        message,
    )
    assert parts, message
    last, saved = int(parts[1]), int(message[-2])
    assert saved == last - 1
    direction = "to" if parts["action"].startswith("send") else "from"
    assert f") {direction} rank 1 of" in message
