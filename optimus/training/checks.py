"""Checks, before the first step, for mistakes that would make the run fail later."""

import math
import os
from pathlib import Path

import torch

from optimus.checkpoint.copying import complete_copies, fetch_run
from optimus.checkpoint.folder import (
    MANIFEST,
    DamagedError,
    Description,
    find_checkpoint,
    list_checkpoints,
    read_description,
    step_of,
    weights_folder,
)
from optimus.checkpoint.lease import LEASE
from optimus.checkpoint.manifest import read_checked_description
from optimus.checkpoint.rollback import resume_points
from optimus.checkpoint.store import check_same_model, check_same_run
from optimus.config import RunConfig, load_config
from optimus.config.sizes import size_text
from optimus.copies import RemoteCopies
from optimus.data.shards import Shards
from optimus.data.training import TrainingData, check_same_tokenizer
from optimus.errors import UserError
from optimus.evaluation.text import check_text, read_rows
from optimus.hub import check_same_folder
from optimus.model.count import count_parameters
from optimus.observe.machine import free_memory, total_memory
from optimus.observe.sinks import check_sinks
from optimus.observe.terminal import say_at_once
from optimus.resolve.memory import at_rest
from optimus.resolve.ranks import ranks_sharing_memory
from optimus.resolve.run import ResolvedRun
from optimus.state.plan import bytes_by_kind
from optimus.training.beginning import is_model_folder
from optimus.training.run import Run
from optimus.training.step import accumulate_gradients

_BYTES_PER_TOKEN = 8  # above the mean of most tokenizers; the check should read all text that validation reads


def check_references(config: RunConfig, resume: bool) -> None:
    """Raises `UserError` for an unusable metric sink, and for a URL `checkpoint.copy_to` with an unusable protocol.
    Without `resume`, raises `UserError` if the run cannot start from the configured checkpoint or model folder."""
    check_sinks(config)
    if config.checkpoint.copy_to is not None:
        RemoteCopies(config.checkpoint.copy_to)  # raises for an unknown protocol or a missing package
    if config.lr_schedule.branch_from is not None and not resume:
        path = find_checkpoint(config.lr_schedule.branch_from)
        trunk = read_description(path)
        check_same_model(trunk.model, config.model, path)
        if not trunk.full:
            raise UserError(f"lr_schedule.branch_from: {path} holds weights only: name a full checkpoint, step-N")
        if trunk.step >= config.train.total_steps:
            raise UserError(
                f"lr_schedule.branch_from: {path} is at step {trunk.step}, but the run ends at {config.train.total_steps}: "
                "raise train.steps, which includes the steps of the trunk"
            )
        check_prunings(config, trunk, path)
    initial = config.checkpoint.load_path
    if initial is not None and not resume:
        if is_model_folder(initial):
            check_same_folder(Path(initial), config.model)
        else:
            path = find_checkpoint(initial)
            check_same_model(read_description(path).model, config.model, path)


def check_validation(config: RunConfig, data: TrainingData) -> None:
    """Raises `UserError` for validation text or task data that cannot be read, and for tasks if lm-eval is missing.
    Raises `UserError` for prepared validation text with another tokenizer, or without predicted tokens in the measured
    rows.

    Checks the files of this node only. During the run, only rank 0 reads text and tasks.
    """
    for number, each in enumerate(config.validation):
        if each.text is not None:
            _check_text(each.text, f"validation.{number}.text", each.max_bytes or _BYTES_PER_TOKEN * each.tokens)
        elif each.path is not None:
            shards = Shards(each.path, config.train.data_cache)
            check_same_tokenizer(data.first_folder, shards)
            if shards.masked and not any(part.tokens for part in read_rows(shards, each.tokens)):
                raise UserError(
                    f"validation.{number}.path: none of the first {each.tokens:,} tokens of {each.path} is predicted: raise "
                    "validation.tokens, or prepare the data with a longer `context`"
                )
    if config.evaluate.tasks:
        from optimus.evaluation.tasks import check_lm_eval, load_tasks

        check_lm_eval()
        load_tasks(config.evaluate.tasks, Path(str(config.evaluate.task_data)))


def _check_text(text: str, key: str, max_bytes: int) -> None:
    """Raises `UserError` when the file or folder `text` is missing, contains no text, or is unreadable within its first
    `max_bytes` bytes. The message begins with `key`."""
    try:
        check_text(text, max_bytes)
    except UserError as error:
        raise UserError(f"{key}: {error}") from None


