"""The configuration of a run: one typed tree, read strictly, saved with the run and runnable again unchanged.

The tree loads on first use: reports of finished runs do not need it.
"""

from typing import TYPE_CHECKING

from optimus.lazy import lazy_exports

if TYPE_CHECKING:
    from optimus.config.load import dump_config, load_config, preset_names, resolve_model
    from optimus.config.tree import RunConfig
    from optimus.model.architecture import ModelConfig

__all__ = ["ModelConfig", "RunConfig", "dump_config", "load_config", "preset_names", "resolve_model"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "ModelConfig": "optimus.model.architecture",
        "RunConfig": "optimus.config.tree",
        **dict.fromkeys(("dump_config", "load_config", "preset_names", "resolve_model"), "optimus.config.load"),
    },
)
