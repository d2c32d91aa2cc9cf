"""Any layout loads a checkpoint of any other: in chains of random layouts, each resumes from the one before.

Every two neighbours of a chain are a pair. Each loaded state equals the saved one bit for bit, and training from it is
compared with one undisturbed process.
"""

import itertools
import json
import random
import re
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from helpers.drawing import MODELS, config_of, drawn
from helpers.equality import Layout, Trained, compare, train_steps
from helpers.sweep import in_turns
from helpers.whole import whole_state
from optimus.checkpoint.folder import DESCRIPTION, MANIFEST, METADATA, Description, step_folder, weights_folder
from optimus.checkpoint.loading import Send
from optimus.checkpoint.reader import Reader, verify
from optimus.checkpoint.saving import Saver, Target
from optimus.checkpoint.store import load_state
from optimus.comm import Groups
from optimus.config import RunConfig, load_config
from optimus.hub import export_checkpoint
from optimus.pipeline.staged import PipelineStages
from optimus.resolve.microbatches import with_microbatches
from optimus.resolve.ranks import mesh_of
from optimus.state.model_state import ModelState
from optimus.testing import run_ranks
from optimus.testing.steps import build, random_batch
from optimus.training.loss_scale import first_loss_scale
from optimus.training.step import StepResult, training_step

CHAINS = range(16)
SEED = 3074  # a seed for which the chains cover all options
LENGTH = 5  # layouts of a chain
FIRST_STEPS = 2  # steps of the first layout; every other layout trains one less
STEPS = FIRST_STEPS + LENGTH + 1  # the most steps of a chain
# Overrides without influence on checkpoints, which only cost time; or overrides that must be equal in a whole chain.
BESIDE_THE_POINT = (
    "recompute",
    "state.all_reduce_tiles",
    "state.tile",
    "optimizer.",
    "lr_schedule.",
    "train.freeze",
    "train.loss",  # and train.loss_scale
    "train.precision",
)
MIXED = {3: "bfloat16", 7: "bfloat16", 11: "float16"}  # chains in which some layouts compute in this type
RTOL = {False: 2e-5, True: 5e-2}  # relative tolerance of losses and norms, by whether the chain is mixed
WORLDS = {  # layouts of world sizes that are not drawn
    "dense": [
        Layout(7, ["parallel.pipeline=7", "parallel.schedule=1f1b", "train.micro_batch=4", "state.shard=optimizer"]),
        Layout(2, ["parallel.tensor=2", "parallel.sequence=true"]),
        Layout(
            5, ["parallel.pipeline=5", "parallel.schedule=zb-h1", "train.micro_batch=2", "parallel.vocabulary=false"]
        ),
        Layout(8, ["state.shard=parameters", "state.shard_ranks=4", "state.chunk=500"]),
        Layout(1),
    ],
    "thirds": [
        Layout(4, ["parallel.expert=2", "state.shard=gradients"]),
        Layout(3, ["parallel.tensor=3", "parallel.expert=3", "state.shard=parameters"]),
        Layout(1),
        Layout(6, ["parallel.tensor=3", "parallel.expert=6", "state.shard=optimizer", "state.shard_over=data"]),
        Layout(2, ["parallel.context=2", "state.shard=parameters"]),
    ],
}


class How(NamedTuple):
    """The work of a layout: load (but the first starts anew), train some steps, save (but the last does not)."""

    steps: int
    # The part of the checkpoint to load. "weights alone" reads a checkpoint without moments.
    take: Literal["everything", "weights", "weights alone"]
    send: Send
    scattered: bool
    beside: bool  # trains one more step during the write
    saves: bool


class Visit(NamedTuple):
    """The result of a layout, on rank 0: the loaded state, every step, and the saved state."""

    loaded: dict[str, Tensor]
    steps: list[StepResult]
    saved: dict[str, Tensor]


