"""The configuration of a run, a typed tree in which unknown keys are errors."""

from typing import TYPE_CHECKING

from optimus.lazy import lazy_exports

if TYPE_CHECKING:
    from optimus.config.load import dump_config, load_config, preset_names, resolve_model
    from optimus.config.tree import RunConfig
    from optimus.model.architecture import Architecture, ModelConfig

__all__ = ["Architecture", "ModelConfig", "RunConfig", "dump_config", "load_config", "preset_names", "resolve_model"]

if not TYPE_CHECKING:  # a type checker would take any name for one of the module
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "Architecture": "optimus.model.architecture",
            "ModelConfig": "optimus.model.architecture",
            "RunConfig": "optimus.config.tree",
            **dict.fromkeys(("dump_config", "load_config", "preset_names", "resolve_model"), "optimus.config.load"),
        },
    )
