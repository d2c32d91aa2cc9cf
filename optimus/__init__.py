"""Optimus: pretrain dense and Mixture-of-Experts language models, from raw text to an evaluated checkpoint.

This package exports shell commands as functions: `sample_text`, `prepare`, `train`, `evaluate`, `generate`, `export`,
`import_folder`, `merge`, `models`.

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

from optimus.lazy import lazy_exports as _lazy_exports
from optimus.version import __version__ as __version__

if TYPE_CHECKING:
    from optimus.api import (
        FastSparseMoEBlock,
        Hook,
        Order,
        StepRecord,
        Trainer,
        UserError,
        describe_data,
        evaluate,
        export,
        generate,
        import_folder,
        load_model,
        merge,
        models,
        prepare,
        prepare_status,
        preview,
        register_experts,
        sample_text,
        show_row,
        train,
    )

__all__ = [
    "FastSparseMoEBlock",
    "Hook",
    "Order",
    "StepRecord",
    "Trainer",
    "UserError",
    "describe_data",
    "evaluate",
    "export",
    "generate",
    "import_folder",
    "load_model",
    "merge",
    "models",
    "prepare",
    "prepare_status",
    "preview",
    "register_experts",
    "sample_text",
    "show_row",
    "train",
]

if not TYPE_CHECKING:  # a type checker would take any name for one of the package
    __getattr__, __dir__ = _lazy_exports(__name__, dict.fromkeys(__all__, "optimus.api"))
