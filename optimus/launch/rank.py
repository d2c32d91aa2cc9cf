"""A rank of a run, in a separate process or in the caller's process."""

import atexit
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler, record

from optimus.checkpoint.lease import LeaseError
from optimus.comm import CollectiveError
from optimus.comm.device_waits import GRACE, CollectiveCall, Deadline, DeviceWaits, flight_record
from optimus.config import load_config
from optimus.config.yaml_text import parse_yaml
from optimus.cores import usable_cores
from optimus.errors import UserError, first_line
from optimus.launch.local import name_interface
from optimus.launch.store import LOOPBACK
from optimus.observe.machine import use_device
from optimus.observe.signals import restore_handlers
from optimus.optim.rule import RuleError
from optimus.optim.schedule import RateError
from optimus.parent import end_with
from optimus.resilience.events import EventLog
from optimus.resilience.exits import EndedError, Exit, names_hardware
from optimus.resolve.ranks import ranks_per_node
from optimus.training.build import build_trainer
from optimus.training.checks import dry_run
from optimus.training.environment import record_start
from optimus.training.finalize import conclude, summary_of
from optimus.training.malloc_trim import keep_freed_memory
from optimus.training.objects import NO_OBJECTS, UserObjects
from optimus.training.trainer import Hook, Trainer, naming_collectives


def run_rank(
    config_text: str,
    resume: bool,
    node: str | None = None,
    holder: str | None = None,
    more: Sequence[Hook] = (),
    users: UserObjects = NO_OBJECTS,
) -> int:
    """Runs one rank from start to end. A launcher sets the environment variables of torch.distributed, such as `RANK`.

    Returns the signal that has ended the run early, or 0.

    `node` is the name of the node under `optimus launch`, and otherwise None. `holder` is the token of the lease on the
    run folder, if any. `more` are hooks in addition to the hooks of the configuration and of `users`. `users` are the
    objects that `optimus.train` takes beside the configuration.
    """
    users.register()
    began, config = time.time(), load_config(parse_yaml(config_text, "the configuration"))
    local_rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = use_device(config.train.device, "train.device", local_rank)
    if device.type == "cpu":
        keep_freed_memory()
    if device.type == "cpu" and ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", ranks))))
    timeout = timedelta(seconds=config.resilience.timeout)
    backend = backend_of(device, config.train.device, ranks_per_node(ranks))
    with _ranks_together(backends_of(backend, device.type), timeout) if ranks > 1 else nullcontext():
        with naming_collectives("before the first step"):
            trainer = build_trainer(config, device, resume, node=node, holder=holder, more=more, users=users)
            trainer.say(dry_run(trainer.run))
            devices = torch.accelerator.device_count() if device.type != "cpu" else 0
            if (idle := devices - ranks_per_node(ranks)) > 0:
                trainer.say(f"{idle} of the node's {devices} devices are idle; `--ranks auto` uses all")
            if ranks > 1 and device.type != "cpu" and backend == "gloo":
                trainer.say(
                    f"collectives go through the host, over Gloo, because ranks share {device} or it has no other"
                )
        step, last = trainer.progress.step, trainer.run.last_step
        if step >= last:
            trainer.say(f"the run is at step {step} already, and ends at {last}: nothing is left to do")
        if trainer.groups.rank == 0:
            record_start(trainer.run, step)
        with _last_words() if ranks > 1 else nullcontext():
            with (
                _deadline(trainer) if backend != "gloo" and ranks > 1 else nullcontext(),
                _naming_failures(trainer),
            ):
                ending = trainer.fit()
                trainer.state.finish()
            if ending.signal:  # wait: once a rank has exited with an error code, a launcher ends all ranks
                trainer.groups.world.any(False)
        if node is not None and trainer.groups.rank == 0 and (trainer.is_done or ending.signal):
            if not ending.signal:
                EventLog(trainer.folder).write("finished", node=node, step=trainer.progress.step)
            conclude(trainer.config, began, summary_of(trainer.config, ending.signal))
    return ending.signal


def backend_of(device: torch.device, named: str, per_node: int) -> str:
    """Returns the backend that moves a rank's tensors: the backend of the device, or Gloo.

    `named` is the value of `train.device`. Ranks that share one device, such as `xpu:0`, use Gloo.
    """
    shared = named == str(device) and per_node > 1
    return "gloo" if shared else dist.Backend.default_device_backend_map.get(device.type, "gloo")


