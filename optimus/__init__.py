"""Optimus: pretrain dense and Mixture-of-Experts language models, from raw text to an evaluated checkpoint.

The commands of the shell are functions here: `prepare`, `train`, `evaluate`, `generate`, `export`, `import_folder`,
`models`; and `load_model` gives a checkpoint's model. `register_experts` and `FastSparseMoEBlock` put the expert kernels
into models of `transformers`. All load on first use, so that importing the package costs nothing.
"""

from optimus.lazy import lazy_exports

__version__ = "0.1.0"
__all__ = [
    "FastSparseMoEBlock",
    "UserError",
    "evaluate",
    "export",
    "generate",
    "import_folder",
    "load_model",
    "models",
    "prepare",
    "register_experts",
    "train",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "FastSparseMoEBlock": "optimus.hub",
        "evaluate": "optimus.evaluate",  # a package that can be called, like train
        "export": "optimus.hub:export_checkpoint",
        "generate": "optimus.evaluate:generate_text",
        "import_folder": "optimus.hub",
        "load_model": "optimus.checkpoint",
        "models": "optimus.config.models",
        "prepare": "optimus.data",
        "register_experts": "optimus.hub",
        "train": "optimus.train",
        "UserError": "optimus.errors",
    },
)
