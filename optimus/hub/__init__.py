"""Hugging Face folders in and out: weights, configs and tokenizers of known families, bit for bit.

`keys.py` is the key table, one per family; `config_json.py` the architecture; `tensors.py` the safetensors files.
`drop_in.py` is another matter: the expert kernels inside models of `transformers`.
"""

from typing import TYPE_CHECKING

from optimus.lazy import lazy_exports

if TYPE_CHECKING:
    from optimus.hub.config_json import read_model_folder
    from optimus.hub.drop_in import FastSparseMoEBlock, register_experts
    from optimus.hub.exporting import export_checkpoint, export_model
    from optimus.hub.importing import FolderReader, import_folder, load_weights

__all__ = [
    "FastSparseMoEBlock",
    "FolderReader",
    "export_checkpoint",
    "export_model",
    "import_folder",
    "load_weights",
    "read_model_folder",
    "register_experts",
]

_DROP_IN = "optimus.hub.drop_in"
_IMPORTING, _EXPORTING = "optimus.hub.importing", "optimus.hub.exporting"
__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "FastSparseMoEBlock": _DROP_IN,
        "FolderReader": _IMPORTING,
        "export_checkpoint": _EXPORTING,
        "export_model": _EXPORTING,
        "import_folder": _IMPORTING,
        "load_weights": _IMPORTING,
        "read_model_folder": "optimus.hub.config_json",
        "register_experts": _DROP_IN,
    },
)
