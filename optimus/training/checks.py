"""Checks a run's configuration, data, folder, copies and memory, and fetches a lost run."""

import math
import os
import weakref
from itertools import chain, islice, takewhile
from pathlib import Path

import torch

from optimus.checkpoint.copying import (
    complete_copies,
    copied_steps,
    describe_copy,
    fetch_run,
    has_abandoned,
    has_other_content,
)
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
from optimus.checkpoint.rollback import resume_points, rolled_back_to
from optimus.checkpoint.store import check_same_model, check_same_run, model_differences, run_differences
from optimus.config import RunConfig, load_config
from optimus.config.sizes import size_text
from optimus.copies import RemoteCopies, UnreachableError
from optimus.data.token_files import TokenFileRows
from optimus.data.training import TrainingData, open_validation
from optimus.errors import UserError, naming_key
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

_BYTES_PER_TOKEN = 8  # above the mean of most tokenizers


def check_references(config: RunConfig, resume: bool) -> None:
    """Raises `UserError` for an unusable metric sink or an unusable `checkpoint.copy_to`. Without `resume`, also raises
    `UserError` if `lr_schedule.branch_from` or `checkpoint.load_path` does not fit the run."""
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
    """Raises `UserError` for unusable validation text, validation data or task data. Also raises `UserError` if there
    are tasks but lm-eval is missing."""
    for number, each in enumerate(config.validation):
        if each.text is not None:
            with naming_key(f"validation.{number}.text"):
                check_text(each.text, each.max_bytes or _BYTES_PER_TOKEN * each.tokens)
        elif each.path is not None:
            documents = config.data.documents == "mask"
            with naming_key(f"validation.{number}.path"):
                rows = open_validation(each.path, config, data.first_folder)
                # Files without checksums are read as far as the run will measure them.
                parts = read_rows(rows, each.tokens, documents=documents)
                measured = (part.tokens and part.bytes for part in parts)
                found = any([*measured]) if isinstance(rows, TokenFileRows) else not rows.masked or any(measured)
            limit = config.model.learned_positions or rows.context
            if rows.context - 1 > limit:  # the last token of a row is not an input
                raise UserError(
                    f"validation.{number}.path: {each.path} has rows of {rows.context} tokens, but the model has only "
                    f"{limit} learned positions: prepare the data with `context` {limit}"
                )
            if not found:
                raise UserError(
                    f"validation.{number}.path: none of the first {each.tokens:,} tokens of {each.path} is predicted: raise "
                    "validation.tokens, or prepare the data with a longer `context`"
                )
    if config.evaluate.tasks:
        from optimus.evaluation.tasks import check_lm_eval, load_tasks

        check_lm_eval()
        load_tasks(config.evaluate.tasks, Path(str(config.evaluate.task_data)))


def check_output(config: RunConfig, resume: bool, data: TrainingData) -> None:
    """Raises `UserError` when the run folder is not writable. Without `resume`, raises `UserError` when the folder
    contains a run or files other than a lease. With `resume`, raises `UserError` when the run cannot continue there."""
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
    """Raises `UserError` if the run cannot resume from the newest undamaged checkpoint.

    Raises `DamagedError` if all checkpoints to resume are damaged. Without checkpoints to resume, raises `UserError` if
    the folder belongs to a run of another model, or if its `checkpoints` folder has entries with unknown names.
    """
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
    if others:
        raise UserError(
            f"{folder / 'checkpoints'} holds no checkpoint step-N to resume, only {', '.join(others)}: rename one of them "
            "to step-N, or choose another train.output"
        )
    if saved.exists() and load_config(saved, of_run=True).model != config.model:
        raise UserError(f"train.output: {folder} is the folder of a run of another model: choose another train.output")


def fetch_lost_run(config: RunConfig, data: TrainingData, resume: bool) -> None:
    """Checks the copies at `checkpoint.copy_to`, and fetches a lost run from its copies. A run is lost if its folder
    has neither a complete full checkpoint nor a rollback marker.

    Without `resume`, only raises `UserError` if a lost run has complete copies. An unreachable URL raises
    `UnreachableError` only for a lost run.
    """
    url, folder, pruning = config.checkpoint.copy_to, Path(config.train.output), config.pruning
    if url is None:
        return
    lost = not list_checkpoints(folder) and rolled_back_to(folder) is None
    if not resume:
        copies = RemoteCopies(url)
        if lost and (found := next(chain(complete_copies(copies), complete_copies(copies, "weights")), None)):
            raise UserError(
                f"checkpoint.copy_to: {url} already has copies of a run (up to {found}): continue it with "
                "`resume=True` or choose another URL"
            )
        return
    try:
        check_copies(config, data)
    except UnreachableError as error:
        if lost:
            raise
        say_at_once(f"checkpoint.copy_to: {error}; the run goes on, and checks the copies before it copies")
        return
    weights = [pruning.rewind] if pruning is not None and pruning.rewind else []
    if lost and (name := fetch_run(url, folder, weights)) is not None:
        say_at_once(f"{folder} has no checkpoint: {name} is fetched from {url}")


