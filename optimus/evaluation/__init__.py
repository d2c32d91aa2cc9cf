"""Evaluates models on tasks of lm-eval and by bits per byte of text, and generates text."""

from typing import TYPE_CHECKING

from optimus.evaluation.names import TASKS
from optimus.lazy import lazy_exports

if TYPE_CHECKING:
    from optimus.evaluation.generation import generate
    from optimus.evaluation.run import evaluate, generate_text
    from optimus.evaluation.text import bits_per_byte

__all__ = ["TASKS", "bits_per_byte", "evaluate", "generate", "generate_text"]

if not TYPE_CHECKING:  # a type checker would take any name for one of the module
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "bits_per_byte": "optimus.evaluation.text",
            "evaluate": "optimus.evaluation.run",
            "generate": "optimus.evaluation.generation",
            "generate_text": "optimus.evaluation.run",
        },
    )