class Chain(NamedTuple):
    """A model with a number of layers, and the layouts that train it in turn."""

    model: str
    layouts: Sequence[Layout]
    hows: Sequence[How]
    mixed: bool

    @property
    def pairs(self) -> list[tuple[Layout, Layout]]:
        return list(zip(self.layouts, self.layouts[1:]))


def has_range(said: Sequence[str], layers: int) -> bool:
    """Returns whether a model of `layers` layers has the ranges of `parallel.layers`, which were drawn for more."""
    ends = [end for override in said for end in re.findall(r"\{layers: \d+-(\d+)", override)]
    return all(int(end) < layers for end in ends)


def chain(number: int) -> Chain:
    """Returns the random chain of this number."""
    choice, model = random.Random(SEED + number), [*MODELS][number % len(MODELS)]
    layers = choice.choice((2, 3, 4, 4, 5, 8) if number % 2 else (2, 4, 4, 5))
    plain, cut = [], []
    for of, layout in map(drawn, range(600)):
        said = [override for override in layout.overrides if not override.startswith(BESIDE_THE_POINT)]
        if (
            of == model
            and not any(override.startswith("model.layers=") for override in said)
            and has_range(said, layers)
        ):
            plain.append(layout._replace(overrides=[*said, f"model.layers={layers}"]))
        elif of == model and f"model.layers={layers}" in said:
            cut.append(layout._replace(overrides=said))
    kinds = [choice.choice((plain, cut, cut)) for _ in range(LENGTH)]
    layouts = [choice.choice(kind or plain) for kind in kinds]
    if number in MIXED:
        layouts = [
            layout._replace(
                overrides=[*layout.overrides, f"train.precision={choice.choice(('float32', MIXED[number]))}"]
            )
            for layout in layouts
        ]
    return Chain(model, layouts, _hows(choice), number in MIXED)


def world_chain(model: str) -> Chain:
    """Returns the chain of the layouts in WORLDS."""
    layers = 7 if model == "dense" else 2
    layouts = [layout._replace(overrides=[*layout.overrides, f"model.layers={layers}"]) for layout in WORLDS[model]]
    return Chain(model, layouts, _hows(random.Random(model)), False)


def _hows(choice: random.Random) -> list[How]:
    found = []
    for place in range(LENGTH):
        last = place == LENGTH - 1
        take = choice.choice(("everything", "weights", "weights alone")) if last else "everything"
        steps = FIRST_STEPS if place == 0 or (last and take == "everything") else 1
        send = choice.choice(("broadcast", "allreduce", "none"))
        found.append(How(steps, take, send, choice.random() < 0.7, choice.random() < 0.4, not last))
    return found


def configured(model: str, layout: Layout) -> dict[str, Any]:
    """Returns the configuration of a layout. A global balance loss is independent of microbatches."""
    tree = load_config(config_of(model), [*layout.overrides, *_globally(model)])
    return with_microbatches(tree, layout.ranks).model_dump(exclude_unset=True)


def _globally(model: str) -> list[str]:
    return ["moe.balance_scope=global"] if "experts" in MODELS[model] else []


@cache
def alone(model: str, layers: str, steps: int) -> Trained:
    """Trains one undisturbed process."""
    tree = load_config(config_of(model), [layers, "train.micro_batch=16", *_globally(model)])
    return train_steps(tree.model_dump(exclude_unset=True), steps)


