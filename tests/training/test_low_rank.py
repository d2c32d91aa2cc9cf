"""`train.lora_rank` adds low-rank factors to frozen weights, whose zeros stay zero; checkpoints merge the factors."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import optimus
from helpers.drawing import config_of
from helpers.equality import compare, train_steps
from helpers.sweep import in_turns
from optimus.checkpoint.inspect import convert
from optimus.checkpoint.masks import all_masks
from optimus.checkpoint.reader import Reader
from optimus.checkpoint.store import load_model
from optimus.config import load_config
from optimus.errors import UserError
from optimus.kernels.gradient_buffer import TensorBuffer
from optimus.model.linear import Linear
from optimus.model.low_rank import merged
from optimus.model.parameters import Size
from optimus.observe.metrics import read_metrics
from optimus.plan.job_builder import as_configured, asked, configured
from optimus.plan.prediction import dry_run, predict
from optimus.resolve.microbatches import with_microbatches
from optimus.state.masks import unpacked_bits
from optimus.testing import run_ranks
from optimus.testing.steps import Steps

PERP = {"freeze": ["matrix", "expert", "embedding", "router"], "lora_rank": 2}
SHARDED = ["state.shard=parameters", "state.chunk=500"]


@pytest.mark.parametrize("zeros", [0.0, 0.7])
def test_gradients_are_those_of_the_definition(zeros: float) -> None:
    gradients: dict[Any, Any] = {}
    layer = Linear(Size("residual", 6), Size("stack", 2), Size("ffn", 5))
    layer.gradients = gradients
    layer.add_factors(3)
    torch.manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    layer.weight.requires_grad_(False)[torch.rand(layer.weight.shape) < zeros] = 0
    gradients |= {each: TensorBuffer(torch.ones(each.shape)) for each in (layer.lora_b, layer.lora_a)}
    x = torch.randn(4, 6, requires_grad=True)
    y, y_grad = layer(x), torch.randn(4, 10)
    y.backward(y_grad)
    b, a = (each.detach().clone().requires_grad_() for each in (layer.lora_b, layer.lora_a))
    x_again = x.detach().clone().requires_grad_()
    expected = x_again @ (layer.weight + (layer.weight != 0) * (b @ a)).flatten(0, 1).T
    expected.backward(y_grad)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x.grad, x_again.grad)
    for factor, right in ((layer.lora_b, b), (layer.lora_a, a)):
        torch.testing.assert_close(gradients[factor].grad, 1 + right.grad)
    assert layer.weight.grad is None
    assert layer.pruned is (zeros > 0)


@pytest.mark.parametrize(
    ("model", "freeze", "ranks", "overrides"),
    in_turns(
        [
            ("dense", ["matrix"], 4, ["parallel.tensor=[2,2]"]),
            ("tied dense", ["matrix", "embedding"], 4, ["parallel.tensor=2", "parallel.sequence=true", *SHARDED]),
            ("moe", ["matrix", "expert"], 4, ["parallel.tensor=2", "parallel.expert=2", "state.shard=optimizer"]),
            ("dense", ["blocks.0.*", "head"], 2, ["recompute=[block]", *SHARDED]),
            (
                "dense",
                ["embedding", "blocks.*", "head"],
                2,
                ["parallel.pipeline=2", "parallel.schedule=zb-h1", *SHARDED],
            ),
            ("moe", ["blocks.1.*"], 2, ["parallel.pipeline=2", "parallel.schedule=1f1b", "state.shard=gradients"]),
            (
                "moe",
                PERP["freeze"],
                4,
                [
                    "parallel.pipeline=2",
                    "parallel.schedule=zb-h1",
                    "model.layers=4",
                    "train.micro_batch=1",
                    *SHARDED[:1],
                    "state.chunk=2000",
                ],
            ),
        ],
        2,
        always=2,
    ),
    ids=str,
)
def test_layouts_equal_one_process(model: str, freeze: list[str], ranks: int, overrides: list[str]) -> None:
    config = config_of(model)
    config["train"] |= {"freeze": freeze, "lora_rank": 2, "global_batch": 8}
    tree = with_microbatches(load_config(config, overrides), ranks)
    layout = tree.model_dump(exclude_unset=True)
    alone = {name: section for name, section in layout.items() if name not in ("parallel", "state", "moe", "recompute")}
    right = train_steps(alone, 3)
    factors = [key for key in right.tensors if key.startswith("model.") and "lora_" in key]
    assert factors
    assert all(right.tensors[key].any() for key in factors)
    for rank, trained in enumerate(run_ranks(train_steps, ranks, layout, 3)):
        compare(trained, right, f"rank {rank}", 2e-5)


@pytest.fixture
def pruned(small_run: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Returns the configuration of a run with factors that starts from a pruned model."""
    config = copy.deepcopy(small_run)
    config["train"] |= {"output": str(tmp_path / "pruned"), "precision": "float32"}
    optimus.train(config | {"pruning": {"sparsity": 0.6, "at": 0}})
    config["train"] |= PERP | {"output": str(tmp_path / "run"), "steps": 6}
    return config | {
        "checkpoint": {"load_path": str(tmp_path / "pruned"), "every": 3, "keep": None, "weights_every": 6}
    }


