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
