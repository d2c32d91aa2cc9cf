"""Loads checkpoints into a state or a model, saves models, and compares checkpoints with models and runs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimus.checkpoint.copying import local_checkpoint
from optimus.checkpoint.factors import is_factor
from optimus.checkpoint.folder import Description, differences
from optimus.checkpoint.loading import Send, load_slices
from optimus.checkpoint.masks import follow_drawn, follow_masks, share_of
from optimus.checkpoint.reader import Reader
from optimus.checkpoint.saving import write_alone
from optimus.checkpoint.slices import full_slices
from optimus.config import Architecture
from optimus.errors import UserError
from optimus.model import CausalModel
from optimus.model.build import causal_model
from optimus.model.parameters import named_tensors
from optimus.optim.rule import Rule
from optimus.plugins import Plugin, load_plugins
from optimus.state.model_state import ModelState


def save_model(
    model: CausalModel,
    folder: Path,
    *,
    context: int,
    tokenizer: Path | None,
    eos_id: int | None,
    masks: Mapping[str, Tensor] | None = None,
    published: dict[str, Any] | None = None,
    plugins: Sequence[Plugin] = (),
) -> None:
    """Writes a weights-only checkpoint of `model` and `masks` (keys: `mask.NAME`).

    Raises `UserError` if `folder` exists.
    """
    precision = str(next(model.parameters()).dtype).removeprefix("torch.")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    progress = {"unpruned": share_of(masks, shapes)} if masks else {}
    description = Description(
        model.config,
        context,
        0,
        False,
        precision,
        eos_id,
        tokenizer,
        progress=progress,
        published=published or {},
        plugins=[asdict(plugin) for plugin in plugins],
    )
    write_model(model, folder, description, masks)


def write_model(
    model: CausalModel, folder: Path, description: Description, masks: Mapping[str, Tensor] | None = None
) -> None:
    """Writes a checkpoint of `model`'s parameters and persistent buffers, and of `masks` (keys: `mask.NAME`).

    Raises `UserError` if `folder` exists.
    """
    if folder.exists():
        raise UserError(f"{folder} exists already: choose another output folder or remove it")
    slices = [*full_slices(named_tensors(model)), *full_slices((masks or {}).items(), prefix="")]
    write_alone(folder, slices, description, "Make room or choose another output folder")


def load_state(
    state: ModelState,
    path: Path,
    *,
    model: Architecture,
    run: dict[str, Any] | None = None,
    full: bool = True,
    send: Send = "broadcast",
    masks: bool = True,
    reader_type: type[Reader] = Reader,
) -> tuple[Description, int]:
    """Fills `state` from checkpoint `path`; returns the description and the number of ranks that read chunks.
    Collective.

    `model` is the architecture of `state`. `run` is the fingerprint of a resumed run; the checkpoint must match the
    fingerprint. Without `run`, adds the product of each weight's low-rank factors in the checkpoint to the weight's
    non-zero elements, and sets the state's factors to zero. Without `full`, initializes the state of the update rules.
    With `masks`, prunes the same elements of `state` as the checkpoint.

    Raises `UserError` on all ranks if the checkpoint does not fit.
    """

    def open_it() -> Reader:
        reader = reader_type.open(path)
        check_same_model(reader.description.model, model, path)
        if full and not reader.description.full:
            raise UserError(
                f"{path} has only weights and cannot be resumed: start a new run from it with checkpoint.load_path"
            )
        if run is not None:
            check_same_run(reader.description, run, path)
            _check_factors(reader, state.rules)
        if full:
            _check_update_state(reader, state.rules)
        return reader

    reader = state.groups.world.on_first(open_it)
    pruned = masks and follow_masks(state, reader)
    if full:
        follow_drawn(state, reader)
    goes_on = run is not None
    read = partial(reader.fill, apart=goes_on)
    readers = load_slices(state, read, full=full, send=send, pruned=pruned, factors=goes_on)
    return reader.description, readers


def load_model(
    checkpoint: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    *,
    plugins: Sequence[str] = (),
) -> CausalModel:
    """Loads the model of a checkpoint, or of a run's newest checkpoint, in evaluation mode and without gradients.

    The model maps `tokens_BS` (B batch, S sequence) to `logits_BSV` (V vocabulary). `plugins` names the plugins that
    the model needs.

    Example:
        model = optimus.load_model("runs/first")
        model(torch.tensor([[1, 2, 3]])).shape  # [1, 3, vocabulary]
    """
    load_plugins(plugins)
    reader = Reader.open(local_checkpoint(checkpoint))
    reader.check_size()
    model = causal_model(reader.description.model).float()
    reader.fill(full_slices(named_tensors(model)))
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)


def _check_factors(reader: Reader, names: Iterable[str]) -> None:
    """Raises `UserError` unless the checkpoint and the parameter `names` have the same names of low-rank factors."""
    there = {key.removeprefix("model.") for key in reader.stored if key.startswith("model.") and is_factor(key)}
    if there != (here := {name for name in names if is_factor(name)}):
        raise UserError(
            f"{reader.path} has low-rank factors of {len(there) // 2} weights, and this run of {len(here) // 2}: set "
            "train.lora_rank and train.freeze as they were, or start a new run from it (checkpoint.load_path)"
        )


def _check_update_state(reader: Reader, rules: Mapping[str, Rule]) -> None:
    """Raises `UserError` if the checkpoint has a parameter without the state of the parameter's rule in `rules`."""
    missing: dict[str, list[str]] = {}
    for name, rule in rules.items():
        for kind in rule.kinds:
            if f"{kind}.{name}" not in reader.stored and f"model.{name}" in reader.stored:
                missing.setdefault(kind, []).append(name)
    if missing:
        lacking = ", ".join(f"{kind} of {len(names)} parameters ({names[0]} ...)" for kind, names in missing.items())
        raise UserError(
            f"{reader.path} was written with another update rule and lacks {lacking}: set `optimizer` and train.freeze as "
            "they were, or continue from its weights alone: with `fresh_optimizer=True` and `resume=True`, or in a new run "
            "with checkpoint.load_path"
        )


