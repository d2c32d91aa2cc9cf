"""The table of formats of token files that other trainers have prepared."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from optimus.plugins import Imported, Table


@dataclass(frozen=True)
class TokenFormatRow:
    """A format of token files. A source names the files as `NAME:PATH`.

    `open(path, vocab_size, cache)` returns a `TokenStream`, where `cache` is a folder for copies.
    """

    name: str
    open: Callable[..., Any]


# The path in an output of `prepare` with `to`, by format: what follows `NAME:` after the folder.
WRITTEN = {"megatron": "text_document", "npy": "part-*.npy"}

TOKEN_FORMATS: Table[TokenFormatRow] = Table(
    "token format",
    TokenFormatRow,
    lambda: Imported(
        {
            "megatron": "optimus.data.token_streams:MEGATRON",
            "npy": "optimus.data.token_streams:NPY",
            "mds": "optimus.data.token_streams:MDS",
        }
    ),
)