def visit(config: dict[str, Any], how: How, run: Path, source: Path | None) -> Visit:
    """Loads, trains and saves on one rank of a layout."""
    tree, model, state = _made(config)
    step = 0
    if source is None:
        state.initialize(tree.train.seed, tree.model.init_std)
    else:
        full = how.take == "everything"
        description, readers = load_state(state, source, model=tree.model, full=full, send=how.send)
        assert readers == state.groups.world.size if how.send == "none" else readers >= 1
        state.steps = description.progress["updates"] if full else 0
        step = description.step
    loaded = whole_state(state, everywhere=False)
    results = [_train(tree, model, state, step + i) for i in range(1, how.steps + 1)]
    step += how.steps
    saved = whole_state(state, everywhere=False)
    if how.saves:
        saver = Saver(state, scattered=how.scattered, beside=how.beside)
        targets = [_target(run, tree, state, step, full) for full in (True, False)]
        done = saver.save(*targets)
        if how.beside:
            results.append(_train(tree, model, state, step + 1))
        assert done + saver.finish() == [target.folder for target in targets]
    state.finish()
    return Visit(loaded, results, saved)


def _made(config: dict[str, Any]) -> tuple[RunConfig, PipelineStages, ModelState]:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    tree = with_microbatches(load_config(config), ranks)
    model, state = build(tree, Groups(mesh_of(tree, ranks)))
    return tree, model, state


def _train(tree: RunConfig, model: PipelineStages, state: ModelState, step: int) -> StepResult:
    data = state.groups.along("dp")
    batch = random_batch(tree, step).chunk(data.size)[data.rank]
    return training_step(model, state, batch, tree, step, loss_scale=first_loss_scale(tree))


def _target(run: Path, tree: RunConfig, state: ModelState, step: int, full: bool) -> Target:
    progress = {"updates": state.steps}
    about = Description(tree.model, tree.train.sequence_length, step, full, tree.train.precision, progress=progress)
    return Target((step_folder if full else weights_folder)(run, step), about)


def travel(chain: Chain, run: Path) -> None:
    """Trains all layouts of a chain in turn, and checks every state and step."""
    layers = next(override for override in chain.layouts[0].overrides if override.startswith("model.layers="))
    rtol = RTOL[chain.mixed]
    right = alone(chain.model, layers, STEPS)
    source, step, saved = None, 0, {}
    for place, (layout, how) in enumerate(zip(chain.layouts, chain.hows)):
        where = f"{layout.ranks} ranks, {list(layout.overrides)}, {how}, after {chain.layouts[max(0, place - 1)]}"
        if how.take == "weights alone":
            source = weights_folder(run, step)
        found = run_ranks(visit, layout.ranks, configured(chain.model, layout), how, run, source)
        visited = found[0]
        if source is None:
            begun = Trained(visited.steps[:FIRST_STEPS], visited.saved)
            compare(begun, alone(chain.model, layers, FIRST_STEPS), where, rtol)
        else:
            assert_loaded(visited.loaded, saved, how, where)
        for rank, theirs in enumerate(found):
            expected = right.steps[step : step + len(theirs.steps)]
            compare(Trained(theirs.steps, {}), Trained(expected, {}), f"{where}, rank {rank}", rtol)
        if how.saves:
            step, saved = step + how.steps, visited.saved
            source = step_folder(run, step)
            assert_universal(source, saved)
            weights = {key: tensor for key, tensor in saved.items() if key.startswith("model.")}
            for precision in {*MIXED.values()}:
                if f"train.precision={precision}" in layout.overrides:
                    weights = {key: tensor.to(getattr(torch, precision)) for key, tensor in weights.items()}
            assert_universal(weights_folder(run, step), weights)
            saved = weights if chain.hows[place + 1].take == "weights alone" else saved


def assert_loaded(loaded: dict[str, Tensor], saved: dict[str, Tensor], how: How, where: str) -> None:
    """Asserts that the loaded state equals the saved one bit for bit; without saved moments they are zero."""
    assert {key.removeprefix("model.") for key in loaded if key.startswith("model.")} == {
        key.removeprefix("model.") for key in saved if key.startswith("model.")
    }
    for key, tensor in loaded.items():
        if key.startswith("model.") or how.take == "everything":
            assert torch.equal(tensor, saved[key].float()), f"{where}: {key}"
        else:
            assert not tensor.any(), f"{where}: {key}"