def check_copies(config: RunConfig, data: TrainingData) -> None:
    """Raises `UserError` if the newest complete copies at `checkpoint.copy_to` are of another run.

    If the run folder has full checkpoints, also raises `UserError` if the newest copied checkpoint differs from its
    copy, or if there are copies of later steps. Neither is an error if the run was rolled back or has abandoned such a
    copy.
    """
    url, folder = str(config.checkpoint.copy_to), Path(config.train.output)
    copies = RemoteCopies(url)
    for name in [each for kind in ("step", "weights") for each in islice(complete_copies(copies, kind), 1)]:
        about = describe_copy(copies, name)
        fingerprint = data.fingerprint(about.step, config.train.seed)
        if said := model_differences(about.model, config.model) or run_differences(about, fingerprint):
            raise UserError(f"checkpoint.copy_to: {url} has copies of another run ({name}: {said}): choose another URL")
    steps = copied_steps(copies)
    found = list_checkpoints(folder)  # read last: the copies lag behind a running run
    if not found:
        return
    common = [path.name for path in found if path.name in steps][-1:]
    if any(has_other_content(folder, copies, name) for name in common) and not has_abandoned(folder, copies, common):
        raise UserError(
            f"checkpoint.copy_to: {url} has copies of another run, whose {common[0]} differs from the one in {folder}: "
            "choose another URL"
        )
    newest = step_of(found[-1])
    newer = takewhile(lambda name: step_of(Path(name)) > newest, complete_copies(copies))
    later = [name for name in newer if name in steps]
    if later and not has_abandoned(folder, copies, later):
        there = ", ".join(str(steps[name]) for name in later)
        raise UserError(
            f"checkpoint.copy_to: {url} has copies of later steps ({there}) than {folder} (step {newest}): empty the "
            f"folder to resume from the copy, abandon the copies with `optimus rollback {folder} --step {newest}`, or "
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
    """Raises `UserError` when the model state, the teacher and copies of checkpoints do not fit into the free memory.

    With `use_total`, counts an accelerator's total memory as free.
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
    """Runs forward and backward passes on synthetic tokens, and returns a line about the memory.

    A CPU runs only a few sequences of each microbatch, because a lack of memory could kill the process. The weights and
    the optimizer state stay unchanged. Raises `UserError` when the microbatches do not fit into the free memory.
    """
    config, mesh = run.config, run.groups.mesh
    micro_batch, context = config.train.micro_batch, run.resolved.widest.train.sequence_length
    tokens_1S = torch.arange(context, device=run.device).remainder(config.model.vocab)[None]
    free = free_memory(run.device)
    try:
        # The smallest number of sequences whose tokens the tensor-parallel ranks can divide evenly, at most
        # `micro_batch`.
        few = min(micro_batch, mesh.tp // math.gcd(mesh.tp, context // mesh.cp))
        one = _saved_bytes(run, tokens_1S.expand(mesh.pp * few, -1), few) // few
    except torch.OutOfMemoryError:
        raise UserError(
            f"a microbatch of one sequence does not fit into the free {size_text(free)} of {run.device}: "
            "shorten train.sequence_length, or recompute some activations (recompute: [norm, attention, ...])"
        ) from None
    needed = one * micro_batch
    if run.device.type == "cpu" and needed * ranks_sharing_memory(mesh, run.device) > free:
        raise UserError(_too_large(needed, free, one, run))
    try:
        if run.device.type != "cpu":
            run.state.clear_gradients()
            accumulate_gradients(run.model, run.state, tokens_1S.expand(mesh.pp * micro_batch, -1), config)
    except torch.OutOfMemoryError:
        raise UserError(_too_large(needed, free, one, run)) from None
    run.state.clear_gradients()
    at_rest = bytes_by_kind([chunk.plan for chunk in run.state.chunks])
    parts = [f"{kind} {size_text(size)}" for kind, size in at_rest.items() if size]  # none where all state is elsewhere
    parts.append(f"activations of {_microbatches(run)} {size_text(needed)}")
    return f"memory per rank: {', '.join(parts)}; {size_text(free)} free"


def _saved_bytes(run: Run, tokens_BS: torch.Tensor, micro_batch: int) -> int:
    """Returns the peak of the bytes that forward passes on microbatches of `micro_batch` sequences save for backward
    passes, without the parameters."""
    live: dict[int, int] = {}  # bytes by address
    state = {chunk.parameter.untyped_storage()._cdata for chunk in run.state.chunks}
    total = peak = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total, peak
        storage = tensor.untyped_storage()
        if storage._cdata not in state and storage._cdata not in live:
            live[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, forget, storage._cdata)
            total += storage.nbytes()
            peak = max(peak, total)
        return tensor

    def forget(address: int) -> None:
        nonlocal total
        total -= live.pop(address)

    run.state.clear_gradients()
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        accumulate_gradients(run.model, run.state, tokens_BS, run.config, micro_batch=micro_batch)
    return peak


def _microbatches(run: Run) -> str:
    in_flight = run.config.parallel.pipeline
    return f"{in_flight} microbatches" if in_flight > 1 else "a microbatch"


def _too_large(needed: int, free: int, one: int, run: Run) -> str:
    fitting = free // max(1, one * ranks_sharing_memory(run.groups.mesh, run.device))
    fitting = min(fitting, run.config.train.micro_batch - 1)  # the workspace may not fit even if the activations do
    cure = f"set train.micro_batch to at most {fitting}" if fitting else "shorten train.sequence_length"
    return (
        f"the activations of {_microbatches(run)} of {run.config.train.micro_batch} sequences need {size_text(needed)}, but "
        f"{run.device} has {size_text(free)} free: {cure}, or recompute some activations (recompute: [norm, attention, ...])"
    )
