"""A run prunes with the same masks in every layout, and keeps the masks in checkpoints, exports and resumed runs."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimus
from helpers.drawing import MODELS, config_of
from helpers.rules import state_spec
from helpers.state_groups import model_state
from helpers.sweep import in_turns
from helpers.whole import whole_state
from optimus.checkpoint.masks import all_masks
from optimus.checkpoint.reader import Reader
from optimus.checkpoint.store import load_model
from optimus.comm import Groups
from optimus.config import load_config
from optimus.config.tree import StateConfig
from optimus.errors import UserError
from optimus.mesh import Layout, Mesh
from optimus.model.init import initialize
from optimus.model.parameters import Size, declare
from optimus.observe.metrics import read_metrics
from optimus.resolve.parameters import full_model, layouts_of, targets_of
from optimus.state.masks import unpacked_bits
from optimus.state.model_state import ModelState
from optimus.state.pruning import (
    block_norms,
    kth_largest,
    magnitudes,
    prune,
    random_scores,
    unpruned_share,
    weights_of,
    weights_to_be,
)
from optimus.testing import run_ranks
from optimus.testing.steps import Steps
from optimus.training.beginning import first_weights

ITERATIVE = {"sparsity": 0.9, "at": [2, 4]}
PHASES: list[dict[str, Any]] = [
    {"steps": 3, "lr_schedule": {"lr": 2e-3}},
    {"steps": 5, "lr_schedule": {"lr": 1e-3}},
]


def changed(config: dict[str, Any], output: Path, **sections: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    config["train"] |= {"output": str(output), "precision": "float32", "steps": 8}
    config["checkpoint"] = {"every": 3, "keep": None}
    for name, section in sections.items():
        config[name] = config.get(name, {}) | section if isinstance(section, dict) else section
    return config


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder)]


def tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the weights and the boolean masks of a checkpoint."""
    reader = Reader.open(path)
    weights = dict(load_model(path).named_parameters())
    masks = {}
    for key, bits in all_masks(reader).items():
        name = key.removeprefix("mask.")
        masks[name] = unpacked_bits(bits, weights[name].shape[-1])
    return weights, masks


def check_pruned(path: Path, share: float) -> None:
    weights, masks = tensors(path)
    assert masks
    kept = sum(int(mask.sum()) for mask in masks.values())
    size = sum(mask.numel() for mask in masks.values())
    assert kept / size == pytest.approx(share, abs=1 / size)
    for name, mask in masks.items():
        assert not weights[name][~mask].any(), name
        assert weights[name][mask].count_nonzero() > 0.99 * int(mask.sum()), name


@pytest.mark.in_turn(1, 2)
@pytest.mark.usefixtures("warm_ranks")
def test_a_run_and_its_checkpoints(small_run: dict[str, Any], tmp_path: Path) -> None:
    """A run resumes between two prunings and after them, with the same bits, and with close losses in other layouts."""
    whole, parted = (changed(small_run, tmp_path / name, pruning=ITERATIVE) for name in ("whole", "parted"))
    optimus.train(whole)
    for stop in (3, 5):
        optimus.train(parted, [f"train.stop_at={stop}"], resume="auto")
    optimus.train(parted, resume=True)
    assert losses(tmp_path / "parted") == losses(tmp_path / "whole")
    paths = [tmp_path / run / "checkpoints" for run in ("whole", "parted")]
    check_pruned(paths[0] / "step-00000003", 0.1**0.5)
    check_pruned(paths[0] / "step-00000008", 0.1)
    (a, mask_a), (b, mask_b) = (tensors(path / "step-00000008") for path in paths)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert all(torch.equal(mask_a[name], mask_b[name]) for name in mask_a)
    spread = changed(small_run, tmp_path / "spread", pruning=ITERATIVE, train={"micro_batch": 2})
    sharded = ["state.shard=parameters", "state.chunk=3000", "parallel.expert=2"]
    optimus.train(spread, ["train.stop_at=3", "checkpoint.asynchronous=true", *sharded], ranks=2)
    optimus.train(spread, ["parallel.tensor=2", "state.chunk=5000", "checkpoint.broadcast=none"], ranks=2, resume=True)
    assert losses(tmp_path / "spread") == pytest.approx(losses(tmp_path / "whole"), rel=1e-3)
    check_pruned(tmp_path / "spread" / "checkpoints" / "step-00000008", 0.1)


