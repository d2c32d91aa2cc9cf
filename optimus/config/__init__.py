"""The configuration of a run: one typed tree, read strictly, saved with the run and runnable again unchanged."""

from optimus.config.load import dump_config, load_config, preset_names, resolve_model
from optimus.config.tree import RunConfig
from optimus.model.architecture import ModelConfig

__all__ = ["ModelConfig", "RunConfig", "dump_config", "load_config", "preset_names", "resolve_model"]
