"""Import and export of Hugging Face folders, export of adapters, conversion to GGUF, kernels for `transformers`."""

from typing import TYPE_CHECKING

from optimus.lazy import lazy_exports

if TYPE_CHECKING:
    from optimus.hub.adapters import export_adapter
    from optimus.hub.config_json import context_of, no_export
    from optimus.hub.drop_in import FastSparseMoEBlock, register_experts
    from optimus.hub.exporting import export_checkpoint, export_model
    from optimus.hub.gguf import convert_to_gguf
    from optimus.hub.importing import FolderReader, check_same_folder, import_folder, load_weights, omitted_layers
    from optimus.hub.published import read_published
    from optimus.hub.sections import read_model_folder

__all__ = [
    "FastSparseMoEBlock",
    "FolderReader",
    "check_same_folder",
    "context_of",
    "convert_to_gguf",
    "export_adapter",
    "export_checkpoint",
    "export_model",
    "import_folder",
    "load_weights",
    "no_export",
    "omitted_layers",
    "read_model_folder",
    "read_published",
    "register_experts",
]

_DROP_IN = "optimus.hub.drop_in"
_CONFIG, _IMPORTING, _EXPORTING = "optimus.hub.config_json", "optimus.hub.importing", "optimus.hub.exporting"
if not TYPE_CHECKING:  # a type checker would take any name for one of the module
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "FastSparseMoEBlock": _DROP_IN,
            "FolderReader": _IMPORTING,
            "export_adapter": "optimus.hub.adapters",
            "context_of": _CONFIG,
            "convert_to_gguf": "optimus.hub.gguf",
            "export_checkpoint": _EXPORTING,
            "export_model": _EXPORTING,
            "import_folder": _IMPORTING,
            "check_same_folder": _IMPORTING,
            "omitted_layers": _IMPORTING,
            "load_weights": _IMPORTING,
            "no_export": _CONFIG,
            "read_model_folder": "optimus.hub.sections",
            "read_published": "optimus.hub.published",
            "register_experts": _DROP_IN,
        },
    )
