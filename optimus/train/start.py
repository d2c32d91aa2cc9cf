"""Where training starts: what a run is to do is read before torch is imported, so that a mistake in it costs no waiting.

Nothing here imports torch, nor may what is imported here.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from optimus.config import RunConfig, load_config
from optimus.config.combinations import check_combinations
from optimus.config.renamed import with_new_names
from optimus.config.yaml_text import parse_yaml
from optimus.data.training import TrainingData, open_folders
from optimus.errors import UserError
from optimus.hub import read_model_folder


def train(
    config: str | Path | Mapping[str, Any] | RunConfig,
    overrides: Iterable[str] = (),
    *,
    ranks: int | None = None,
    resume: bool | Literal["auto"] = False,
    fresh_optimizer: bool = False,
    check: bool = False,
) -> dict[str, Any]:
    """Train as `config` (a YAML file, a mapping or a `RunConfig`) says; returns a summary of the run.

    `ranks` processes on this machine share every global batch (default: as many as `parallel` asks for); under a launcher
    that sets WORLD_SIZE, such as torchrun, this process is one of its ranks. `resume` continues from the newest checkpoint
    in `train.output`, if there is something with "auto"; with `fresh_optimizer` from its weights alone, as after a
    rollback to them. `check` validates
    everything, every checksum of the data included, and runs nothing.

    Raises `UserError` for anything that the user can mend, before any process is started wherever that is possible; it is a
    `LeaseError` when another run holds the folder. When another rank is lost under such a launcher, it is a
    `CollectiveError`, after which this process cannot train again: it ignores SIGTERM, by which the launcher would cut the
    message short, and exits with code 75 without waiting for anything.

    Ranks are programs of their own: a script needs no `__main__` guard.

    Example:
        optimus.train("first.yaml", ["train.steps=500"], ranks=2)
        optimus.train("first.yaml", ["train.steps=500"], ranks=2, resume=True)["loss"]
    """
    if ranks is not None and ranks < 1:
        raise UserError(f"`ranks` is {ranks}: a run has at least 1 rank")
    if resume == "auto":
        resume = _holds_run(Path(load_config(config, overrides, read_model_folder).train.output))
    elif fresh_optimizer and not resume:
        raise UserError("`fresh_optimizer=True` is about a run that goes on: give `resume=True`, too")
    tree, data = read_run(config, overrides, resume=resume)
    from optimus.train.launch import run_here

    return run_here(tree, data, ranks, resume=resume, fresh_optimizer=fresh_optimizer, check=check)


def _holds_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").exists() or (folder / "checkpoints").exists()


def read_run(
    config: str | Path | Mapping[str, Any] | RunConfig, overrides: Iterable[str] = (), *, resume: bool = False
) -> tuple[RunConfig, TrainingData]:
    """The configuration, with numbers in place of what depends on the data or on its other values, and the data.

    Raises `UserError` for a configuration that makes no sense, and for data that is not there or not this model's.
    """
    tree = load_config(config, overrides, read_model_folder)
    folders = open_folders(tree)
    tree = settled(tree, sum(shards.instances for shards in folders.values()), resume)
    return tree, TrainingData(tree, folders)


def settled(config: RunConfig, instances: int, resume: bool = False) -> RunConfig:
    """`config` with its length in steps, `instances` being the sequences of the data, and its warm-up.

    A run that is resumed keeps the warm-up that it began with. Raises `UserError` for a length of no
    step, and one that ends before `train.stop_at`.
    """
    steps, in_epochs = _steps(config, instances), config.train.epochs is not None
    config, stop = config.changed(train={"steps": steps, "tokens": None, "epochs": None}), config.train.stop_at
    if in_epochs:  # what is said of steps can only be checked now
        try:
            check_combinations(config)
        except ValueError as error:
            raise UserError(f"with {steps} steps in train.epochs: {error}") from None
    if stop is not None and stop > steps:
        raise UserError(f"train.stop_at {stop} is beyond the {steps} steps of the run: lower it")
    warmup = config.lr_schedule.warmup_steps
    if warmup is None:
        kept = chosen_before(Path(config.train.output)) if resume else {}
        warmup = kept.get("warmup_steps", config.warmup_steps)
    return config.changed(lr_schedule={"warmup_steps": warmup})


def _steps(config: RunConfig, instances: int) -> int:
    train = config.train
    if train.epochs is None:
        return train.total_steps
    if config.data.sources:
        raise UserError(
            "train.epochs: with data.sources, each source has passes of its own: give train.steps or train.tokens"
        )
    steps = int(train.epochs * instances / train.global_batch + 1e-6)
    if not steps:
        raise UserError(
            f"train.epochs {train.epochs:g} of the {instances:,} sequences in {config.data.path} is less than one step of "
            f"train.global_batch {train.global_batch}: raise the one or lower the other"
        )
    return steps


def chosen_before(run: Path) -> dict[str, Any]:
    """What a run has written of choices that were left to it; nothing where there is no run yet."""
    try:
        raw = parse_yaml((run / "config.yaml").read_text(encoding="utf-8"), str(run / "config.yaml"))
        raw = with_new_names(raw)
        found = {"warmup_steps": raw["lr_schedule"]["warmup_steps"], "precision": raw["train"]["precision"]}
    except (OSError, UnicodeDecodeError, UserError, LookupError, TypeError):
        return {}  # the checkpoint, if there is one, says what is wrong with the folder
    return {name: value for name, value in found.items() if value is not None}