def check_output(config: RunConfig, resume: bool, data: TrainingData) -> None:
    """Raises `UserError` when the run folder is not writable. Without `resume`, raises `UserError` when the folder
    contains a run or files other than a lease. With `resume`, raises `UserError` when the newest checkpoint in the
    folder belongs to another run."""
    folder = Path(config.train.output)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"train.output: {folder} is a file; name a folder")
    there = next(path for path in (folder / "checkpoints", folder, *folder.absolute().parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"train.output: you may not write to {there}: change its permissions or choose another folder")
    found = list_checkpoints(folder)
    if resume:
        _check_resumable(config, folder, data)
    elif found or (folder / "metrics.jsonl").exists():
        step = f" (saved at step {step_of(found[-1])})" if found else ""
        raise UserError(
            f"train.output: {folder} already holds a run{step}: continue it with `resume=True` or choose "
            "another train.output"
        )
    elif folder.is_dir() and any(path.name != LEASE for path in folder.iterdir()):
        raise UserError(f"train.output: {folder} is not empty and holds no run: choose another train.output")


def _check_resumable(config: RunConfig, folder: Path, data: TrainingData) -> None:
    """Raises `UserError` if the newest checkpoint with a readable description belongs to another run, and
    `DamagedError` if no checkpoint has a readable description. Does not read tensors."""
    saved, points = folder / "config.yaml", resume_points(folder)
    broken = []
    for point in points:
        try:
            description, _ = read_checked_description(point.path)
        except DamagedError as error:
            broken.append(str(error))
            continue
        check_same_model(description.model, config.model, point.path)
        check_same_run(description, data.fingerprint(description.step, config.train.seed), point.path)
        check_prunings(config, description, point.path)
        return
    if broken:
        raise DamagedError("; ".join(broken))
    others = sorted(
        path.name
        for path in (folder / "checkpoints").glob("[!.]*")
        if not path.name.startswith(("weights-", "frozen-"))
    )
    if others:  # without such files, there is nothing to resume
        raise UserError(
            f"{folder / 'checkpoints'} holds no checkpoint step-N to resume, only {', '.join(others)}: rename one of them "
            "to step-N, or choose another train.output"
        )
    if saved.exists() and load_config(saved, of_run=True).model != config.model:
        raise UserError(f"train.output: {folder} is the folder of a run of another model: choose another train.output")


def fetch_lost_run(config: RunConfig, resume: bool) -> None:
    """Fills a run folder without complete checkpoints from `checkpoint.copy_to`, if `resume` is set.

    Without `resume`, raises `UserError` if the URL already has complete copies of checkpoints.
    """
    url, folder = config.checkpoint.copy_to, Path(config.train.output)
    if url is None or list_checkpoints(folder):
        return
    if resume:
        if (name := fetch_run(url, folder)) is not None:
            say_at_once(f"{folder} has no checkpoint: {name} is fetched from {url}")
    elif found := complete_copies(RemoteCopies(url)):
        raise UserError(
            f"checkpoint.copy_to: {url} already has copies of a run (up to {found[0]}): continue it with `resume=True` or "
            "choose another URL"
        )


def check_prunings(config: RunConfig, description: Description, path: Path) -> None:
    """Raises `UserError` when a run that continues from the checkpoint `path` lacks the weights that `pruning.rewind`
    needs. Raises `UserError`, except with early-bird, when the checkpoint is at or after a pruning step but not
    pruned."""
    pruning, step = config.pruning, description.step
    if pruning is None:
        return
    late = [at for at in pruning.at if at <= step and pruning.method != "early-bird"]
    if late and not description.prunings:
        raise UserError(
            f"pruning.at {late[-1]}: the run continues from {path}, which is at step {step} and not pruned: give later steps"
        )
    done = description.prunings > 0 if pruning.method == "early-bird" else pruning.at[-1] <= step
    back, folder = pruning.rewind, Path(config.train.output)
    if back and back <= step and not done and not (weights_folder(folder, back) / MANIFEST).is_file():
        raise UserError(
            f"pruning.rewind {back}: the run continues from {path} at step {step}, but {folder} has no weights of step "
            f"{back}: give a later step whose weights are saved (checkpoint.weights_every), or 0"
        )


def check_memory(run: ResolvedRun, device: torch.device, *, use_total: bool = False) -> None:
    """Raises `UserError` when the model state (parameters, gradients, optimizer state) does not fit into the free
    memory.

    On an accelerator, checks the device memory of the fullest rank, and the host memory of all ranks of the fullest
    node, including copies for checkpoints. On a CPU, checks the state and the copies of the fullest node together.
    Ranks with the last stage also hold the teacher, if any. With `use_total`, counts an accelerator's total memory as
    free, and allocates no device memory.
    """
    config, mesh, shared = run.config, run.mesh, device.type == "cpu"
    found, together = at_rest(run, shared=shared), min(mesh.size, mesh.ranks_per_node or mesh.size)
    if shared:
        _check_fits(config, found.node, found.copies, device, together, teacher=found.teacher, use_total=use_total)
        return
    _check_fits(config, found.device, 0, device, 1, elsewhere=mesh.size > 1, teacher=found.teacher, use_total=use_total)
    if found.node + found.copies > 0:
        _check_fits(config, found.node, found.copies, torch.device("cpu"), together)


def _check_fits(
    config: RunConfig,
    state: float,
    copies: float,
    device: torch.device,
    together: int,
    *,
    elsewhere: bool = False,
    teacher: int = 0,
    use_total: bool = False,
) -> None:
    total, needed = count_parameters(config.model).total, state + copies + teacher
    free = total_memory(device) if use_total and device.type != "cpu" else free_memory(device)
    if needed <= free:
        return
    beside = config.state.offload != "none" and device.type == "cpu"
    where = f", {together} ranks" if together > 1 else ", on the fullest rank" if elsewhere else ""
    and_copies = f", and {copies / total:.3g} for copies of checkpoints" if copies else ""
    and_copies += f", and {size_text(teacher)} for train.teacher" if teacher else ""
    cures = ["set checkpoint.asynchronous=false"] if copies else []
    cures += ["set state.offload=disk"] if beside and config.state.offload != "disk" else []
    cures += ["set state.offload=all"] if device.type != "cpu" and config.state.offload in ("none", "optimizer") else []
    cures += ["choose a smaller model"]
    raise UserError(
        f"the state of this model ({total / 1e9:.2f} B parameters, {state / together / total:.3g} bytes each"
        f"{' on the host' if beside else ''}{where}{and_copies}) "
        f"needs {size_text(needed)}, but {device} has {size_text(free)} free: {', '.join(cures)}, "
        "set state.gradient_dtype=bfloat16, shard the state over more ranks (state.shard), use more stages "
        "(parallel.pipeline), or choose another machine"
    )


def dry_run(run: Run) -> str:
    """Checks that a microbatch fits into the free memory, by forward and backward passes on synthetic tokens. Returns a
    line with the results.

    First measures the activations of a few sequences or, with a pipeline, of one microbatch for each rank of the
    pipeline. Then runs a whole microbatch on an accelerator, but not on a CPU, where a lack of memory would kill the
    process. Leaves weights and optimizer state unchanged. Raises `UserError` when a microbatch does not fit.
    """
    micro_batch, context = run.config.train.micro_batch, run.resolved.widest.train.sequence_length
    tokens = torch.arange(context, device=run.device).remainder(run.config.model.vocab).expand(micro_batch, -1)
    free = free_memory(run.device)
    try:
        if run.config.parallel.pipeline > 1:  # one microbatch in flight on each pipeline rank
            under_way = tokens[:1].expand(run.config.parallel.pipeline * micro_batch, -1)
            one = _saved_bytes(run, under_way) // micro_batch
        else:
            mesh = run.groups.mesh
            # The smallest number of sequences whose tokens the tensor-parallel ranks can divide evenly.
            few = min(micro_batch, mesh.tp // math.gcd(mesh.tp, context // mesh.cp))
            one = _saved_bytes(run, tokens[:few]) // few
    except torch.OutOfMemoryError:
        raise UserError(
            f"a microbatch of one sequence does not fit into the free {size_text(free)} of {run.device}: "
            "shorten train.sequence_length, or recompute some activations (recompute: [norm, attention, ...])"
        ) from None
    needed = one * micro_batch
    if run.device.type == "cpu" and needed * ranks_sharing_memory(run.groups.mesh, run.device) > free:
        raise UserError(_too_large(needed, free, one, run))
    try:
        if run.device.type != "cpu":
            run.state.clear_gradients()
            accumulate_gradients(run.model, run.state, tokens, run.config)
    except torch.OutOfMemoryError:
        raise UserError(_too_large(needed, free, one, run)) from None
    run.state.clear_gradients()
    at_rest = bytes_by_kind([chunk.plan for chunk in run.state.chunks])
    kinds = ", ".join(f"{kind} {size_text(size)}" for kind, size in at_rest.items() if size)
    return f"memory per rank: {kinds}, activations of {_microbatches(run)} {size_text(needed)}; {size_text(free)} free"


def _saved_bytes(run: Run, tokens_BS: torch.Tensor) -> int:
    """Returns the bytes that forward passes on `tokens_BS` save for backward passes, without the parameters."""
    saved: dict[int, int] = {}
    state = {chunk.parameter.untyped_storage()._cdata for chunk in run.state.chunks}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in state:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    run.state.clear_gradients()
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        accumulate_gradients(run.model, run.state, tokens_BS, run.config)
    return sum(saved.values())


def _microbatches(run: Run) -> str:
    """Returns the words for the microbatches whose activations `dry_run` reports."""
    in_flight = run.config.parallel.pipeline
    return f"{in_flight} microbatches" if in_flight > 1 else "a microbatch"


def _too_large(needed: int, free: int, one: int, run: Run) -> str:
    fitting = free // max(1, one * ranks_sharing_memory(run.groups.mesh, run.device))
    fitting = min(fitting, run.config.train.micro_batch - 1)  # transient memory may be lacking even if activations fit
    cure = f"set train.micro_batch to at most {fitting}" if fitting else "shorten train.sequence_length"
    return (
        f"the activations of {_microbatches(run)} of {run.config.train.micro_batch} sequences need {size_text(needed)}, but "
        f"{run.device} has {size_text(free)} free: {cure}, or recompute some activations (recompute: [norm, attention, ...])"
    )