def records(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder)]


@pytest.mark.in_turn(1, 3)
def test_a_run_and_what_reads_its_checkpoints(pruned: dict[str, Any], tmp_path: Path) -> None:
    run, plain = tmp_path / "run", copy.deepcopy(pruned)
    optimus.train(pruned)
    plain["train"] |= {"output": str(tmp_path / "plain")}
    optimus.train(plain, ["train.lora_rank=null"])
    # B = 0 gives the pruned model, which then becomes better than without factors.
    assert records(run)[0] == records(tmp_path / "plain")[0]
    assert records(run)[-1] < records(tmp_path / "plain")[-1]
    last, before = run / "checkpoints" / "step-00000006", load_model(tmp_path / "pruned")
    raw = Reader.open(last)
    model, masks = load_model(last), all_masks(raw)
    weights = dict(model.named_parameters())
    convert(last, tmp_path / "all.pt", to="torch")
    stored = torch.load(tmp_path / "all.pt")
    factors = [key for key in stored if key.startswith("model.") and key.endswith("lora_b")]
    names = [key.removeprefix("model.").removesuffix("lora_b") + "weight" for key in factors]
    assert sorted(names) == [f"blocks.{i}.attention.{each}.weight" for i in range(2) for each in ("out", "qkv")]
    for name in names:
        w, b, a = (stored[f"model.{name.removesuffix('weight')}{leaf}"] for leaf in ("weight", "lora_b", "lora_a"))
        assert torch.equal(w, before.get_parameter(name))
        assert torch.equal(weights[name], merged(w, b, a))
        mask = unpacked_bits(masks[f"mask.{name}"], w.shape[-1])
        assert not weights[name][~mask].any()
        assert (weights[name] != w)[mask].float().mean() > 0.9
    optimus.export(run, tmp_path / "exported")
    optimus.import_folder(tmp_path / "exported", tmp_path / "imported")
    optimus.merge([str(last), str(tmp_path / "imported")], tmp_path / "averaged")
    for path in (run / "checkpoints" / "weights-00000006", tmp_path / "imported", tmp_path / "averaged"):
        assert all(torch.equal(each, weights[name]) for name, each in load_model(path).named_parameters())
        assert all_masks(Reader.open(path)).keys() == masks.keys()
    # Merged weights compute the same: a run that starts from them continues where this one ended.
    config = copy.deepcopy(pruned)
    config["checkpoint"]["load_path"] = str(last)
    config["train"] |= {"output": str(tmp_path / "again"), "steps": 1}
    config["validation"] = [{"name": "all", "path": config["data"]["path"], "tokens": 512}]
    optimus.train(config, ["lr_schedule.lr=1e-12", "lr_schedule.min_lr=1e-12"])
    unmerged = copy.deepcopy(pruned)
    unmerged["validation"] = config["validation"]
    optimus.train(unmerged, ["train.steps=7", "lr_schedule.lr=1e-12", "lr_schedule.min_lr=1e-12"], resume=True)
    ends = [list(read_metrics(folder))[-1]["loss/all"] for folder in (tmp_path / "again", run)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-6)


