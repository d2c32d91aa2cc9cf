"""Pruning as an event of a run: the choice of masks, and the rewind of the remaining weights."""

from collections.abc import Mapping

from torch import Tensor

from optimus.checkpoint.folder import weights_folder
from optimus.checkpoint.store import load_state
from optimus.config import RunConfig
from optimus.state.pruning import (
    PrunableWeights,
    Score,
    block_norms,
    magnitudes,
    prune,
    random_scores,
    unpruned_share,
)
from optimus.training.beginning import begin
from optimus.training.run import Run


def choose_masks(
    weights: PrunableWeights, config: RunConfig, targets: Mapping[str, int], unpruned: float | None = None
) -> dict[str, Tensor]:
    """Chooses masks of this rank's slices that leave about the fraction `unpruned` of `targets` unpruned.

    By default, `unpruned` is the fraction after the first pruning. `targets` maps each parameter's name to its number
    of elements in the whole model. All ranks must call this function.
    """
    pruning = config.pruning
    assert pruning is not None
    of_blocks: Score = block_norms if pruning.scope.startswith("block") else magnitudes
    score = random_scores(config.train.seed) if pruning.method == "random" else of_blocks
    share = pruning.unpruned(0) if unpruned is None else unpruned
    return prune(weights, share, targets, score, per_tensor=pruning.scope == "layer")


def after_pruning(run: Run, step: int, began_with: str | None) -> list[str]:
    """Records a pruning event, and rewinds the remaining weights to the step `pruning.rewind`, if set.

    A rewind also resets the state of the update rules, the number of updates and the counters. Returns lines for the
    user. All ranks must call this function.
    """
    state, pruning = run.state, run.config.pruning
    assert pruning is not None
    state.pruned.unpruned, state.pruned.events = unpruned_share(state, run.targets), state.pruned.events + 1
    said = [f"step {step}: pruned: {state.pruned.unpruned:.2%} of the elements of the targets remain"]
    if pruning.rewind is None:
        return said
    if pruning.rewind == step:
        state.begin()
    elif pruning.rewind == 0:
        begin(run, began_with, masks=False)
    else:
        weights = weights_folder(run.folder, pruning.rewind)
        load_state(state, weights, model=run.config.model, full=False, masks=False)
    state.steps, state.counters = 0, dict.fromkeys(state.counters, 0.0)
    return [*said, f"step {step}: the remaining weights are rewound to step {pruning.rewind}"]
