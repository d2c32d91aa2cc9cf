"""From a configuration to a finished run: checks, then one process here or several ranks under TorchElastic."""

import logging
import os
import sys
import tempfile
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from optimus.checkpoint.folder import list_checkpoints, read_description
from optimus.config import RunConfig, dump_config, load_config
from optimus.data import Shards
from optimus.errors import UserError, naming_disk_errors
from optimus.hub import read_model_folder
from optimus.observe.machine import find_device
from optimus.observe.metrics import read_metrics
from optimus.train import checks
from optimus.train.hooks import Checkpoints, HeldOut, Hook, Interrupt, Metrics, NonFinite
from optimus.train.loop import train_loop
from optimus.train.run import Run, build_run


def train(
    config: str | Path | Mapping[str, Any] | RunConfig,
    overrides: Iterable[str] = (),
    *,
    ranks: int | None = None,
    resume: bool = False,
    check: bool = False,
) -> dict[str, Any]:
    """Train as `config` (a YAML file, a mapping or a `RunConfig`) says; returns a summary of the run.

    `ranks` processes on this machine share every global batch (default: `parallel.data`, else one); under a launcher that
    sets WORLD_SIZE, such as torchrun, this process is one of its ranks. `resume` continues from the newest checkpoint in
    `train.output`. `check` validates everything, every checksum of the data included, and runs nothing.

    Raises `UserError` for anything that the user can mend, before any process is started wherever that is possible.
    """
    tree = load_config(config, overrides, read_model_folder)
    launched = "WORLD_SIZE" in os.environ
    ranks = int(os.environ["WORLD_SIZE"]) if launched else ranks or tree.parallel.data or 1
    shards = _check(tree, ranks, resume)
    if check:
        shards.verify()
        return {"ok": True, "output": tree.train.output, "steps": tree.train.steps, "ranks": ranks}
    try:
        if ranks == 1 or launched:
            _run_rank(dump_config(tree), resume)
        else:
            _launch(dump_config(tree), resume, ranks)
    except UserError as error:
        found = list_checkpoints(Path(tree.train.output))
        saved = f" (the run is saved up to step {read_description(found[-1]).step})" if found else ""
        raise UserError(f"{error}{saved}") from error
    return _summary(Path(tree.train.output))


def _check(config: RunConfig, ranks: int, resume: bool) -> Shards:
    device = find_device(config.train.device, "train.device")
    shards = Shards(config.data.path)
    shards.check_model(config.train.context, config.model.vocab)
    checks.check_ranks(config, ranks)
    checks.check_references(config, resume)
    if int(os.environ.get("RANK", "0")) == 0:
        checks.check_output(config, resume, shards)
    checks.check_memory(config, device, ranks)
    return shards


def _launch(config: str, resume: bool, ranks: int) -> None:
    """Start the ranks on this machine, each this module as a program, and wait for them."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it says of a failed rank, we say
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(config, encoding="utf-8")
        try:
            elastic_launch(launch, sys.executable)("-m", __name__, str(file), *(["--resume"] if resume else []))
        except SignalException:
            pass  # the ranks have had the signal too: they finish their step and save, and the summary says where
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            said: Any = failure.message  # a mapping, its traceback in it, of a rank that could write one
            text = said["message"].removeprefix("UserError: ") if isinstance(said, dict) else said
            raise UserError(f"rank {rank} failed: {text}") from error


def _run_rank(config_text: str, resume: bool) -> None:
    """One rank's whole run, under the launcher's environment where there is one."""
    config = load_config(yaml.safe_load(config_text))
    local_rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = find_device(config.train.device, "train.device", local_rank)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    elif ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", ranks))))
    if ranks > 1:
        dist.init_process_group(dist.get_default_backend_for_device(device))
    try:
        run = build_run(config, device, resume)
        run.notes.append(checks.dry_run(run))
        if run.groups.rank == 0:
            _claim_folder(run)
        train_loop(run, _hooks(run))
    finally:
        if ranks > 1:
            dist.destroy_process_group()


def _hooks(run: Run) -> list[Hook]:
    """Metrics follow what measures for them and precede the checkpoint, which must not be newer than they are."""
    reporting: list[Hook] = [HeldOut(), Metrics()] if run.groups.rank == 0 else []
    return [Interrupt(), *reporting, Checkpoints(), NonFinite()]


def _claim_folder(run: Run) -> None:
    """Make the run folder and save the resolved configuration; an earlier, different one is kept beside it."""
    path, text = run.folder / "config.yaml", dump_config(run.config)
    with naming_disk_errors(path, "Make room or choose another train.output"):
        run.folder.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.read_text(encoding="utf-8") != text:
            path.rename(path.with_name(f"config.until-step-{run.step}.yaml"))
        path.write_text(text, encoding="utf-8")


def _summary(folder: Path) -> dict[str, Any]:
    last = read_metrics(folder)[-1]
    found = list_checkpoints(folder)
    steps = load_config(folder / "config.yaml").train.steps
    return {
        "output": str(folder),
        "step": last["step"],
        "steps": steps,
        "tokens": last["tokens"],
        "loss": last["loss"],
        "checkpoint": str(found[-1]) if found else None,
    }


def _main() -> None:
    """A rank that `_launch` started: its error goes to the launcher, which tells the user."""
    from torch.distributed.elastic.multiprocessing.errors import record

    try:
        record(_run_rank)(Path(sys.argv[1]).read_text(encoding="utf-8"), "--resume" in sys.argv)
    except UserError:
        sys.exit(2)


if __name__ == "__main__":
    _main()
