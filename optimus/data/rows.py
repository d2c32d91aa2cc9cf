"""The base class of rows that `prepare` has not written."""

from pathlib import Path
from typing import Any

from optimus.data import tokenizer as tokenizers
from optimus.errors import UserError


class UnshardedRows:
    """Rows of a dataset or of token files, with the tokenizer of `data.tokenizer`.

    `where` names the rows in messages.
    """

    padded = False  # True if end-of-text tokens without flags pad rows
    masked = True
    parse_special = False

    def __init__(self, where: str, info: tokenizers.TokenizerInfo, context: int, instances: int) -> None:
        self.folder = Path(where)
        self.where, self.context, self.instances = where, context, instances
        self.vocab_size, self.eos_id, self.tokenizer_path = info.vocab_size, info.eos_id, info.path
        self.index: dict[str, Any] = {
            "tokenizer": {"sha256": info.sha256, "vocab_size": info.vocab_size, "eos_id": info.eos_id},
            "instances": instances,
            "context": context,
        }

    def check_model(self, context: int, vocab_size: int) -> None:
        """Raises `UserError` unless `context` divides the length of a row and `vocab_size` is at least the
        tokenizer's."""
        if self.context % context:
            raise UserError(
                f"{self.where}: rows of {self.context} tokens cannot be divided into sequences of {context}"
            )
        if self.vocab_size > vocab_size:
            raise UserError(
                f"data.tokenizer: {self.tokenizer_path} has {self.vocab_size} tokens, but the model's vocabulary only "
                f"{vocab_size}. Enlarge the model's vocabulary"
            )

    def verify(self) -> None:
        """Does nothing: the rows have no checksums."""
