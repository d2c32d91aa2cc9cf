"""A hook that prunes parameters."""

from collections.abc import Mapping

from torch import Tensor

from optimus.config.pruning import PruningConfig
from optimus.state.pruning import distance, weights_of
from optimus.training.pruning import after_pruning, choose_masks
from optimus.training.record import StepRecord
from optimus.training.trainer import Hook, Order, Trainer

_DRAWS = 5  # number of consecutive mask distances that must be small (You et al., section 4)


class Pruning(Hook):
    """Prunes parameters after configured steps or, with early-bird, once successive masks hardly differ."""

    order = Order.CHANGE

    def before_training(self, trainer: Trainer) -> None:
        pruning = trainer.config.pruning
        if pruning is not None and trainer.progress.step == 0 and not pruning.comes_first:
            self._at_step(trainer, pruning)

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        if trainer.config.pruning is not None:
            self._at_step(trainer, trainer.config.pruning)

    def _at_step(self, trainer: Trainer, pruning: PruningConfig) -> None:
        if pruning.method == "early-bird":
            since = trainer.progress.step - pruning.at[0]
            if not trainer.state.pruned.events and since >= 0 and since % pruning.every == 0:
                self._draw(trainer, pruning)
        elif trainer.progress.step in pruning.at:
            unpruned = pruning.unpruned(pruning.at.index(trainer.progress.step))
            self._apply(trainer, choose_masks(weights_of(trainer.state), trainer.config, trainer.run.targets, unpruned))

    def _draw(self, trainer: Trainer, pruning: PruningConfig) -> None:
        masks = choose_masks(weights_of(trainer.state), trainer.config, trainer.run.targets)
        state, pruned = trainer.state, trainer.state.pruned
        if state.drawn is not None:
            pruned.distances = [*pruned.distances, distance(state.drawn, masks, state)][-_DRAWS:]
            trainer.say(
                f"step {trainer.progress.step}: mask distance {pruned.distances[-1]:.3f} of the unpruned elements"
            )
        state.drawn = masks
        if len(pruned.distances) == _DRAWS and max(pruned.distances) < pruning.distance:
            state.drawn, pruned.distances = None, []
            self._apply(trainer, masks)

    def _apply(self, trainer: Trainer, masks: Mapping[str, Tensor]) -> None:
        trainer.checkpointer.saver.finish()
        trainer.state.prune(masks)
        for line in after_pruning(trainer.run, trainer.progress.step, trainer.origin.began_with):
            trainer.say(line)