def assert_universal(path: Path, right: dict[str, Tensor]) -> None:
    """Asserts that every element of every tensor is stored once, every file is in the manifest, and plain DCP reads the
    saved state."""
    assert verify(path) == []
    stored = Reader.open(path).stored
    assert set(stored) == set(right)
    for key, slices in stored.items():
        times = torch.zeros(slices[0].shape)
        for slice_ in slices:
            times[tuple(slice(at, at + size) for at, size in zip(slice_.offsets, slice_.sizes))] += 1
        assert (times == 1).all(), f"{path}: {key}"
    files = {file.name for file in path.iterdir()}
    assert files == {slice_.file for slices in stored.values() for slice_ in slices} | {DESCRIPTION, METADATA, MANIFEST}
    assert set(json.loads((path / MANIFEST).read_text())["files"]) == files - {MANIFEST}
    assert_same(plain_read(path, right), right)


def plain_read(path: Path, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors as torch.distributed.checkpoint alone reads them."""
    tensors = {key: torch.full_like(tensor, torch.nan) for key, tensor in like.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(tensors, checkpoint_id=path, no_dist=True)
    return tensors


def assert_same(found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert found.keys() == right.keys()
    for key, tensor in found.items():
        assert tensor.dtype == right[key].dtype, key
        assert torch.equal(tensor, right[key]), key


@pytest.mark.parametrize("number", in_turns(CHAINS, len(CHAINS)))
def test_random_layouts(number: int, tmp_path: Path) -> None:
    travel(chain(number), tmp_path)


@pytest.mark.parametrize("model", in_turns([*WORLDS], 2))
def test_other_sizes_of_the_world(model: str, tmp_path: Path) -> None:
    travel(world_chain(model), tmp_path)


def test_the_pairs_meet_everything() -> None:
    """Each option that divides state or work is on either side of some pair, and differs between the sides of another
    pair."""
    chains = [chain(number) for number in CHAINS] + [world_chain(model) for model in WORLDS]
    pairs = [pair for each in chains for pair in each.pairs]
    assert len(pairs) >= 60
    options = {
        "parallel.tensor": ("2", "4", "[2,2]", "[1,2]"),
        "parallel.context": ("2",),
        "parallel.expert": ("2", "4", "8"),
        "parallel.expert_tensor": ("2",),
        "parallel.pipeline": ("2", "4"),
        "parallel.schedule": ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv", "v-half", "v-min"),
        "parallel.stages_per_rank": ("2",),
        "parallel.executor": ("message-driven",),
        "parallel.vocabulary": ("true",),
        "state.shard": ("none", "optimizer", "gradients", "parameters"),
        "state.shard_over": ("data",),
        "state.shard_ranks": ("2", "4"),
        "state.chunk": ("500", "2000", "100000"),
        "train.precision": ("bfloat16",),
    }
    for side in zip(*pairs):
        said = {override for layout in side for override in layout.overrides}
        assert {f"{key}={value}" for key, values in options.items() for value in values} - said == set()
    grown = [after.ranks - before.ranks for before, after in pairs]
    assert sum(change > 0 for change in grown) >= 15
    assert sum(change < 0 for change in grown) >= 15
    assert {layout.ranks for pair in pairs for layout in pair} == set(range(1, 9))
    hows = [how for each in chains for how in each.hows]
    assert {how.take for how in hows} == {"everything", "weights", "weights alone"}
    assert {(how.send, how.scattered, how.beside) for how in hows} == {
        *itertools.product(("broadcast", "allreduce", "none"), (True, False), (True, False))
    }


SAVE = How(1, "everything", "broadcast", True, False, True)


def saved_by(model: str, layout: Layout, run: Path) -> tuple[Path, dict[str, Tensor]]:
    """Returns the full checkpoint of a layout after one step, and the expected contents."""
    found = run_ranks(visit, layout.ranks, configured(model, layout), SAVE, run, None)[0]
    return step_folder(run, 1), found.saved


def _range(layers: str, kinds: str) -> str:
    return f"parallel.layers=[{{layers: {layers}, recompute: [{kinds}]}}]"


RANGES = [  # each continues from the layout before; the second stage of the pipelines begins in a range, or not
    Layout(1, [_range("0-2", "block")]),
    Layout(1),
    Layout(2, ["parallel.pipeline=2", "parallel.layers_per_stage=[1,3]", _range("0-2", "norm, attention")]),
    Layout(2, ["parallel.pipeline=2", "parallel.layers_per_stage=[3,1]", "recompute=[block]", _range("1-3", "")]),
    Layout(
        2, ["parallel.pipeline=2", "parallel.schedule=v-half", "parallel.stages_per_rank=2", _range("1-2", "block")]
    ),
    Layout(2, ["parallel.pipeline=2", "parallel.schedule=v-min", "parallel.stages_per_rank=2"]),
    Layout(1, ["recompute=[attention]", "recompute_every=2", _range("3", "block")]),
]


@pytest.mark.parametrize("model", ["moe", "dense"])
def test_ranges_of_layers_and_other_stages_change_no_bit(model: str, tmp_path: Path) -> None:
    """A run that goes on with other ranges of layers and other stages has the state of one that keeps its layout."""

    def saved(layout: Layout, steps: int, run: Path, source: Path | None) -> dict[str, Tensor]:
        same = ["model.layers=4", "train.micro_batch=4"]
        config = configured(model, layout._replace(overrides=[*same, *layout.overrides]))
        return run_ranks(visit, layout.ranks, config, SAVE._replace(steps=steps), run, source)[0].saved

    right, found, source = saved(Layout(1), len(RANGES), tmp_path / "kept", None), {}, None
    for step, layout in enumerate(RANGES, 1):
        found, source = saved(layout, 1, tmp_path / "changed", source), step_folder(tmp_path / "changed", step)
    assert_same(found, right)


def test_dcp_makes_one_file_of_it(tmp_path: Path) -> None:
    """DCP turns a checkpoint with slices that end inside rows into one file of torch.save."""
    layout = Layout(6, ["parallel.expert=3", "parallel.context=3", "state.shard=parameters", "state.chunk=2000"])
    path, right = saved_by("thirds", layout, tmp_path)
    stored = Reader.open(path).stored
    assert any(slice_.sizes[-1] < slice_.shape[-1] for slice_ in stored["adamw.v.embedding.weight"])
    dcp_to_torch_save(path, tmp_path / "one.pt")
    assert_same(torch.load(tmp_path / "one.pt", weights_only=True), right)


@pytest.mark.parametrize(
    ("model", "layout"),
    in_turns(
        [
            ("moe", Layout(4, ["parallel.tensor=2", "parallel.expert=2", "parallel.expert_tensor=2"])),
            ("tied", Layout(4, ["parallel.pipeline=2", "state.shard=optimizer", "state.chunk=500"])),
            ("dense", Layout(8, ["parallel.pipeline=2", "parallel.tensor=[2,2]", "state.shard=parameters"])),
        ],
        2,
        always=1,
    ),
    ids=["ep x tp", "pipeline with ZeRO-1, tied", "pipeline with a grid"],
)
def test_any_layout_is_exported_alike(model: str, layout: Layout, tmp_path: Path) -> None:
    """An export from any layout equals, byte for byte, that of one process with the same state."""
    path, _ = saved_by(model, layout, tmp_path / "spread")
    visit(configured(model, Layout(1)), SAVE._replace(steps=0), tmp_path / "alone", path)
    export_checkpoint(path, tmp_path / "a")
    export_checkpoint(step_folder(tmp_path / "alone", 1), tmp_path / "b")
    names = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert "model.safetensors" in names
    assert names == sorted(file.name for file in (tmp_path / "b").iterdir())
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
