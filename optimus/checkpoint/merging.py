"""Weighted averages of the weights of checkpoints."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from optimus.checkpoint.copying import local_checkpoint
from optimus.checkpoint.factors import is_factor
from optimus.checkpoint.folder import Description, list_checkpoints
from optimus.checkpoint.masks import PREFIX, all_masks, booleans
from optimus.checkpoint.reader import Reader
from optimus.checkpoint.saving import write_alone
from optimus.checkpoint.slices import LONGEST, TensorSlice, full_slices, tiles
from optimus.checkpoint.store import check_same_model
from optimus.disk import user_path
from optimus.errors import UserError
from optimus.plugins import load_plugins

_PREFIX = "model."


def merge(
    checkpoints: Mapping[str, float] | Sequence[str | Path],
    output: str | Path,
    *,
    last: int | None = None,
    plugins: Sequence[str] = (),
) -> dict[str, Any]:
    """Writes the weighted average of the weights of `checkpoints` as a new weights-only checkpoint. A run stands for
    the run's newest checkpoint.

    A mapping gives each checkpoint's weight in the average. A sequence gives equal weights. With `last`,
    `checkpoints` must name one run; the function averages the run's newest `last` checkpoints with equal weights.
    `plugins` names the plugins that the models need.

    Sums are in float64 and the averages are in fp32.

    Returns `output`, `parameters` (the number of averaged elements), and `weights` by path, with the sum 1. Raises
    `UserError` for fewer than two checkpoints, a checkpoint named twice, different models or tokenizers, weights
    without a positive finite sum, averages that are not finite in fp32, and an existing `output`.

    Example:
        optimus.merge({"runs/web": 0.3, "runs/math": 0.7}, "merged")
        optimus.merge(["runs/first"], "averaged", last=5)
    """
    load_plugins(plugins)
    output = user_path(output)
    if output.exists():
        raise UserError(f"{output} exists already: choose another `output` or remove it")
    given = [*checkpoints.items()] if isinstance(checkpoints, Mapping) else [(path, 1.0) for path in checkpoints]
    weights = _last_of([path for path, _ in given], last) if last is not None else _found(given)
    try:
        total = math.fsum(weights.values())
    except (OverflowError, ValueError):  # the sum overflows, or adds both infinities
        total = math.nan
    if len(weights) < 2 or not math.isfinite(total) or total <= 0:
        raise UserError(f"give at least two checkpoints, with finite weights whose sum is above 0: {_said(weights)}")
    readers = [Reader.open(path) for path in weights]
    first = readers[0].description
    for reader in readers[1:]:
        check_same_model(reader.description.model, first.model, reader.path)
        if _tokenizer(reader.description) != _tokenizer(first):
            raise UserError(
                f"{reader.path} and {readers[0].path} have different tokenizers: their models cannot be averaged"
            )
    masks = _common_masks(readers)
    averaged = _averaged(readers, [weight / total for weight in weights.values()], masks)
    description = Description(
        first.model,
        min(reader.description.context for reader in readers),
        max(reader.description.step for reader in readers),
        full=False,
        eos_id=first.eos_id,
        tokenizer=first.tokenizer,
        progress={"unpruned": first.unpruned} if masks else {},
        published=first.published,
        chat=first.chat,
        plugins=first.plugins,
        written={"merged": {str(path): weight / total for path, weight in weights.items()}},
    )
    stored = write_alone(output, averaged, description, "Make room or choose another `output`")
    elements = sum(math.prod(each.sizes) for each in stored if not each.key.startswith(PREFIX))
    return {"output": str(output), "parameters": elements, "weights": description.written["merged"]}


def _found(weighted: Sequence[tuple[str | Path, float]]) -> dict[Path, float]:
    """Returns each checkpoint's weight in the average. Raises `UserError` if two names stand for one checkpoint."""
    weights, names = dict[Path, float](), dict[Path, str | Path]()
    for name, weight in weighted:
        path = local_checkpoint(name)
        other = names.setdefault(path.resolve(), name)
        if path in weights or other != name:
            raise UserError(f"{other} and {name} are the same checkpoint, {path}: name it once, with its whole weight")
        weights[path] = weight
    return weights


def _last_of(runs: Sequence[str | Path], last: int) -> dict[Path, float]:
    """Returns the newest `last` checkpoints of the only run in `runs`, one per step, with equal weights. Raises
    `UserError` for a number of runs other than 1, for `last` below 2, and for a run with fewer checkpoints."""
    if len(runs) != 1 or last < 2:
        raise UserError(
            f"`last` is {last} for {len(runs)} runs: it averages the last checkpoints of one run, at least 2"
        )
    (run,) = runs
    by_step = {path.name.partition("-")[2]: path for path in list_checkpoints(user_path(run), "weights", "step")}
    paths = [path for _, path in sorted(by_step.items())][-last:]
    if len(paths) < last:
        raise UserError(
            f"{run} has only {len(paths)} of the {last} checkpoints that `last` asks for: lower `last`, or let the run keep "
            "more (checkpoint.keep, checkpoint.weights_every)"
        )
    return dict.fromkeys(paths, 1.0)


def _averaged(
    readers: Sequence[Reader], weights: Sequence[float], masks: Mapping[str, torch.Tensor]
) -> Iterator[TensorSlice]:
    """Yields the averages, one tile at a time, in the order of their keys, and then `masks`."""
    stored = readers[0].stored
    for key in sorted(key for key in stored if key.startswith(_PREFIX) and not is_factor(key)):
        shape = stored[key][0].shape
        for offsets, sizes in tiles(shape, LONGEST):
            total = torch.zeros(sizes, dtype=torch.float64)
            for reader, weight in zip(readers, weights):
                tile = torch.empty(sizes, dtype=torch.float32)
                reader.fill([TensorSlice(key, shape, offsets, tile)])
                total.add_(tile, alpha=weight)
            average = total.float()
            if not bool(average.isfinite().all()):
                paths = ", ".join(str(reader.path) for reader in readers)
                raise UserError(
                    f"the average of {key.removeprefix(_PREFIX)} over {paths} is not finite in fp32: "
                    "name checkpoints of finite numbers, with weights in the average near 1"
                )
            yield TensorSlice(key, shape, offsets, average)
    yield from full_slices(masks.items(), prefix="")


def _common_masks(readers: Sequence[Reader]) -> dict[str, torch.Tensor]:
    """Returns the masks if all checkpoints have the same pruned elements; otherwise an empty dict."""
    masks, *others = map(all_masks, readers)
    shapes = readers[0].shapes

    def same(key: str, mask: torch.Tensor) -> bool:
        shape = shapes["model." + key.removeprefix(PREFIX)]
        return torch.equal(booleans(mask, shape), booleans(masks[key], shape))

    alike = all(each.keys() == masks.keys() and all(map(same, each, each.values())) for each in others)
    return masks if alike else {}


def _tokenizer(description: Description) -> bytes | None:
    return None if description.tokenizer is None else description.tokenizer.read_bytes()


def _said(weights: Mapping[Path, float]) -> str:
    return ", ".join(f"{path}={weight:g}" for path, weight in weights.items())
