"""Writes and describes the checkpoints of a run, and restores the states of random generators."""

import base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from optimus.checkpoint.folder import Description, step_folder, weights_folder
from optimus.checkpoint.saving import Saver, Target
from optimus.checkpoint.slots import frozen_folder_of
from optimus.config.phases import longest, sequences_after
from optimus.plugins import load_plugins
from optimus.training.progress import Progress
from optimus.training.run import Run


class Origin(NamedTuple):
    """The source of a run's weights before its first step."""

    began_with: str | None = None
    """The path of the checkpoint or model folder that the run started from, if any."""
    context: int = 0
    """The longest sequence length of the loaded model, in tokens; 0 without a loaded model."""
    published: Mapping[str, Any] = {}
    """Published metadata of the loaded model."""
    chat: Mapping[str, Any] = {}
    """The chat format of the data that the loaded model was trained on."""


@dataclass(frozen=True)
class Start:
    """The progress of a run when the run starts or resumes, and other values from the loaded checkpoint."""

    progress: Progress
    origin: Origin
    hooks: Mapping[str, Any] = field(default_factory=dict)
    """The states of hooks by name."""
    frozen: str | None = None
    """The name of a folder of frozen parameters; later checkpoints may refer to this folder. None: no such folder."""
    notes: list[str] = field(default_factory=list)


class Checkpointer:
    """Writes the checkpoints of `run`, synchronously or in the background.

    All ranks must create a checkpointer, and call the methods together.
    """

    def __init__(self, run: Run, start: Start) -> None:
        section = run.config.checkpoint
        self.saver = Saver(run.state, scattered=section.scattered, beside=section.asynchronous)
        self.saved = start.progress.step
        """The step of the newest full checkpoint, which may be in progress; before the first checkpoint, the step of
        the start."""
        self._run, self._frozen = run, start.frozen

    def save(
        self, progress: Progress, origin: Origin, hooks: Mapping[str, Any], *, full: bool, weights: bool = False
    ) -> None:
        """Writes a checkpoint of the whole state if `full`, and a checkpoint of the weights if `weights`.

        `hooks` are the states of hooks by name.
        """
        run, step, section = self._run, progress.step, self._run.config.checkpoint
        targets = []
        # The weights come first: a run killed between the two writes would otherwise resume after this step and never
        # write the weights.
        if weights:
            path = weights_folder(run.folder, step)
            targets.append(Target(path, describe(run, progress, origin, hooks), every=section.weights_interval))
        if full:
            self.saved = step
            targets += self._frozen_targets(progress, origin, hooks)
            about = describe(run, progress, origin, hooks, full=True, frozen=self._frozen)
            targets.append(Target(step_folder(run.folder, step), about, keep=section.keep))
        if targets:
            self.saver.save(*targets)

    def _frozen_targets(self, progress: Progress, origin: Origin, hooks: Mapping[str, Any]) -> list[Target]:
        """Returns the target for the folder of frozen parameters. Returns an empty list if `train.freeze` is empty, or
        if the folder is complete."""
        run = self._run
        if not run.config.train.freeze:
            return []
        self.saver.finish()
        self._frozen, complete = run.groups.world.on_first(lambda: frozen_folder_of(run.folder, self._frozen))
        path = run.folder / "checkpoints" / self._frozen
        return [] if complete else [Target(path, describe(run, progress, origin, hooks), frozen=True)]


def describe(
    run: Run,
    progress: Progress,
    origin: Origin,
    hooks: Mapping[str, Any],
    *,
    full: bool = False,
    frozen: str | None = None,
) -> Description:
    """Describes a checkpoint of the current state of `run`. `frozen` names the folder of frozen parameters that a full
    checkpoint refers to."""
    mesh, config, phase, state = run.groups.mesh, run.config, progress.phase, run.state
    pruned = state.pruned
    return Description(
        model=config.model,
        context=max(origin.context, longest(progress.phases[: phase.number + 1]).train.sequence_length),
        step=progress.step,
        full=full,
        precision=config.train.precision,
        eos_id=run.data.first_folder.eos_id,
        tokenizer=run.data.first_folder.tokenizer_path,
        run=run.data.fingerprint(progress.step, config.train.seed),
        progress={
            "updates": state.steps,
            **state.counters,
            "skipped": progress.skipped,
            **_loss_scaling(progress),
            "sequences": sequences_after(progress.phases, progress.step),
            **({"phase": phase.name} if phase.name else {}),
            **({"began_with": origin.began_with} if origin.began_with else {}),
            **({"prunings": pruned.events} if config.pruning else {}),
            **({"unpruned": pruned.unpruned} if pruned.unpruned < 1 else {}),
            **({"mask_distances": pruned.distances} if pruned.distances else {}),
            **({"hooks": dict(hooks)} if hooks else {}),
            **({"streams": streams} if (streams := run.data.stream_states(progress.step)) else {}),
        },
        config=run.resolved.record.model_dump(mode="json"),
        random=_random_states(run.device),
        written={
            "ranks": mesh.size,
            "ranks_per_node": mesh.ranks_per_node or mesh.size,
            "scattered": config.checkpoint.scattered,
        },
        published=dict(origin.published),
        chat=run.data.chat or dict(origin.chat),
        frozen=frozen,
        plugins=[asdict(plugin) for plugin in load_plugins(config.plugins)],
    )


def _loss_scaling(progress: Progress) -> dict[str, float]:
    """Returns the loss scale, and the counts of overflows, which a run keeps when it goes on in another precision."""
    scale = progress.loss_scale
    found = {} if scale is None else {"loss_scale": scale.value, "finite_steps": scale.finite_steps}
    counts = {"overflows": progress.overflows, "schedule_lag": progress.schedule_lag}
    return found | (counts if scale is not None or progress.overflows else {})


def _random_states(device: torch.device) -> dict[str, str]:
    """Returns the states of this rank's random generators, in base64."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return {kind: base64.b64encode(bytes(state.tolist())).decode() for kind, state in states.items()}


def restore_random(description: Description, device: torch.device) -> None:
    """Restores the random generators of the CPU and of `device`, if `description` has their states."""
    for kind, text in description.random.items():
        state = torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
        if kind == "cpu":
            torch.set_rng_state(state)
        elif kind == device.type:
            torch.get_device_module(device).set_rng_state(state, device)
