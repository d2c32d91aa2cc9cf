"""Sets the initial state of a run, from fresh or loaded weights."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from optimus.checkpoint.folder import DamagedError, find_checkpoint
from optimus.checkpoint.loading import load_slices
from optimus.checkpoint.masks import follow_masks
from optimus.checkpoint.reader import Reader, WeightSource
from optimus.checkpoint.rollback import resume_points
from optimus.checkpoint.slices import TensorSlice
from optimus.checkpoint.store import load_state
from optimus.config import RunConfig
from optimus.hub import FolderReader, context_of, read_published
from optimus.model import CausalModel
from optimus.model.init import initialize_parameter
from optimus.model.parameters import declarations
from optimus.state.plan import ParameterSlot
from optimus.training.checkpointing import Origin
from optimus.training.run import Run, read_together


def begins_with(config: RunConfig, resume: bool) -> WeightSource | None:
    """Opens the checkpoint or model folder that a run loads. Returns None if there is nothing to load, or
    if all checkpoints are damaged."""
    paths = [point.path for point in resume_points(Path(config.train.output))] if resume else []
    initial = config.lr_schedule.branch_from or config.checkpoint.load_path
    if not paths and initial is not None:
        if is_model_folder(initial):
            return FolderReader(Path(initial), config.model)
        paths = [find_checkpoint(initial)]
    for path in paths:
        with suppress(DamagedError):  # loading the checkpoint reports the damage later
            return Reader.open(path)
    return None


def begins_anew(config: RunConfig, resume: bool) -> bool:
    """Returns True if the run neither resumes nor branches from a checkpoint."""
    goes_on = resume and bool(resume_points(Path(config.train.output)))
    return not goes_on and config.lr_schedule.branch_from is None


def is_model_folder(path: str | Path) -> bool:
    """Returns True if `path` is a Hugging Face model folder, which has a config.json."""
    return (Path(path) / "config.json").is_file()


def first_weights(
    config: RunConfig, source: WeightSource | None, model: CausalModel
) -> Callable[[ParameterSlot, Tensor], None]:
    """Returns a function that fills a slice of a parameter of `model`, from `source` or, without a source, from the
    declared initialisation."""
    declared, seed, std = dict(declarations(model)), config.train.seed, config.model.init_std

    def initialised(slot: ParameterSlot, weights: Tensor) -> None:
        kind = declared[slot.name].initial
        initialize_parameter(slot.name, weights.view(-1), kind, seed, std, positions=slot.global_positions)

    def loaded(slot: ParameterSlot, weights: Tensor) -> None:
        assert source is not None
        here, offsets = weights.cpu(), tuple(part.start for part in slot.region)
        source.fill([TensorSlice(f"model.{slot.name}", slot.layout.shape, offsets, here)])
        weights.copy_(here)

    return initialised if source is None else loaded


def begin(run: Run, began_with: str | None, *, masks: bool) -> tuple[Origin, int]:
    """Fills the state of `run` with fresh moments, and with initial weights or the weights of `began_with`.

    Returns (origin of the weights, number of ranks that read the weights). With `masks`, prunes the same elements as
    `began_with`; otherwise leaves the masks of the state unchanged. All ranks must call this function. Raises
    `UserError` on all ranks when the weights cannot be read.
    """
    seed, std, world = run.config.train.seed, run.config.model.init_std, run.groups.world
    send, origin = run.config.checkpoint.broadcast, Origin()
    if began_with is None:
        run.state.initialize(seed, std)
        return origin, 0
    if is_model_folder(began_with):
        source = read_together(lambda: FolderReader(Path(began_with), run.config.model), world)
        pruned = masks and follow_masks(run.state, source)
        readers, unpruned = load_slices(run.state, source.fill, full=False, send=send, pruned=pruned), source.unpruned
        context, published = world.on_first(
            lambda: (
                context_of(Path(began_with), own_modules=run.config.model.is_adapted),
                read_published(Path(began_with)),
            )
        )
        origin = Origin(began_with, context, published)
    else:
        path = world.on_first(lambda: find_checkpoint(began_with))
        found, readers = load_state(run.state, path, model=run.config.model, full=False, send=send, masks=masks)
        # The newest checkpoint of a run folder may change, so the origin is the path of the checkpoint.
        origin, unpruned = Origin(str(path), found.context, found.published, found.chat), found.unpruned
    if masks:
        run.state.pruned.unpruned = unpruned
    run.state.initialize(seed, std, only="factor")
    return origin, readers
