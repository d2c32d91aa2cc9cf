"""What one layout has saved, any other loads: chains of random layouts, each of which goes on where the one before has saved.

Every two neighbours of a chain are a pair. After each step the state is compared bit for bit, and what is trained from it is
compared with one process that was never disturbed.
"""

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from optimus.checkpoint import Description, Reader, Saver, Target, load_state, verify
from optimus.checkpoint.folder import DESCRIPTION, MANIFEST, step_folder, weights_folder
from optimus.checkpoint.format import METADATA
from optimus.comm import Groups
from optimus.config import RunConfig, load_config
from optimus.hub import export_checkpoint
from optimus.model import Transformer
from optimus.pipeline.staged import Staged
from optimus.state import ModelState, Send
from optimus.testing import Layout, run_ranks
from optimus.testing.drawing import MODELS, config_of, drawn
from optimus.testing.equality import Trained, compare, random_batch, train_steps
from optimus.testing.whole import whole_state
from optimus.train.pipeline import with_microbatches
from optimus.train.run import build_model, mesh_of
from optimus.train.step import StepResult, training_step

CHAINS = range(16)
LENGTH = 5  # layouts of a chain
FIRST_STEPS = 2  # of the first layout; of every other one less one
STEPS = FIRST_STEPS + LENGTH + 1  # that a chain takes at most
MIXED = (3, 7, 11)  # chains of which some layouts compute in bf16
RTOL = {False: 2e-5, True: 5e-2}  # of losses and norms; with bf16
WORLDS = {  # of sizes that are not drawn
    "dense": [
        Layout(7, ["parallel.pipeline=7", "parallel.schedule=1f1b", "train.micro_batch=4", "state.shard=optimizer"]),
        Layout(2, ["parallel.tensor=2", "parallel.sequence=true"]),
        Layout(5, ["parallel.pipeline=5", "parallel.schedule=zb-h1", "train.micro_batch=2", "parallel.vocabulary=false"]),
        Layout(8, ["state.shard=parameters", "state.shard_ranks=4", "state.chunk=500"]),
        Layout(1),
    ],
    "thirds": [
        Layout(4, ["parallel.expert=2", "state.shard=gradients"]),
        Layout(3, ["parallel.tensor=3", "parallel.expert=3", "state.shard=parameters"]),
        Layout(1),
        Layout(6, ["parallel.expert=6", "state.shard=optimizer", "state.shard_over=data"]),
        Layout(2, ["parallel.context=2", "state.shard=parameters"]),
    ],
}


class Job(NamedTuple):
    """What the ranks of a layout do: begin or load, train some steps, and save."""

    config: dict[str, Any]
    steps: int
    run: Path  # where they save
    source: Path | None = None  # what they load
    full: bool = True
    send: Send = "broadcast"
    scattered: bool = True
    beside: bool = False  # one more step is trained while it is written
    saves: bool = True


class Visit(NamedTuple):
    """What came of it, on rank 0: the state that was loaded, every step, and the state that was saved."""

    loaded: dict[str, Tensor]
    steps: list[StepResult]
    saved: dict[str, Tensor]


class Chain(NamedTuple):
    """A model, with its number of layers, and layouts that take turns in training it."""

    model: str
    layouts: Sequence[Layout]
    jobs: Sequence[dict[str, Any]]  # how each one loads and saves
    mixed: bool

    @property
    def pairs(self) -> list[tuple[Layout, Layout]]:
        return list(zip(self.layouts, self.layouts[1:]))


def chain(number: int) -> Chain:
    """The chain that `number` decides."""
    choice, model = random.Random(number), [*MODELS][number % len(MODELS)]
    layers = choice.choice((2, 3, 4, 4, 5, 8) if number % 2 else (2, 4, 4, 5))
    plain, cut = [], []
    for of, layout in map(drawn, range(600)):
        if of == model and not _said(layout, "model.layers"):
            plain.append(Layout(layout.ranks, [*layout.overrides, f"model.layers={layers}"]))
        elif of == model and f"model.layers={layers}" in layout.overrides:
            cut.append(layout)
    kinds = [choice.choice((plain, cut, cut)) for _ in range(LENGTH)]
    layouts = [choice.choice(kind or plain) for kind in kinds]
    if number in MIXED:
        layouts = [
            Layout(n, [*said, f"train.precision={choice.choice(('float32', 'bfloat16'))}"]) for n, said in layouts
        ]
    return Chain(model, layouts, _jobs(choice), number in MIXED)


def world_chain(model: str) -> Chain:
    """The chain of world sizes that are not drawn."""
    layers = 7 if model == "dense" else 2
    layouts = [Layout(n, [*said, f"model.layers={layers}"]) for n, said in WORLDS[model]]
    return Chain(model, layouts, _jobs(random.Random(model)), False)


