"""Pruning as an event of a run: when it happens, by what, and what becomes of the weights that are left."""

from collections.abc import Mapping

from torch import Tensor

from optimus.checkpoint.folder import weights_folder
from optimus.checkpoint.store import load_state
from optimus.config import RunConfig
from optimus.config.pruning import PruningConfig
from optimus.state.pruning import (
    PrunableWeights,
    Score,
    block_norms,
    distance,
    magnitudes,
    prune,
    random_scores,
    share_left,
    weights_of,
)
from optimus.training.beginning import begin
from optimus.training.hooks import Hook
from optimus.training.run import Run
from optimus.training.step import StepResult

_DRAWS = 5  # distances between masks in a row that must be small (You et al., section 4)


def choose_masks(
    weights: PrunableWeights, config: RunConfig, targets: Mapping[str, int], unpruned: float | None = None
) -> dict[str, Tensor]:
    """Masks that leave a share of the `targets`, by default what the first event does, chosen as configured."""
    pruning = config.pruning
    assert pruning is not None
    of_blocks: Score = block_norms if pruning.scope.startswith("block") else magnitudes
    score = random_scores(config.train.seed) if pruning.method == "random" else of_blocks
    share = pruning.unpruned(0) if unpruned is None else unpruned
    return prune(weights, share, targets, score, per_tensor=pruning.scope == "layer")


def after_pruning(run: Run) -> None:
    """Say what is left, and give it the weights of an earlier step if so configured."""
    run.unpruned, run.prunings = share_left(run.state, run.targets), run.prunings + 1
    run.notes.append(f"step {run.step}: pruned: {run.unpruned:.2%} of the targets are left")
    assert run.config.pruning is not None
    step = run.config.pruning.rewind
    if step is None:
        return
    if step == run.step:
        run.state.begin()  # the weights are those of this step
    elif step == 0:
        begin(run, masks=False)
    else:
        load_state(run.state, weights_folder(run.folder, step), model=run.config.model, full=False, masks=False)
    run.state.steps, run.state.counters = 0, dict.fromkeys(run.state.counters, 0.0)
    run.notes.append(f"step {run.step}: the weights that are left are those of step {step}")


class Pruning(Hook):
    """Prunes parameters after the steps that the configuration names; on all ranks, before checkpoints are written."""

    def before_training(self, run: Run) -> None:
        pruning = run.config.pruning
        if pruning is not None and run.step == 0 and not pruning.comes_first:
            self._at_step(run, pruning)

    def after_step(self, run: Run, result: StepResult) -> None:
        if run.config.pruning is not None:
            self._at_step(run, run.config.pruning)

    def _at_step(self, run: Run, pruning: PruningConfig) -> None:
        if pruning.method == "early-bird":
            since = run.step - pruning.at[0]
            if not run.prunings and since >= 0 and since % pruning.every == 0:
                self._draw(run, pruning)
        elif run.step in pruning.at:
            unpruned = pruning.unpruned(pruning.at.index(run.step))
            self._apply(run, choose_masks(weights_of(run.state), run.config, run.targets, unpruned))

    def _draw(self, run: Run, pruning: PruningConfig) -> None:
        masks = choose_masks(weights_of(run.state), run.config, run.targets)
        if run.state.drawn is not None:
            run.mask_distances = [*run.mask_distances, distance(run.state.drawn, masks, run.state)][-_DRAWS:]
            run.notes.append(f"step {run.step}: mask distance {run.mask_distances[-1]:.3f} of what is left")
        run.state.drawn = masks
        if len(run.mask_distances) == _DRAWS and max(run.mask_distances) < pruning.distance:
            run.state.drawn, run.mask_distances = None, []
            self._apply(run, masks)

    def _apply(self, run: Run, masks: Mapping[str, Tensor]) -> None:
        if run.saver is not None:
            run.saver.finish()
        run.state.prune(masks)
        after_pruning(run)
