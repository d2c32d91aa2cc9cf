"""Reads a run's configuration and opens the data. An import of this module must not import torch."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from optimus.config import RunConfig, load_config
from optimus.data.training import TrainingData, open_sources, sequences_in
from optimus.hub import read_model_folder
from optimus.resolve.length import length


def read_run(
    config: str | Path | Mapping[str, Any] | RunConfig, overrides: Iterable[str] = (), dataset: Any = None
) -> tuple[RunConfig, TrainingData]:
    """Returns the configuration before any decision, and the opened training data for the decided number of steps.

    `dataset` is the argument `data` of `optimus.train`. Raises `UserError` for an invalid configuration or data.
    """
    tree = load_config(config, overrides, read_model_folder)
    sources = open_sources(tree, dataset)
    steps = length(tree, sequences_in(sources, tree.train.sequence_length))
    return tree, TrainingData(tree.decided(steps.values), sources)


def holds_run(config: str | Path | Mapping[str, Any] | RunConfig, overrides: Iterable[str] = ()) -> bool:
    """Returns True if the run's folder has metrics or checkpoints, or if `checkpoint.copy_to` is set."""
    tree = load_config(config, overrides, read_model_folder)
    folder = Path(tree.train.output)
    there = (folder / "metrics.jsonl").exists() or (folder / "checkpoints").exists()
    return there or tree.checkpoint.copy_to is not None