@contextmanager
def _ranks_together(backend: str, timeout: timedelta) -> Iterator[None]:
    """Creates the process group of all ranks for the duration of the context.

    Destroying a process group waits for all collectives under way. After an error that may leave collectives under way,
    the process therefore exits without destroying the group.
    """
    if os.environ.get("MASTER_ADDR") == LOOPBACK:  # all ranks are on this machine
        name_interface(LOOPBACK)
    timeout += timedelta(seconds=0 if backend == "gloo" else GRACE)
    seconds = f"{timeout.total_seconds():g} s (resilience.timeout)"
    try:
        dist.init_process_group(backend, timeout=timeout)
    except RuntimeError as error:
        raise CollectiveError(f"the ranks have not connected within {seconds}: {error}") from error
    together, code = False, 1
    try:
        yield
        together = True
    except UserError as error:
        together, code = not isinstance(error, CollectiveError | EndedError | LeaseError), code_of(error)
        raise
    finally:
        if together:
            dist.destroy_process_group()
        else:
            atexit.register(_leave, code)


def backends_of(backend: str, device: str) -> str:
    """Returns the backends of the group of all ranks: `backend` for device tensors, and Gloo for host tensors."""
    return backend if backend == "gloo" or device == "cpu" else f"cpu:gloo,{device}:{backend}"


@contextmanager
def _deadline(trainer: Trainer) -> Iterator[None]:
    """Ends this rank with `Exit.LOST` if its device waits for one collective for over `resilience.timeout` seconds."""
    waits, seconds = trainer.groups.recorder.device or DeviceWaits(), trainer.config.resilience.timeout
    trainer.groups.recorder.device = waits

    def end(collective: CollectiveCall) -> None:
        group, what, _ = collective
        waited = f"the device has waited for {seconds:g} s (resilience.timeout)"
        text = f"step {trainer.progress.step + 1}: {what} over ranks {group} failed on rank {trainer.groups.rank}: {waited}"
        with suppress(OSError):
            (trainer.folder / f"flight-record-{trainer.groups.rank}.json").write_bytes(flight_record())
        get_error_handler().record_exception(CollectiveError(f"{text}. Run again with `resume=True`"))
        print(f"error: {text}", file=sys.stderr)
        _leave(Exit.LOST)

    deadline = Deadline(waits, seconds, end)
    try:
        yield
    finally:
        deadline.stop()


@contextmanager
def _naming_failures(trainer: Trainer) -> Iterator[None]:
    """Turns an out-of-memory error of the device, and a failure of a user's update rule or schedule, into an
    `EndedError` that tells the user what to change."""
    rank = trainer.groups.rank
    try:
        yield
    except (RuleError, RateError) as error:
        raise EndedError(Exit.USER, f"step {trainer.progress.step + 1}: rank {rank}: {error}") from error
    except torch.OutOfMemoryError as error:
        what = first_line(error).partition(" If reserved")[0].rstrip(".")  # what follows is advice
        cure = "choose a smaller train.micro_batch, recompute more activations, or shard or offload more of the state"
        raise EndedError(
            Exit.USER,
            f"step {trainer.progress.step + 1}: rank {rank} has no memory left on {trainer.run.device} "
            f"({what}): {cure}",
        ) from error


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def code_of(error: UserError) -> Exit:
    """Returns the exit code of a rank that `error` ends."""
    if isinstance(error, EndedError):
        return Exit(error.code)
    return Exit.LOST if isinstance(error, CollectiveError) else Exit.USER


@contextmanager
def _last_words() -> Iterator[None]:
    """Ignores SIGTERM inside the context unless a hook handles the signal.

    After a `CollectiveError` or an `EndedError`, the process ignores SIGTERM until the process exits.

    The launcher sends SIGTERM to this rank once another rank has failed. This rank can still report an error after
    the signal.
    """
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    speaking = False
    try:
        yield
    except (CollectiveError, EndedError):
        speaking = True
        raise
    finally:
        if not speaking:
            restore_handlers({signal.SIGTERM: previous})


def run_as_rank(words: Sequence[str], more: Sequence[Hook] = ()) -> None:
    """Runs a rank that a launcher has started, with the additional hooks `more`, and exits the process.

    `words` are the command-line arguments, where CONFIG is the path of a YAML file:
    CONFIG [--resume] [--node NAME] [--parent PID] [--holder TOKEN] [--objects FILE].
    """
    config, *options = words
    names = ("--node", "--parent", "--holder", "--objects")
    node, parent, holder, objects = (options[options.index(name) + 1] if name in options else None for name in names)
    if parent is not None:
        end_with(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until a hook handles SIGINT
    text = Path(config).read_text(encoding="utf-8")
    try:
        users = UserObjects.loads(None if objects is None else Path(objects).read_bytes())
        stopped_by = record(run_rank)(text, "--resume" in options, node, holder, more, users)
    except UserError as error:
        sys.exit(code_of(error))
    except Exception as error:
        if not names_hardware(error):
            raise
        traceback.print_exc()
        _leave(Exit.HARDWARE)  # what uses a failed device may wait for ever when Python ends
    # An ordinary exit could abort, since torch's threads may outlive the objects that stop them.
    _leave(Exit(128 + stopped_by) if stopped_by else Exit.DONE)


if __name__ == "__main__":
    run_as_rank(sys.argv[1:])