def _jobs(choice: random.Random) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = []
    for place in range(LENGTH):
        full = place < LENGTH - 1 or choice.random() < 0.6
        jobs.append(
            {
                "steps": FIRST_STEPS if place == 0 else FIRST_STEPS if place == LENGTH - 1 and full else 1,
                "full": full,
                "send": choice.choice(("broadcast", "allreduce", "none")),
                "scattered": choice.random() < 0.7,
                "beside": choice.random() < 0.4,
                "saves": place < LENGTH - 1,
            }
        )
    return jobs


def _said(layout: Layout, key: str) -> bool:
    return any(override.startswith(f"{key}=") for override in layout.overrides)


def configured(model: str, layout: Layout) -> dict[str, Any]:
    """The configuration of a layout. The balance loss is counted globally, so that it does not depend on microbatches."""
    tree = load_config(config_of(model), [*layout.overrides, *_globally(model)])
    return with_microbatches(tree, layout.ranks).model_dump(exclude_unset=True)


def _globally(model: str) -> list[str]:
    return ["moe.balance_scope=global"] if "experts" in MODELS[model] else []


@cache
def alone(model: str, layers: str, steps: int) -> Trained:
    """One process that is never disturbed."""
    tree = load_config(config_of(model), [layers, "train.micro_batch=16", *_globally(model)])
    return train_steps(tree.model_dump(exclude_unset=True), steps)


def visit(job: Job) -> Visit:
    """Called on every rank of a layout."""
    tree, model, state = _made(job.config)
    step = 0
    if job.source is None:
        state.initialize(tree.train.seed, tree.model.init_std)
    else:
        description, readers = load_state(state, job.source, model=tree.model, full=job.full, send=job.send)
        assert readers == state.groups.world.size if job.send == "none" else readers >= 1
        state.steps = description.progress["updates"] if job.full else 0
        step = description.step
    loaded = whole_state(state, everywhere=False)
    results = [_train(tree, model, state, step + i) for i in range(1, job.steps + 1)]
    saved = whole_state(state, everywhere=False)
    if job.saves:
        step += job.steps
        saver = Saver(state, scattered=job.scattered, beside=job.beside)
        full, weights = step_folder(job.run, step), weights_folder(job.run, step)
        done = saver.save(Target(full, _description(tree, state, step)), Target(weights, _description(tree, state, step, False)))
        assert done == ([] if job.beside else [full, weights])
        if job.beside:
            results.append(_train(tree, model, state, step + 1))
            assert saver.finish() == [full, weights]
    state.finish()
    return Visit(loaded, results, saved)


def _made(config: dict[str, Any]) -> tuple[RunConfig, Transformer | Staged, ModelState]:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    tree = with_microbatches(load_config(config), ranks)
    model, state = build_model(tree, torch.device("cpu"), Groups(mesh_of(tree, ranks)))
    return tree, model, state


def _train(tree: RunConfig, model: Transformer | Staged, state: ModelState, step: int) -> StepResult:
    data = state.groups.along("dp")
    return training_step(model, state, random_batch(tree, step).chunk(data.size)[data.rank], tree, step)


def _description(tree: RunConfig, state: ModelState, step: int, full: bool = True) -> Description:
    return Description(tree.model, tree.train.context, step, full, tree.train.precision, progress={"updates": state.steps})


def travel(chain: Chain, run: Path) -> None:
    """Go along a chain, and check all that is said at the top of this file."""
    layers = next(override for override in chain.layouts[0].overrides if override.startswith("model.layers="))
    right = alone(chain.model, layers, STEPS)
    saved: dict[str, Tensor] = {}
    source, step = None, 0
    for place, (layout, how) in enumerate(zip(chain.layouts, chain.jobs)):
        where = f"{layout.ranks} ranks, {list(layout.overrides)}, {how}, after {chain.layouts[place - 1]}"
        weights = weights_folder(run, step) if not how["full"] and how["beside"] else None  # of these, or of the full one
        job = Job(configured(chain.model, layout), run=run, source=weights or source, **how)
        found = run_ranks(visit, layout.ranks, job)
        if source is None:
            compare(Trained(found[0].steps[:FIRST_STEPS], found[0].saved), alone(chain.model, layers, FIRST_STEPS), where, RTOL[chain.mixed])
        else:
            _assert_loaded(found[0].loaded, saved, job, where)
        assert all(theirs.steps == found[0].steps for theirs in found), where
        steps = found[0].steps
        compare(Trained(steps, {}), Trained(right.steps[step : step + len(steps)], {}), where, RTOL[chain.mixed])
        if job.saves:
            step += job.steps
            source, saved = step_folder(run, step), found[0].saved
            assert_universal(source, saved, plain=place == 0)
            assert_universal(weights_folder(run, step), {key: saved[key] for key in saved if key.startswith("model.")})