def check_same_model(saved: Architecture, current: Architecture, path: Path) -> None:
    """Raises `UserError` if `model_differences` finds a difference. `path` is the source of `saved`."""
    if changed := model_differences(saved, current):
        raise UserError(f"{path} is of another model: {changed}")


def model_differences(saved: Architecture, current: Architecture) -> str:
    """Returns the differences between two architectures.

    For built-in models, ignores `init_std`, an unused `intermediate`, and values that follow from compared fields.
    """
    unasked = {"init_std", *(saved.derived & current.derived)}
    if not (saved.has_dense_layers or current.has_dense_layers):
        unasked = unasked - {"expert_intermediate"} | {"intermediate"}
    return differences(saved.compared(unasked), current.compared(unasked))


def check_same_run(description: Description, run: dict[str, Any], path: Path) -> None:
    """Raises `UserError` if a run with the fingerprint `run` cannot continue the checkpoint `path`."""
    if said := run_differences(description, run):
        raise UserError(f"{path} belongs to another run: {said}. Use those values or another train.output")


def run_differences(description: Description, run: dict[str, Any]) -> str:
    """Returns the differences between the fingerprint in a description and the fingerprint `run`."""
    saved = description.run
    changed = [differences(saved, {key: value for key, value in run.items() if key != "data"})]
    if saved.get("data") != run.get("data"):  # hashes
        changed.append(f"data is {_sources(description.config)} there, with other contents, shares or order than here")
    return ", ".join(filter(None, changed))


def _sources(config: Mapping[str, Any]) -> str:
    """Returns the paths and dataset names of the training data in a stored configuration, or "unknown"."""
    sections = [config.get("data"), *(phase.get("data") for phase in config.get("phases") or ())]
    sources = [each for data in sections if data for each in (data, *(data.get("sources") or ()))]
    names = [each.get("path") or each.get("dataset") for each in sources]
    return ", ".join(dict.fromkeys(name for name in names if name)) or "unknown"
