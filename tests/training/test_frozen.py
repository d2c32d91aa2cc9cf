"""`train.freeze` gives one process's numbers in every layout, and frozen values stay as they were."""

from typing import Any

import pytest
import torch

from helpers.drawing import config_of
from helpers.equality import compare, train_steps
from helpers.sweep import in_turns
from optimus.config import load_config
from optimus.errors import UserError
from optimus.model import Transformer
from optimus.model.init import initialize
from optimus.optim.frozen import Frozen
from optimus.resolve.microbatches import with_microbatches
from optimus.resolve.parameters import full_model, state_spec_of
from optimus.resolve.run import RunInputs
from optimus.testing import run_ranks

STEPS = 2
FIRST = ["embedding", "blocks.0.*"]  # leaves a first stage nothing to train
LAST = ["blocks.1.*", "head"]
SHARDED = ["state.shard=parameters", "state.chunk=500"]
PIPELINE = "parallel.pipeline=2"


def of(model: str, freeze: list[str]) -> dict[str, Any]:
    config = config_of(model)
    config["train"] = config["train"] | {"freeze": freeze, "global_batch": 8}
    return config


@pytest.mark.parametrize(
    ("model", "freeze", "ranks", "overrides"),
    in_turns(
        [
            ("moe", FIRST, 4, ["parallel.expert=2", "state.shard=optimizer"]),
            ("moe", ["expert", "vector"], 4, ["parallel.tensor=2", "parallel.expert=2", "parallel.expert_tensor=2"]),
            ("dense", LAST, 4, ["parallel.tensor=[2,2]"]),
            ("tied dense", FIRST, 4, ["parallel.tensor=2", "parallel.sequence=true", *SHARDED]),
            ("moe", LAST, 4, ["parallel.tensor=2", "recompute=[block]", "recompute_every=2", *SHARDED]),
            ("moe", FIRST, 2, ["recompute=[norm,attention,moe]", "state.prefetch=3", *SHARDED]),
            ("dense", LAST, 2, ["state.reshard_after_forward=false", *SHARDED]),
            ("dense", FIRST, 4, ["state.shard_ranks={parameters: 2, gradients: 2, optimizer: 4}", *SHARDED]),
            ("moe", FIRST, 2, [PIPELINE, "parallel.schedule=1f1b"]),
            ("moe", LAST, 4, [PIPELINE, "parallel.schedule=zb-h1", "state.shard=gradients"]),
            ("dense", FIRST, 2, [PIPELINE, "parallel.schedule=zb-h1"]),
            ("dense", ["embedding", "blocks.*"], 2, [PIPELINE, "parallel.schedule=zb-h1"]),
            ("moe", FIRST, 4, [PIPELINE, "parallel.executor=message-driven", "recompute=[block]", *SHARDED]),
            ("tied", FIRST, 2, [PIPELINE, "parallel.schedule=1f1b"]),
            ("dense", FIRST, 2, [PIPELINE, "parallel.vocabulary=true", "parallel.schedule=1f1b"]),
            ("dense", ["blocks.*", "embedding"], 2, [PIPELINE, "parallel.vocabulary=true", "parallel.schedule=zb-h1"]),
            ("dense", ["blocks.*", "head"], 2, [PIPELINE, "parallel.vocabulary=true", "parallel.schedule=zb-h1"]),
        ],
        3,
        always=2,
    ),
    ids=str,
)
def test_layouts_equal_one_process(model: str, freeze: list[str], ranks: int, overrides: list[str]) -> None:
    tree = with_microbatches(load_config(of(model, freeze), overrides), ranks)
    layout = tree.model_dump(exclude_unset=True)
    alone = {name: section for name, section in layout.items() if name not in ("parallel", "state", "moe")}
    for name in ("recompute", "recompute_every"):
        alone.pop(name, None)
    right = train_steps(alone, STEPS)
    found = run_ranks(train_steps, ranks, layout, STEPS)
    for rank, trained in enumerate(found):
        compare(trained, right, f"rank {rank}", 2e-5)
    initial = Transformer(tree.model)
    frozen = {
        name for name, rule in state_spec_of(tree, initial, RunInputs()).rules.items() if isinstance(rule, Frozen)
    }
    initialize(initial, tree.train.seed, tree.model.init_std)
    for name in frozen:
        assert torch.equal(found[0].tensors[f"model.{name}"], initial.get_parameter(name)), name
        assert f"adamw.m.{name}" not in found[0].tensors
    assert len(found[0].tensors) == 3 * len(list(initial.parameters())) - 2 * len(frozen)


@pytest.mark.parametrize(
    ("freeze", "expected"),
    [
        (["embeding"], r"train\.freeze: the model has no parameter 'embeding': did you mean 'embedding'\?"),
        (["blocks.7.*"], r"train\.freeze: the model has no parameter 'blocks\.7\.\*'"),
        (["*"], r"train\.freeze matches every parameter of the model: leave out the parameters to train"),
    ],
)
def test_what_cannot_be_frozen(freeze: list[str], expected: str) -> None:
    config = load_config(of("dense", freeze))
    with pytest.raises(UserError, match=expected):
        state_spec_of(config, full_model(config), RunInputs())
