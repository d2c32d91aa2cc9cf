"""Optimus: pretrain dense and Mixture-of-Experts language models, from raw text to an evaluated checkpoint.

This package exports shell commands as functions: `sample_text`, `prepare`, `train`, `evaluate`, `generate`, `export`,
`import_folder`, `merge`, `models`. `load_model` returns a checkpoint's model. `optimus.api` exports the functions of
more commands, such as `report`, `config` and `plan`. `register_experts` and `FastSparseMoEBlock` put the expert kernels
into models of `transformers`. `Hook` is the base class for your own code around the steps of a run (docs/hooks.md). A
`UserError` is an error that the user can fix. The package imports each exported name on first use, so that `import
optimus` is fast.

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
from optimus.version import __version__ as __version__

if TYPE_CHECKING:
    from optimus.api import (
        FastSparseMoEBlock,
        Hook,
        Order,
        StepRecord,
        Trainer,
        UserError,
        evaluate,
        export,
        generate,
        import_folder,
        load_model,
        merge,
        models,
        prepare,
        register_experts,
        sample_text,
        train,
    )

__all__ = [
    "FastSparseMoEBlock",
    "Hook",
    "Order",
    "StepRecord",
    "Trainer",
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
    "sample_text",
    "train",
]

__getattr__, __dir__ = lazy_exports(__name__, dict.fromkeys(__all__, "optimus.api"))
