"""Exports a model or a checkpoint to a folder in Hugging Face format."""

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from optimus.checkpoint.copying import local_checkpoint
from optimus.checkpoint.folder import read_description
from optimus.checkpoint.masks import all_masks
from optimus.checkpoint.reader import Reader
from optimus.checkpoint.store import load_model
from optimus.config.sizes import size_text
from optimus.copies import copied, is_url, url_text
from optimus.data.chat import FILE as CHAT_TEMPLATE
from optimus.data.chat import ChatTemplate
from optimus.disk import user_path
from optimus.errors import UserError, naming_read_errors, nearest
from optimus.hub.config_json import FILE, no_export, write_config, write_json
from optimus.hub.foreign import write_folder, write_plugin_folder
from optimus.hub.keys import published
from optimus.hub.published import GENERATION, TOKENIZER, published_again
from optimus.hub.tensors import MASKS, OutputTensor, stored_bytes, write_tensors
from optimus.model import CausalModel
from optimus.model.architecture import ModelConfig
from optimus.model.families import families
from optimus.model.foreign.plugin import PluginModel
from optimus.model.parameters import named_tensors
from optimus.plugins import load_plugins, note_changed_plugins

_MAX_FILE = 5_000_000_000  # maximum bytes of tensors in a file; a larger tensor gets a separate file
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PADDING = ("<|padding|>", "<|pad|>", "<pad>", "[PAD]")


def export_checkpoint(
    checkpoint: str | Path, output: str | Path, dtype: str = "float32", *, plugins: Sequence[str] = ()
) -> dict[str, Any]:
    """Writes a checkpoint (or the newest of a run) in Hugging Face format; returns the result of `export_model`.

    `dtype` is float32, bfloat16 or float16. `plugins` names the plugins that the checkpoint's model needs.

    Example:
        optimus.export("runs/first", "huggingface")
        transformers.AutoModelForCausalLM.from_pretrained("huggingface")
    """
    if dtype not in _DTYPES:
        raise UserError(f"`dtype` is '{dtype}': {nearest(dtype, _DTYPES)}")
    load_plugins(plugins)
    if is_url(output):
        made = copied(output, FILE, lambda folder: export_checkpoint(checkpoint, folder, dtype))
        return made | {"output": url_text(output)}
    output = user_path(output)
    check_free(output)
    path = local_checkpoint(checkpoint)
    about, reader = read_description(path), Reader.open(path)
    note_changed_plugins(about.plugins, path)
    return export_model(
        load_model(path),
        output,
        context=about.context,
        tokenizer=about.tokenizer,
        eos_id=about.eos_id,
        dtype=_DTYPES[dtype],
        masks=all_masks(reader),
        said=about.published,
        chat=about.chat,
    )


