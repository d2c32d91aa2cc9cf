"""Optimus: pretrain dense and Mixture-of-Experts language models, from raw text to an evaluated checkpoint.

The commands of the shell are functions here: `prepare`, `train`, `evaluate`, `generate`, `export`, `import_folder`,
`merge`, `models`; and `load_model` gives a checkpoint's model. `register_experts` and `FastSparseMoEBlock` put the expert
kernels into models of `transformers`. What the user can mend is a `UserError`. `help(optimus.train)` and so on say more.
All load on first use, so that importing the package costs nothing.

Example:
    import optimus

    optimus.prepare(["texts/"], "data", train_tokenizer=4096, context=256)
    optimus.train(
        {
            "model": "mula-tiny-moe",
            "data": {"path": "data"},
            "train": {"output": "runs/first", "steps": 300, "global_batch": 8, "micro_batch": 8, "sequence_length": 256},
        }
    )
    optimus.evaluate("runs/first", text="held-out/")["bits_per_byte"]
    optimus.generate("runs/first", "Once upon a time")
"""

from typing import TYPE_CHECKING

from optimus.lazy import lazy_exports

if TYPE_CHECKING:
    from optimus.checkpoint.merging import merge
    from optimus.checkpoint.store import load_model
    from optimus.config.models import models
    from optimus.data.preparation import prepare
    from optimus.errors import UserError
    from optimus.evaluate import evaluate
    from optimus.evaluate import generate_text as generate
    from optimus.hub import FastSparseMoEBlock, import_folder, register_experts
    from optimus.hub import export_checkpoint as export
    from optimus.train import train

__version__ = "0.1.0"
__all__ = [
    "FastSparseMoEBlock",
    "UserError",
    "evaluate",
    "export",
    "generate",
    "import_folder",
    "load_model",
    "merge",
    "models",
    "prepare",
    "register_experts",
    "train",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "FastSparseMoEBlock": "optimus.hub",
        "evaluate": "optimus.evaluate",  # a package that can be called, like train
        "export": "optimus.hub:export_checkpoint",
        "generate": "optimus.evaluate:generate_text",
        "import_folder": "optimus.hub",
        "load_model": "optimus.checkpoint.store",
        "merge": "optimus.checkpoint.merging",
        "models": "optimus.config.models",
        "prepare": "optimus.data.preparation",
        "register_experts": "optimus.hub",
        "train": "optimus.train",
        "UserError": "optimus.errors",
    },
)