@pytest.mark.in_turn(1, 3)
@pytest.mark.usefixtures("warm_ranks")
def test_resumed(pruned: dict[str, Any], tmp_path: Path) -> None:
    """A resumed run has the same bits in the same layout and close numbers in another; factors may not be dropped."""
    optimus.train(pruned)
    parted = copy.deepcopy(pruned)
    parted["train"]["output"] = str(tmp_path / "parted")
    optimus.train(parted, ["train.stop_at=3"])
    with pytest.raises(UserError, match=r"low-rank factors of 4 weights, and this run of 0: set train\.lora_rank"):
        optimus.train(parted, ["train.lora_rank=null"], resume=True)
    spread = copy.deepcopy(parted)
    optimus.train(parted, resume=True)
    assert records(tmp_path / "parted") == records(tmp_path / "run")
    a, b = (dict(load_model(tmp_path / name).named_parameters()) for name in ("parted", "run"))
    assert all(torch.equal(a[name], b[name]) for name in b)
    spread["train"]["output"] = str(tmp_path / "spread")
    optimus.train(spread, ["train.stop_at=3", "parallel.tensor=2"], ranks=2)
    optimus.train(spread, ["state.shard=parameters", "state.chunk=3000", "parallel.expert=2"], ranks=2, resume=True)
    assert records(tmp_path / "spread") == pytest.approx(records(tmp_path / "run"), rel=1e-3)
    c = dict(load_model(tmp_path / "spread").named_parameters())
    for name in b:
        assert torch.equal(c[name] == 0, b[name] == 0)


@pytest.mark.parametrize(
    ("train", "sections", "message"),
    [
        ({"lora_rank": 2}, {}, "train.freeze matches none: add matrix"),
        ({"lora_rank": 2, "freeze": ["embedding"]}, {}, "train.freeze matches none: add matrix"),
        ({"lora_rank": 0, "freeze": ["matrix"]}, {}, "train.lora_rank.*greater than 0"),
        (
            PERP,
            {"pruning": {"sparsity": 0.5, "at": 2, "targets": ["head"]}},
            "prune first, then train the factors in a new run",
        ),
        (PERP, {"optimizer": {"groups": [{"match": "factor", "name": "muon"}]}}, "muon cannot update"),
    ],
)
def test_bad_input(small_run: dict[str, Any], train: dict[str, Any], sections: dict[str, Any], message: str) -> None:
    small_run["train"] |= train
    with pytest.raises(UserError, match=message):
        optimus.train(small_run | sections)


def test_everything_but_the_factors_may_be_frozen(small_run: dict[str, Any]) -> None:
    small_run["train"] |= {"freeze": ["*"], "lora_rank": 2}
    trained = [name for name, rule in Steps(small_run).state.rules.items() if rule.trains]
    assert len(trained) == 8
    assert all("lora_" in name for name in trained)


@pytest.mark.parametrize("freeze", ["[matrix,embedding]", "[blocks.0.*,blocks.2.*]"])
def test_the_planner_counts_them(freeze: str) -> None:
    train = ["train.sequence_length=512", "train.global_batch=64", f"train.freeze={freeze}", "train.lora_rank=16"]
    shape = ["model.layers=4", "train.precision=bfloat16", "state.shard=optimizer"]
    job = as_configured(asked(configured("mula-tiny-moe", [*train, *shape], 8), "dgx-a100", 8, []))
    found, predicted = dry_run(job, 0), predict(job).memory.parts
    held = sum(found[kind] for kind in ("parameters", "gradients", "master", "moments"))
    assert sum(predicted[kind] for kind in ("parameters", "gradients", "optimizer")) == pytest.approx(held, rel=1e-3)