def export_model(
    model: CausalModel,
    output: Path,
    *,
    context: int,
    tokenizer: Path | None,
    eos_id: int | None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = _MAX_FILE,
    masks: Mapping[str, torch.Tensor] | None = None,
    said: Mapping[str, Any] | None = None,
    chat: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes `model` as a Hugging Face folder: config, tokenizer (a tokenizer.json, if given) and safetensors.

    `context` becomes max_position_embeddings, unless the model has learned positions or comes from `transformers`.
    `masks` of pruned parameters go into a separate file. `said` has the metadata of the folder that training started
    from, and `chat` the chat template of the training data.

    Returns `output`, `files` (sizes in bytes by name), `bytes` (the sum of the sizes), `tensors` (the number of
    tensors), `parameters` (the number of elements of all parameters) and `dtype`. `transformers` is False for the model
    of a plugin, for which `transformers` has no class.
    """
    output = output.absolute()
    check_free(output)
    if (why := no_export(model.config)) is not None:
        raise UserError(why)
    named = _tensors(model, dtype)
    size = sum(map(stored_bytes, named))
    special = _special_tokens(tokenizer, eos_id)
    stored_as = str(dtype or model.embedding.weight.dtype).removeprefix("torch.")
    files: dict[str, Any] = {}
    if tokenizer is not None:
        with naming_read_errors(tokenizer):
            files["tokenizer.json"] = tokenizer.read_bytes()
    with new_folder(output) as partial:
        if size > (free := shutil.disk_usage(partial).free):
            raise UserError(
                f"{partial.parent} has {size_text(free)} free, but the weights take {size_text(size)}: make room or choose "
                "another output folder"
            )
        again = published_again(
            said or {},
            vocab=model.config.vocab,
            tokenizer=tokenizer,
            eos_id=eos_id,
            pad_id=special.pad_id,
            context=context,
        )
        if isinstance(model.config, ModelConfig):
            write_config(model.config, partial, context=context, dtype=stored_as, further=again.config)
            write_tensors(named, partial, max_file_bytes)
        elif isinstance(model.config, PluginModel):
            write_plugin_folder(
                model.config, named, partial, max_file_bytes, context=context, dtype=stored_as, further=again.config
            )
        else:
            tensors = {each.name: each.tensor for each in named}
            write_folder(model.config, tensors, partial, getattr(torch, stored_as), max_file_bytes)
        if not isinstance(model.config, PluginModel):
            files[GENERATION] = again.generation
        if tokenizer is not None:
            files |= {TOKENIZER: _tokenizer_config(special, context)} | again.files
            if chat:
                template = ChatTemplate.read(chat)
                files[TOKENIZER] = dict(template.tokens) | files[TOKENIZER]
                files[CHAT_TEMPLATE] = template.source
        for name, content in files.items():
            if isinstance(content, bytes):
                (partial / name).write_bytes(content)
            elif (published_bytes := again.bytes_of(name, content)) is not None:
                (partial / name).write_bytes(published_bytes)
            elif isinstance(content, str):
                (partial / name).write_text(content, encoding="utf-8")
            else:
                write_json(partial / name, content)
        if masks:
            save_file(dict(masks), partial / MASKS)
    files_written = sorted(file for file in output.rglob("*") if file.is_file())
    sizes = {file.relative_to(output).as_posix(): file.stat().st_size for file in files_written}
    return {
        "output": str(output),
        "files": sizes,
        "bytes": sum(sizes.values()),
        "tensors": len(named),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": stored_as,
        "transformers": not isinstance(model.config, PluginModel),
    }


class SpecialTokens(NamedTuple):
    """The end-of-text and padding tokens, and the id of the padding token; None if unknown."""

    eos: str | None
    pad: str | None
    pad_id: int | None


def _tensors(model: CausalModel, dtype: torch.dtype | None) -> list[OutputTensor]:
    """Returns the tensors to write. `dtype`, if given, is the dtype of parameters in the file."""
    buffers = dict(model.named_buffers())
    if not isinstance(model.config, ModelConfig):
        return [
            OutputTensor(name, tensor, tuple(tensor.shape), tensor.dtype if dtype is None or name in buffers else dtype)
            for name, tensor in model.author_tensors().items()
        ]
    family = families()[model.config.family]
    named = [*named_tensors(model)]
    if family.head_copy and model.config.tie_embeddings:
        named.append(("head.weight", model.embedding.weight))
    return [
        OutputTensor(*each, tensor.dtype if dtype is None or name in buffers else dtype)
        for name, tensor in named
        for each in published(family.name, name, tensor)
    ]


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yields an empty folder, and renames the folder to `output` at the end of the block.

    After an error in the block, removes the folder. Raises `UserError` for an `OSError`, and if another call writes to
    the folder.
    """
    partial = output.with_name(f".{output.name}.partial")
    try:
        with _locked(partial):
            try:
                for stale in partial.iterdir():
                    shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
                yield partial
                partial.rename(output)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except OSError as error:
        raise UserError(
            f"cannot write {output}: {error.strerror or error}; make room or choose another output folder"
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Creates `folder` if it is absent, and locks it. Raises `UserError` if another call has the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another process writes to {folder}: wait for its end or choose another output folder"
            ) from error
        yield
    finally:
        os.close(descriptor)


def check_free(output: Path) -> None:
    """Raises `UserError` unless `output` is a new path or an empty folder."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} exists already: choose another output folder or remove it")


def _special_tokens(tokenizer: Path | None, eos_id: int | None) -> SpecialTokens:
    if tokenizer is None:
        return SpecialTokens(None, None, eos_id)
    from tokenizers import Tokenizer

    try:
        loaded = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # `tokenizers` raises no more specific exception
        raise UserError(f"tokenizer {tokenizer} cannot be read: {error}") from error
    eos = None if eos_id is None else loaded.id_to_token(eos_id)
    if eos_id is not None and eos is None:
        raise UserError(f"tokenizer {tokenizer} has no token {eos_id}, which is the model's end-of-text token")
    for pad in _PADDING:
        if loaded.token_to_id(pad) is not None:
            return SpecialTokens(eos, pad, loaded.token_to_id(pad))
    return SpecialTokens(eos, eos, eos_id)


def _tokenizer_config(special: SpecialTokens, context: int) -> dict[str, Any]:
    """Returns the content of a tokenizer_config.json for a tokenizer without this file."""
    raw: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    named = {
        f"{role}_token": token for role, token in (("eos", special.eos), ("pad", special.pad)) if token is not None
    }
    return raw | named
