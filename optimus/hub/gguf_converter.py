"""Runs the converter of llama.cpp, in an interpreter that may lack Optimus.

    python gguf_converter.py CHECKOUT PRE [arguments of convert_hf_to_gguf.py]

PRE, if not empty, is the name for a pre-tokenizer that the converter does not recognise. With PRE, the first argument
after PRE must be the folder of the model.
"""

import importlib
import logging
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any


def main() -> None:
    """Runs `convert_hf_to_gguf.py` with the arguments after CHECKOUT and PRE."""
    _, folder, pre, *arguments = sys.argv
    sys.path[0] = folder  # instead of this program's folder, which has another gguf.py
    converter = importlib.import_module("convert_hf_to_gguf")
    if pre:
        _forgo_sentencepiece(Path(arguments[0]))
        _name_unknown(_text_model(converter), pre)
    sys.argv = [str(converter.__file__), *arguments]
    converter.main()


def _text_model(converter: Any) -> Any:
    """Returns the class that recognises pre-tokenizers."""
    try:
        return importlib.import_module("conversion.base").TextModel
    except ModuleNotFoundError:
        return converter.TextModel


def _forgo_sentencepiece(model: Path) -> None:
    """Replaces a missing sentencepiece by a stand-in in `sys.modules`, unless the converter needs sentencepiece."""
    if find_spec("sentencepiece") is None and not (model / "tokenizer.model").exists():
        stand_in = ModuleType("sentencepiece")
        stand_in.SentencePieceProcessor = None  # type: ignore[attr-defined]
        sys.modules["sentencepiece"] = stand_in


def _name_unknown(model: Any, pre: str) -> None:
    """Makes `model.get_vocab_base_pre` return `pre` for a tokenizer that the converter does not recognise."""
    recognise = model.get_vocab_base_pre

    def named(self: Any, tokenizer: Any) -> str:
        logging.disable(logging.WARNING)  # the converter warns at length
        try:
            return str(recognise(self, tokenizer))
        except NotImplementedError:
            return pre
        finally:
            logging.disable(logging.NOTSET)

    model.get_vocab_base_pre = named


if __name__ == "__main__":
    main()