@pytest.mark.in_turn(1, 3)
@pytest.mark.usefixtures("warm_ranks")
def test_masks_survive_export_import_and_conversion(small_run: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = changed(small_run, run, pruning={"sparsity": 0.8, "at": 0}, checkpoint={"weights_every": 4})
    optimus.train(config, ["train.precision=bfloat16"])
    weights, masks = tensors(run / "checkpoints" / "weights-00000008")
    check_pruned(run / "checkpoints" / "weights-00000008", 0.2)
    optimus.export(run, tmp_path / "exported")
    optimus.import_folder(tmp_path / "exported", tmp_path / "imported")
    _, there = tensors(tmp_path / "imported")
    check_pruned(tmp_path / "imported", 0.2)
    assert all(torch.equal(there[name], mask) for name, mask in masks.items())
    # A run that starts from the imported model is pruned; norms and the head alone are retrained (PERP).
    retrained = changed(
        small_run,
        tmp_path / "retrained",
        train={"freeze": ["matrix", "expert", "embedding", "router"]},
        checkpoint={"load_path": str(tmp_path / "imported")},
    )
    optimus.train(retrained)
    last = tmp_path / "retrained" / "checkpoints" / "step-00000008"
    check_pruned(last, 0.2)
    found, kept = tensors(last)
    assert all(torch.equal(kept[name], mask) for name, mask in masks.items())
    assert not torch.equal(found["final_norm.weight"], weights["final_norm.weight"])
    # Pruned weights stay zero without freezing. Masks beside the weights of a folder count too.
    for initial in ("imported", "exported"):
        tuned = changed(small_run, tmp_path / f"tuned {initial}", checkpoint={"load_path": str(tmp_path / initial)})
        optimus.train(tuned, ["state.shard=optimizer", "parallel.pipeline=2"], ranks=2)
        last = tmp_path / f"tuned {initial}" / "checkpoints" / "step-00000008"
        check_pruned(last, 0.2)
        assert all(torch.equal(tensors(last)[1][name], mask) for name, mask in masks.items())
        assert Reader.open(last).unpruned == pytest.approx(0.2, abs=1e-4)


@pytest.mark.parametrize("folder", [False, True])
def test_a_rule_of_matrices_cannot_go_on_with_what_is_pruned(
    small_run: dict[str, Any], tmp_path: Path, folder: bool
) -> None:
    """Muon refuses pruned matrices unless they are frozen."""
    initial = tmp_path / "first"
    optimus.train(
        changed(small_run, initial, pruning={"sparsity": 0.5, "at": 0, "targets": ["matrix"]}), ["train.steps=1"]
    )
    if folder:
        optimus.export(initial, tmp_path / "exported")
        initial = tmp_path / "exported"
    muon = changed(small_run, tmp_path / "muon", checkpoint={"load_path": str(initial)}, optimizer={"name": "muon"})
    with pytest.raises(UserError, match=r"the initial weights are pruned: muon updates blocks\.0\."):
        optimus.train(muon, check=True)
    muon["train"]["freeze"] = ["matrix"]
    optimus.train(muon, ["train.steps=1"])
    check_pruned(tmp_path / "muon" / "checkpoints" / "step-00000001", 0.5)


@pytest.mark.in_turn(0, 3)
@pytest.mark.usefixtures("warm_ranks")
def test_pruning_goes_on_from_a_pruned_checkpoint(small_run: dict[str, Any], tmp_path: Path) -> None:
    """Pruned weights stay pruned, frozen or not; other parameters are pruned in addition."""
    first = changed(small_run, tmp_path / "first", pruning={"sparsity": 0.5, "at": 0, "targets": ["matrix"]})
    optimus.train(first)
    _, before = tensors(tmp_path / "first" / "checkpoints" / "step-00000008")
    initial, pruning = {"load_path": str(tmp_path / "first")}, {"sparsity": 0.8, "at": 3, "targets": ["expert"]}
    for name, freeze in (("frozen", ["matrix"]), ("trained", [])):
        optimus.train(
            changed(small_run, tmp_path / name, train={"freeze": freeze}, checkpoint=initial, pruning=pruning),
            ["state.shard=optimizer"],
            ranks=2,
        )
        weights, masks = tensors(tmp_path / name / "checkpoints" / "step-00000008")
        assert before.keys() < masks.keys()
        assert all(torch.equal(masks[key], mask) for key, mask in before.items())
        assert all(not weights[key][~mask].any() for key, mask in masks.items())
        added = [mask for key, mask in masks.items() if key not in before]
        assert float(torch.cat([mask.flatten() for mask in added]).float().mean()) == pytest.approx(0.2, abs=1e-3)


@pytest.mark.parametrize("rewind", [0, 2, 5])
def test_rewinding(small_run: dict[str, Any], tmp_path: Path, rewind: int) -> None:
    """Unpruned weights are rewound to those of the step, with fresh moments."""
    run = tmp_path / "run"
    config = changed(
        small_run,
        run,
        pruning={"sparsity": 0.5, "at": 5, "rewind": rewind},
        checkpoint={"weights_every": rewind or 2, "every": 5},
    )
    optimus.train(config)
    weights, masks = tensors(run / "checkpoints" / "step-00000005")
    if rewind == 5:  # rewinding to the pruning step keeps the weights
        whole = changed(small_run, tmp_path / "whole", checkpoint={"every": 5})
        optimus.train(whole, ["train.stop_at=5"])
        early = dict(load_model(tmp_path / "whole").named_parameters())
    elif rewind:
        early = dict(load_model(run / "checkpoints" / "weights-00000002").named_parameters())
    else:
        fresh = full_model(load_config(config)).to_empty(device="cpu")
        initialize(fresh, 0, load_config(config).model.init_std)
        early = dict(fresh.named_parameters())
    for name, weight in weights.items():
        assert torch.equal(weight, early[name] * masks.get(name, torch.ones(()))), name
    assert Reader.open(run / "checkpoints" / "step-00000005").description.progress["updates"] == 0


@pytest.mark.in_turn(2, 3)
@pytest.mark.parametrize("kind", ["checkpoint", "folder"])
def test_rewinding_to_what_a_run_began_with(small_run: dict[str, Any], tmp_path: Path, kind: str) -> None:
    """Frozen parameters keep their values, and later steps of the other run do not matter."""
    first = changed(small_run, tmp_path / "first", checkpoint={"every": 2})
    optimus.train(first, ["train.stop_at=2"])
    early = dict(load_model(tmp_path / "first").named_parameters())
    initial = tmp_path / "first"
    if kind == "folder":
        initial = tmp_path / "exported"
        optimus.export(tmp_path / "first", initial)
    run = changed(
        small_run,
        tmp_path / "run",
        train={"freeze": ["head", "blocks.0.*"]},
        pruning={"sparsity": 0.5, "at": 5, "rewind": 0, "targets": ["blocks.1.*.weight"]},
        checkpoint={"load_path": str(initial), "every": 5},
    )
    optimus.train(run, ["train.stop_at=3"])
    optimus.train(first, ["train.stop_at=4"], resume=True)
    optimus.train(run, ["train.stop_at=5"], resume=True)
    weights, masks = tensors(tmp_path / "run" / "checkpoints" / "step-00000005")
    assert masks
    for name, weight in weights.items():
        assert torch.equal(weight, early[name] * masks.get(name, torch.ones(()))), name


def test_pruning_of_a_branch(small_run: dict[str, Any], tmp_path: Path) -> None:
    """A branch rewinds to the beginning of its trunk, and neither rewinds to nor prunes at steps of the trunk."""
    constant = {"lr_schedule": {"name": "constant"}}
    optimus.train(changed(small_run, tmp_path / "trunk", **constant, checkpoint={"every": 4}), ["train.stop_at=4"])
    told = {"lr_schedule": {"name": "constant", "branch_from": str(tmp_path / "trunk")}, "checkpoint": {"every": 6}}
    back = changed(small_run, tmp_path / "back", pruning={"sparsity": 0.5, "at": 6, "rewind": 0}, **told)
    optimus.train(back, ["train.stop_at=6"])
    weights, masks = tensors(tmp_path / "back" / "checkpoints" / "step-00000006")
    fresh = full_model(load_config(back)).to_empty(device="cpu")
    initialize(fresh, 0, load_config(back).model.init_std)
    for name, weight in fresh.named_parameters():
        assert torch.equal(weights[name], weight * masks.get(name, torch.ones(()))), name
    for number, (pruning, message) in enumerate(
        [
            (
                {"at": 6, "rewind": 2},
                r"pruning.rewind 2: the run continues from .*step-00000004 at step 4, but .* has no weights of step 2",
            ),
            ({"at": 6, "rewind": 4}, r"pruning.rewind 4: .*give a later step whose weights are saved"),
            ({"at": [2, 6]}, r"pruning.at 2: .*step-00000004, which is at step 4 and not pruned: give later steps"),
        ]
    ):
        checkpoint = told["checkpoint"] | {"weights_every": 2}
        told["checkpoint"] = checkpoint
        refused = changed(small_run, tmp_path / f"{number}", pruning={"sparsity": 0.5} | pruning, **told)
        with pytest.raises(UserError, match=message):
            optimus.train(refused, check=True)
    late = changed(small_run, tmp_path / "trunk", **constant, pruning={"sparsity": 0.5, "at": [3, 6]})
    with pytest.raises(UserError, match=r"pruning.at 3: .*is at step 4 and not pruned"):
        optimus.train(late, resume=True, check=True)
    # A trunk that was pruned in time continues.
    pruned = changed(small_run, tmp_path / "pruned", **constant, pruning={"sparsity": 0.5, "at": [2, 6]})
    optimus.train(pruned, ["train.stop_at=4"])
    told["lr_schedule"]["branch_from"] = str(tmp_path / "pruned")
    optimus.train(changed(small_run, tmp_path / "once more", pruning={"sparsity": 0.5, "at": [2, 6]}, **told))
    check_pruned(tmp_path / "once more" / "checkpoints" / "step-00000008", 0.5)


def test_early_bird_tickets_of_what_is_pruned_already(small_run: dict[str, Any], tmp_path: Path) -> None:
    half = changed(small_run, tmp_path / "half", pruning={"sparsity": 0.5, "at": 0})
    optimus.train(half, ["train.steps=2"])
    pruning = {"method": "early-bird", "sparsity": 0.8, "at": 1, "every": 1, "distance": 0.9}
    more = changed(small_run, tmp_path / "more", pruning=pruning, checkpoint={"load_path": str(tmp_path / "half")})
    optimus.train(more, ["train.stop_at=3"])
    optimus.train(more, resume=True)
    check_pruned(tmp_path / "more" / "checkpoints" / "step-00000008", 0.2)


def test_early_bird_tickets(small_run: dict[str, Any], tmp_path: Path) -> None:
    """Tickets are drawn at intervals; the run prunes after five small distances in a row."""
    run = tmp_path / "run"
    pruning = {"method": "early-bird", "sparsity": 0.5, "at": 1, "every": 1, "distance": 0.9}
    optimus.train(changed(small_run, run, pruning=pruning))
    assert not all_masks(Reader.open(run / "checkpoints" / "step-00000003"))
    check_pruned(run / "checkpoints" / "step-00000008", 0.5)


@pytest.mark.in_turn(2, 3)
@pytest.mark.usefixtures("warm_ranks")
def test_early_bird_tickets_after_a_resume(small_run: dict[str, Any], tmp_path: Path) -> None:
    """Draws continue as in an unbroken run, with the same bits; another layout finds the ticket at the same step."""
    pruning = {"method": "early-bird", "sparsity": 0.5, "at": 1, "every": 1, "distance": 0.9}
    whole, parted = (changed(small_run, tmp_path / name, pruning=pruning) for name in ("whole", "parted"))
    optimus.train(whole)
    for stop in (3, 5):
        optimus.train(parted, [f"train.stop_at={stop}", "checkpoint.asynchronous=true"], resume="auto")
    optimus.train(parted, resume=True)
    assert losses(tmp_path / "parted") == losses(tmp_path / "whole")
    (a, mask_a), (b, mask_b) = (
        tensors(tmp_path / name / "checkpoints" / "step-00000008") for name in ("whole", "parted")
    )
    assert mask_a.keys() == mask_b.keys() != set()
    assert all(torch.equal(mask_a[name], mask_b[name]) for name in mask_a)
    assert all(torch.equal(a[name], b[name]) for name in a)
    spread = changed(small_run, tmp_path / "spread", pruning=pruning)
    optimus.train(spread, ["train.stop_at=3", "parallel.tensor=2"], ranks=2)
    optimus.train(spread, ["parallel.pipeline=2", "state.shard=parameters", "checkpoint.every=1"], ranks=2, resume=True)
    readers = [Reader.open(tmp_path / "spread" / f"checkpoints/step-{step:08d}") for step in (3, 5, 6)]
    for prefix, there in (("drawn.", [True, True, False]), ("mask.", [False, False, True])):
        assert [any(key.startswith(prefix) for key in reader.stored) for reader in readers] == there


def test_early_bird_tickets_of_other_targets_after_a_resume(small_run: dict[str, Any], tmp_path: Path) -> None:
    """Parameters without an earlier draw count as changed, so the search continues."""
    pruning = {"method": "early-bird", "sparsity": 0.5, "at": 1, "every": 1, "distance": 0.9, "targets": ["matrix"]}
    run = changed(small_run, tmp_path / "run", pruning=pruning)
    optimus.train(run, ["train.stop_at=3", "checkpoint.every=1"])
    optimus.train(run, ["pruning.targets=[matrix,expert]"], resume=True)
    masks = all_masks(Reader.open(tmp_path / "run" / "checkpoints" / "step-00000008"))
    assert {"experts" in name for name in masks} == {True, False}


@pytest.mark.in_turn(0, 3)
@pytest.mark.usefixtures("warm_ranks")
def test_a_run_that_is_pruned_first_never_has_state_of_what_is_pruned(
    small_run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run starts from initial weights, a checkpoint, a pruned checkpoint or an exported folder.

    Each start gives the same masks in other layouts.
    """
    first = {"pruning": {"sparsity": 0.8, "at": 0}}
    optimus.train(changed(small_run, tmp_path / "dense"), ["train.steps=2"])
    optimus.export(tmp_path / "dense", tmp_path / "exported")
    start = tensors(tmp_path / "dense" / "checkpoints" / "step-00000002")[0]
    monkeypatch.setattr(ModelState, "prune", None)
    optimus.train(changed(small_run, tmp_path / "half", pruning={"sparsity": 0.5, "at": 0}), ["train.steps=2"])
    before = tensors(tmp_path / "half" / "checkpoints" / "step-00000002")[1]
    masks = {}
    for name, initial in (("new", None), ("goes on", "dense"), ("folder", "exported"), ("more", "half")):
        told = {"load_path": None if initial is None else str(tmp_path / initial)}
        config = changed(small_run, tmp_path / name, checkpoint=told, **first)
        optimus.train(config)
        check_pruned(tmp_path / name / "checkpoints" / "step-00000008", 0.2)
        masks[name] = tensors(tmp_path / name / "checkpoints" / "step-00000008")[1]
        other = changed(small_run, tmp_path / f"{name}, other", checkpoint=told, **first)
        optimus.train(other, ["parallel.tensor=2", "train.steps=1"], ranks=2)
        _, there = tensors(tmp_path / f"{name}, other" / "checkpoints" / "step-00000001")
        assert all(torch.equal(there[key], mask) for key, mask in masks[name].items())
    left = torch.cat([start[key][mask].abs() for key, mask in masks["goes on"].items()])
    gone = torch.cat([start[key][~mask].abs() for key, mask in masks["goes on"].items()])
    assert left.min() > gone.max()
    assert all(torch.equal(masks["folder"][key], mask) for key, mask in masks["goes on"].items())
    assert not any((masks["more"][key] & ~mask).any() for key, mask in before.items())


# ---- Thresholds ----


def scored(overrides: list[str], kind: str, share: float) -> dict[str, Any]:
    tree = load_config(config_of("moe"), ["pruning.sparsity=0.9", "pruning.at=0", "state.chunk=500", *overrides])
    made = Steps(tree.model_dump(exclude_unset=True))
    layouts = layouts_of(full_model(made.config), made.config)
    sizes = {name: math.prod(layouts[name].shape) for name in made.state.spec.unpruned}
    before = whole_state(made.state)
    score = {"random": random_scores(3), "block": block_norms}.get(kind, magnitudes)
    masks = prune(weights_of(made.state), share, sizes, score, per_tensor=kind == "layer")
    made.state.prune(masks)
    left = unpruned_share(made.state, sizes)
    return {"before": before, "after": whole_state(made.state), "left": left, "targets": list(sizes)}


LAYOUTS = [
    (1, []),
    (2, ["state.shard=parameters"]),
    (2, ["parallel.tensor=2"]),
    (2, ["parallel.pipeline=2", "parallel.schedule=1f1b"]),
    (4, ["parallel.expert=2", "state.shard=optimizer", "parallel.tensor=[1,2]"]),
]


@pytest.mark.parametrize(("ranks", "overrides"), in_turns([*LAYOUTS], 3, always=2))
def test_the_threshold_is_exact(ranks: int, overrides: list[str]) -> None:
    for found in run_ranks(scored, ranks, overrides, "global", 0.1):
        weights = torch.cat([found["before"][f"model.{name}"].flatten().abs() for name in found["targets"]])
        kept = round(0.1 * len(weights))
        threshold = weights.kthvalue(len(weights) - kept + 1).values
        for name in found["targets"]:
            before, after = (found[when][f"model.{name}"] for when in ("before", "after"))
            assert torch.equal(after, before * (before.abs() >= threshold)), name
        assert found["left"] == pytest.approx(kept / len(weights))


def tied(ranks: int) -> tuple[float, int]:
    config = config_of("tied dense") | {"model": MODELS["tied dense"] | {"layers": ranks}}
    pruning = ["pruning.sparsity=0.8", "pruning.at=0", "pruning.targets=[embedding,matrix]"]
    tree = load_config(config, [*pruning, f"parallel.pipeline={ranks}", "train.micro_batch=1"])
    made = Steps(tree.model_dump(exclude_unset=True))
    sizes = targets_of(made.config, full_model(made.config))
    made.state.prune(prune(weights_of(made.state), 0.2, sizes, magnitudes))
    whole, left = whole_state(made.state), unpruned_share(made.state, sizes)
    unpruned = sum(int(whole[f"model.{name}"].count_nonzero()) for name in sizes)
    return left, unpruned - round(0.2 * sum(sizes.values()))


@pytest.mark.parametrize("ranks", [3, 5])
def test_a_tied_embedding_counts_once(ranks: int) -> None:
    """The first and the last of several stages hold the embedding, and their number does not divide that of the ranks."""
    for left, too_many in run_ranks(tied, ranks, ranks):
        assert too_many == 0
        assert left == pytest.approx(0.2, abs=1e-4)


@pytest.mark.parametrize("kind", in_turns(["layer", "random", "block"], 2, always=1))
def test_other_scores_on_every_layout(kind: str) -> None:
    layouts = LAYOUTS if kind != "block" else LAYOUTS[:2]
    results = [run_ranks(scored, ranks, overrides, kind, 0.25)[0] for ranks, overrides in layouts]
    for name in results[0]["targets"]:
        expected = results[0]["after"][f"model.{name}"]
        if kind == "layer":
            assert expected.count_nonzero() == round(0.25 * expected.numel())
        for other in results[1:]:
            assert torch.equal(other["after"][f"model.{name}"], expected), name


@pytest.mark.parametrize("kind", ["random", "block", "layer"])
def test_what_is_pruned_already_counts_as_pruned(kind: str) -> None:
    """First half of the weights are pruned, then three fifths of the others."""
    tree = load_config(config_of("moe"), ["pruning.sparsity=0.9", "pruning.at=0"])
    made = Steps(tree.model_dump(exclude_unset=True))
    sizes = targets_of(made.config, full_model(made.config))
    made.state.prune(prune(weights_of(made.state), 0.5, sizes, random_scores(1)))
    before = made.state.masks
    score = {"random": random_scores(2), "block": block_norms, "layer": magnitudes}[kind]
    made.state.prune(prune(weights_of(made.state), 0.2, sizes, score, per_tensor=kind == "layer"))
    largest = 0 if kind != "block" else 256 / sum(sizes.values())  # whole blocks remain
    assert 0.2 <= unpruned_share(made.state, sizes) + 1e-4 <= 0.2 + largest + 2e-4
    assert all(torch.equal(bits & before[name], bits) for name, bits in made.state.masks.items())


def first_and_made(overrides: list[str]) -> list[tuple[str, bool, bool]]:
    tree = load_config(config_of("moe"), ["pruning.sparsity=0.9", "pruning.at=0", *overrides])
    made = Steps(tree.model_dump(exclude_unset=True))
    whole, names = full_model(made.config), {*made.state.spec.unpruned}
    layouts = layouts_of(whole, made.config)
    here = {name: layouts[name] for chunk in made.state.chunks for name in [slot.name for slot in chunk.plan.slots]}
    read = first_weights(made.config, None, whole)
    to_be = weights_to_be(here, made.groups, torch.device("cpu"), read, {})
    first, second = ({part.slot.name: part for part in each.parts(names)} for each in (to_be, weights_of(made.state)))
    assert first.keys() == second.keys()
    return [
        (name, torch.equal(part.weights, second[name].weights), part.counts == second[name].counts)
        for name, part in first.items()
    ]


@pytest.mark.parametrize(("ranks", "overrides"), in_turns([*LAYOUTS], 3, always=2))
def test_what_is_pruned_first_are_the_weights_that_a_run_begins_with(ranks: int, overrides: list[str]) -> None:
    found = [each for rank in run_ranks(first_and_made, ranks, overrides) for each in rank]
    assert found
    assert all(same and held for _, same, held in found), found


class Empty(nn.Module):
    """A module with a parameter that has no columns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = declare(self, "weight", Size("ffn", 20), Size("residual", 16))
        self.nothing = declare(self, "nothing", Size("ffn", 0), Size("residual", 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x @ self.weight.T, x @ self.nothing.T], dim=-1)


@pytest.mark.parametrize("per_tensor", [False, True])
def test_parameters_without_elements(per_tensor: bool) -> None:
    with torch.device("meta"):
        module = Empty()
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    layouts = {name: Layout(tuple(parameter.shape)) for name, parameter in module.named_parameters()}
    state = model_state(
        module,
        layouts,
        Groups(Mesh()),
        StateConfig(),
        spec=state_spec()._replace(unpruned=dict.fromkeys(sizes)),
        device=torch.device("cpu"),
    )
    state.initialize(0, 0.02)
    for step in range(2):
        state.begin_step()
        module(torch.ones(8, 16)).square().sum().backward()
        assert state.reduce_gradients() > 0
        state.step(1e-2, 1.0)
        if not step:
            state.prune(prune(weights_of(state), 0.5, sizes, magnitudes, per_tensor=per_tensor))
    state.finish()
    assert unpruned_share(state, sizes) == 0.5
    assert int(module.weight.count_nonzero()) == 160


def test_a_block_is_pruned_as_a_whole() -> None:
    weights = torch.randn(2, 40, 24, generator=torch.Generator().manual_seed(0))
    scores = block_norms(None, weights)  # type: ignore[arg-type]
    for expert in range(2):
        for row in range(0, 40, 16):
            for column in range(0, 24, 16):
                block = weights[expert, row : row + 16, column : column + 16]
                here = scores[expert, row : row + 16, column : column + 16]
                assert torch.allclose(here, block.square().mean().sqrt().expand_as(here))


def test_ties_and_signed_zeros() -> None:
    made = Steps(load_config(config_of("dense")).model_dump(exclude_unset=True))
    scores = torch.tensor([3.0, 2.0, 2.0, 2.0, 0.0]).abs()
    for k, expected in ((1, 3.0), (2, 2.0), (4, 2.0), (5, 0.0)):
        bits = kth_largest(made.groups.world, lambda: iter([(scores, True)]), k, torch.device("cpu"))
        assert torch.tensor([bits], dtype=torch.int32).view(torch.float32).item() == expected
    assert magnitudes(None, torch.tensor([-0.0])).view(torch.int32).item() == 0  # type: ignore[arg-type]


# ---- Refused configurations ----


@pytest.mark.parametrize(
    ("pruning", "sections", "message"),
    [
        ({"sparsity": 1.0, "at": 1}, {}, "pruning.sparsity.*less than 1"),
        ({"sparsity": 0.0, "at": 1}, {}, "pruning.sparsity.*greater than 0"),
        ({"sparsity": 0.5, "at": 8}, {}, "pruning.at 8 is not before the end of the run, step 8"),
        ({"sparsity": 0.5, "at": [4, 2]}, {}, r"at \[4, 2\]: give steps in ascending order"),
        ({"sparsity": 0.5, "at": [1, 2], "method": "early-bird"}, {}, "early-bird chooses the step"),
        ({"sparsity": 0.5, "at": 2, "rewind": 3}, {}, "rewind 3 is after the first pruning"),
        ({"sparsity": 0.5, "at": 4, "rewind": 2}, {}, "pruning.rewind 2: no checkpoint keeps the weights of this step"),
        (
            {"sparsity": 0.5, "at": 4, "targets": ["nothing"]},
            {},
            "pruning.targets: the model has no parameter 'nothing'",
        ),
        (
            {"sparsity": 0.5, "at": 8},
            {"phases": PHASES},
            "pruning.at 8 is not before the end of the run, step 8",
        ),
        ({"sparsity": 0.5, "at": 4}, {"train": {"freeze": ["matrix"]}}, "is frozen .train.freeze."),
        ({"sparsity": 0.5, "at": 4}, {"optimizer": {"name": "muon"}}, "muon updates .* and needs whole matrices"),
        (
            {"sparsity": 0.5, "at": 4, "targets": ["head"]},
            {"model": {"tie_embeddings": True}},
            "the head is tied to the embedding: name embedding",
        ),
        (
            {"sparsity": 0.5, "at": 4, "scope": "block 16x16", "targets": ["vector"]},
            {},
            "is not a matrix: leave it out of pruning.targets",
        ),
    ],
)
def test_bad_input(
    small_run: dict[str, Any], tmp_path: Path, pruning: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        optimus.train(changed(small_run, tmp_path / "run", pruning=pruning, **sections))


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize(
    ("target", "tensor", "message"),
    [("vector", 1, "is not a matrix: leave it out"), ("expert", 2, "some blocks span two")],
)
def test_blocks_that_are_not_there_are_named_before_anything_is_pruned(
    small_run: dict[str, Any], tmp_path: Path, target: str, tensor: int, message: str, at: int, check: bool
) -> None:
    """The error also comes from `--check`, and before state is made where masks are found first."""
    pruning = {"sparsity": 0.5, "at": at, "scope": "block 16x16", "targets": [target]}
    run = changed(small_run, tmp_path / "run", pruning=pruning, parallel={"tensor": tensor, "expert_tensor": tensor})
    run["model"] |= {"intermediate": 24}  # each of two ranks has 12
    with pytest.raises(UserError, match=message):
        optimus.train(run, check=check)


@pytest.mark.parametrize("at", [0, 1])
def test_blocks_of_matrices_beside_vectors_that_are_pruned_already(
    small_run: dict[str, Any], tmp_path: Path, at: int
) -> None:
    """Only targets must divide into blocks."""
    pruned = {"sparsity": 0.5, "at": 0, "targets": ["vector"], "method": "random"}
    optimus.train(changed(small_run, tmp_path / "first", pruning=pruned), ["train.steps=1"])
    blocks = {"sparsity": 0.5, "at": at, "scope": "block 16x16", "targets": ["blocks.*.attention.out.weight"]}
    run = changed(small_run, tmp_path / "run", pruning=blocks, checkpoint={"load_path": str(tmp_path / "first")})
    optimus.train(run, ["train.steps=2"])
    _, masks = tensors(tmp_path / "run" / "checkpoints" / "step-00000002")
    assert {name.rpartition(".attention.")[2] for name in masks} >= {"out.weight", "q_norm.weight"}


def test_the_steps_of_pruning_are_those_of_the_run(small_run: dict[str, Any], tmp_path: Path) -> None:
    """Pruning counts steps of the run, not those of a phase with its own learning rates."""
    run = changed(small_run, tmp_path / "run", pruning={"sparsity": 0.5, "at": 6}, phases=PHASES)
    optimus.train(run)
    check_pruned(tmp_path / "run" / "checkpoints" / "step-00000008", 0.5)


def test_a_run_of_epochs_is_pruned(small_run: dict[str, Any], tmp_path: Path) -> None:
    """The data determine the number of steps."""
    run = changed(small_run, tmp_path / "run", pruning={"sparsity": 0.5, "at": 1})
    del run["train"]["steps"]
    optimus.train(run, ["train.epochs=0.5", "train.stop_at=2"])
    check_pruned(tmp_path / "run" / "checkpoints" / "step-00000002", 0.5)
    with pytest.raises(UserError, match=r"pruning\.at 900 is not before the end of the run, step"):
        optimus.train(run, ["train.epochs=0.5", "pruning.at=900", f"train.output={tmp_path / 'late'}"], check=True)


@pytest.mark.parametrize("score", [magnitudes, block_norms, lambda slot, weights: weights.square()])
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite(bad: float, score: Any) -> None:
    """Infinities and NaNs of either sign are refused, also by scores that keep the sign."""
    made = Steps(
        load_config(config_of("dense"), ["pruning.sparsity=0.5", "pruning.at=0"]).model_dump(exclude_unset=True)
    )
    chunk = next(chunk for chunk in made.state.trained if chunk.plan.slots[0].name in made.state.spec.unpruned)
    chunk.resident["model"][0] = bad
    with pytest.raises(UserError, match=r"pruning: weights of blocks.* are not finite"):
        prune(weights_of(made.state), 0.5, dict.fromkeys(made.state.spec.unpruned, 10), score)


def test_infinite_scores_of_elements_that_were_pruned_before() -> None:
    """The elements stay pruned, although the score of finite weights can be infinite."""
    made = Steps(
        load_config(config_of("dense"), ["pruning.sparsity=0.5", "pruning.at=0"]).model_dump(exclude_unset=True)
    )
    sizes = {slot.name: slot.shape.numel() for chunk in made.state.trained for slot in chunk.plan.slots}
    sizes = {name: sizes[name] for name in made.state.spec.unpruned}
    weights = weights_of(made.state)
    first = prune(weights, 0.5, sizes, random_scores(1))
    second = prune(
        replace(weights, before=first), 0.25, sizes, lambda slot, values: random_scores(2)(slot, values) * torch.inf
    )
    assert all(bool((second[name] & ~first[name]).eq(0).all()) for name in sizes)


def not_finite_on_the_last() -> str:
    overrides = ["pruning.sparsity=0.5", "pruning.at=0", "parallel.pipeline=2", "parallel.schedule=1f1b"]
    made = Steps(load_config(config_of("dense"), overrides).model_dump(exclude_unset=True))
    if made.groups.rank == 1:
        chunk = next(chunk for chunk in made.state.trained if chunk.plan.slots[0].name in made.state.spec.unpruned)
        chunk.resident["model"][0] = torch.nan
    with pytest.raises(UserError) as caught:
        prune(weights_of(made.state), 0.5, dict.fromkeys(made.state.spec.unpruned, 10), magnitudes)
    return str(caught.value)


def test_all_ranks_end_where_one_has_weights_that_are_not_finite() -> None:
    first, second = run_ranks(not_finite_on_the_last, 2)
    assert first == second
    assert "are not finite" in first


def test_masks_of_another_checkpoint(small_run: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    optimus.train(changed(small_run, run, pruning={"sparsity": 0.5, "at": 0}))
    model = load_model(run)
    from optimus.checkpoint.store import save_model

    masks = all_masks(Reader.open(run / "checkpoints" / "step-00000008"))
    for name, parameter in model.named_parameters():
        if f"mask.{name}" in masks:
            parameter.data.add_(1.0)
    save_model(model, tmp_path / "damaged", context=32, tokenizer=None, eos_id=None, masks=masks)
    begun = changed(small_run, tmp_path / "begun", checkpoint={"load_path": str(tmp_path / "damaged")})
    with pytest.raises(UserError, match="are not zero where the checkpoint's masks prune them"):
        optimus.train(begun)
    key = next(iter(masks))
    save_model(model, tmp_path / "short", context=32, tokenizer=None, eos_id=None, masks={key: masks[key][:1]})
    begun["checkpoint"]["load_path"] = str(tmp_path / "short")
    with pytest.raises(UserError, match=f"the mask {key} of shape .* does not fit its parameter of shape "):
        optimus.train(begun)
