"""What a run is to do is read before torch is imported, so that a mistake in it costs no waiting.

Nothing here imports torch, nor may what is imported here.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from optimus.config import RunConfig, load_config
from optimus.data.training import TrainingData, open_folders
from optimus.hub import read_model_folder
from optimus.resolve.length import length


def read_run(
    config: str | Path | Mapping[str, Any] | RunConfig, overrides: Iterable[str] = ()
) -> tuple[RunConfig, TrainingData]:
    """The configuration as it is given, and the data, for as many steps as that is.

    Raises `UserError` for a configuration that makes no sense, and for data that is not there or not this model's.
    """
    tree = load_config(config, overrides, read_model_folder)
    folders = open_folders(tree)
    steps = length(tree, sum(shards.instances for shards in folders.values()))
    return tree, TrainingData(tree.decided(steps.values), folders)


def holds_run(config: str | Path | Mapping[str, Any] | RunConfig, overrides: Iterable[str] = ()) -> bool:
    """Whether there is something to go on with in the run's folder."""
    folder = Path(load_config(config, overrides, read_model_folder).train.output)
    return (folder / "metrics.jsonl").exists() or (folder / "checkpoints").exists()
