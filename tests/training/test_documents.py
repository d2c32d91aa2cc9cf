"""Documents packed into sequences have the loss and the gradients that they have alone, in every layout."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.drawing import config_of
from helpers.sweep import in_turns
from helpers.whole import whole_state
from optimus.config import load_config
from optimus.errors import UserError
from optimus.model import Batch, Transformer
from optimus.model.init import initialize
from optimus.parallel.recompute import Recomputation, Recompute
from optimus.step_context import StepContext
from optimus.testing import run_ranks
from optimus.testing.steps import Steps, random_batch
from optimus.testing.traffic import Traffic, counting
from optimus.training.step import training_step

# 16 sequences of 24: whole ones, uneven ones at whose borders no piece of a sequence begins or ends, some of one token
SEQUENCES = [[24], [5, 19], [1, 7, 1, 15], [23, 1], [8, 8, 8], [3] * 8, [10, 1, 1, 12], [1, 23]] * 2
DOCUMENT_BS = torch.stack([torch.arange(len(each)).repeat_interleave(torch.tensor(each)) for each in SEQUENCES]).int()
MASK_BS = torch.rand(16, 24, generator=torch.Generator().manual_seed(5)) < 0.7
WINDOWED = {"family": "olmo3", "layers": 4, "window": 5, "full_attention_every": 2}
GROUPED = {"family": "mistral", "kv_heads": 2, "window": 6}
LEARNED = {"family": "gpt2", "learned_positions": 24}
CAPPED = {"family": "gemma2", "head_size": 6, "query_scale": 8, "window": 5, "score_cap": 1.0, "logit_cap": 2.0}
LATENT = {
    "family": "deepseek_v3",
    "head_size": 6,
    "latent": {"queries": 12, "keys": 8, "rotary": 4, "value": 6},
    "dense_layers": 1,
    "expert_intermediate": 16,
}
SINKS = {"family": "gpt_oss", "kv_heads": 2, "head_size": 6, "window": 5}
SPARSE = {"family": "mixtral", "kv_heads": 2, "window": 7}


def run_config(model: str, *overrides: str, precision: str = "bfloat16", **more: Any) -> dict[str, Any]:
    """Returns a configuration without clipping and without router losses, which depend on the tokens of a microbatch."""
    config = config_of(model, optimizer={"clip_norm": None})
    config["model"] = config["model"] | more
    # bfloat16, which `trained` replaces by float64
    config["train"] = config["train"] | {"micro_batch": 4, "precision": precision}
    if "experts" in config["model"]:
        config["moe"] = {"balance_coefficient": 0.0, "z_coefficient": 0.0}
    return load_config(config, overrides).model_dump(exclude_unset=True)


def alone(
    model: Transformer, tokens_BS: Tensor, document_BS: Tensor, mask_BS: Tensor
) -> tuple[float, dict[str, Tensor]]:
    """Returns the loss per predicted token and the gradients by definition: in float64, document by document."""
    total, predicted = torch.zeros((), dtype=torch.float64), 0
    for tokens_S, document_S, mask_S in zip(tokens_BS, document_BS, mask_BS, strict=True):
        for number in document_S.unique():
            document, chosen = tokens_S[document_S == number], mask_S[document_S == number][1:]
            losses = F.cross_entropy(model(document[None])[0, :-1], document[1:], reduction="none")
            total = total + losses[chosen].sum()
            predicted += int(chosen.sum())
    (total / predicted).backward()
    return float(total.detach()) / predicted, {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def trained(
    config: dict[str, Any], masks: list[Tensor | None], document_BS: Tensor = DOCUMENT_BS
) -> list[tuple[float, dict[str, Tensor]]]:
    """Returns, for each mask, the loss of a step and on rank 0 the gradients, from the optimizer's first moments.

    The model computes in float64: cancellation makes float32 gradients of the norms of q and k differ by 2e-6.
    """
    found = []
    for mask_BS in masks:
        with mock.patch.dict("optimus.resolve.precision.DTYPES", bfloat16=torch.float64):
            steps = Steps(config)
        result = steps.train(mask_BS, document_BS)
        first, state = 1 - steps.config.optimizer.betas[0], whole_state(steps.state, everywhere=False)
        moments = {key.removeprefix("adamw.m."): value for key, value in state.items() if key.startswith("adamw.m.")}
        found.append((result.loss, {name: moment / first for name, moment in moments.items()}))
    return found


@pytest.mark.swept("model", "ranks")
@pytest.mark.parametrize(
    ("model", "more", "ranks", "overrides"),
    [
        ("dense", {}, 1, []),
        ("dense", WINDOWED, 1, ["recompute=[block]"]),
        ("moe", SPARSE, 1, ["recompute=[norm,attention]"]),
        ("dense", WINDOWED, 2, ["parallel.context=2"]),
        ("moe", {}, 4, ["parallel.context=4", "recompute=[attention]"]),
        ("dense", GROUPED, 2, ["parallel.context=2", "parallel.context_method=ulysses", "recompute=[block]"]),
        ("moe", {}, 2, ["parallel.expert=2", "state.shard=parameters", "moe.force_balanced=true"]),
        ("dense", GROUPED, 2, ["parallel.tensor=2"]),
        ("moe", {}, 4, ["parallel.tensor=[1,2]", "parallel.context=2"]),
        ("dense", LEARNED, 4, ["parallel.tensor=2", "parallel.context=2"]),
        ("tied dense", LEARNED, 2, ["parallel.pipeline=2", "parallel.vocabulary=true"]),
        ("dense", CAPPED, 2, ["parallel.context=2", "recompute=[norm,attention]"]),
        ("moe", LATENT, 2, ["parallel.context=2"]),
        ("dense", WINDOWED, 4, ["parallel.tensor=2", "parallel.context=2", "parallel.layers=[{layers: 0, tensor: 1}]"]),
        ("moe", LATENT, 2, ["parallel.tensor=2", "parallel.layers=[{layers: 1, tensor: 1}]"]),
        ("moe", SINKS, 2, ["parallel.context=2", "recompute=[norm,attention]"]),
        ("moe", SINKS, 2, ["parallel.context=2", "parallel.context_method=ulysses"]),
        ("dense", WINDOWED, 4, ["parallel.pipeline=2", "parallel.context=2"]),
        (
            "moe",
            {"layers": 4},
            2,
            ["parallel.pipeline=2", "parallel.schedule=interleaved-1f1b", "parallel.stages_per_rank=2"],
        ),
        ("dense", {}, 4, ["parallel.pipeline=2", "parallel.vocabulary=true", "parallel.tensor=2"]),
        ("dense", WINDOWED, 2, ["parallel.pipeline=2", "parallel.executor=message-driven", "recompute=[attention]"]),
    ],
    ids=str,
)
def test_documents_are_what_they_are_alone(model: str, more: dict[str, Any], ranks: int, overrides: list[str]) -> None:
    assert_as_alone(run_config(model, *overrides, **more), ranks, DOCUMENT_BS, [None, MASK_BS])


@pytest.mark.parametrize(
    ("model", "more", "ranks", "overrides"),
    in_turns(
        [
            ("dense", {}, 4, ["parallel.context=4"]),
            ("dense", WINDOWED | {"window": 700}, 2, ["parallel.context=2", "parallel.context_method=ulysses"]),
            ("dense", GROUPED | {"window": 700}, 2, ["parallel.tensor=2", "parallel.context=1"]),
            ("dense", {}, 2, ["parallel.pipeline=2", "parallel.vocabulary=true", "recompute=[block]"]),
            ("moe", LATENT, 2, ["parallel.expert=2", "state.shard=parameters"]),
            ("moe", {}, 4, ["parallel.tensor=[1,2]", "parallel.context=2"]),
        ],
        6,
    ),
    ids=str,
)
def test_eight_documents_of_2048_tokens(model: str, more: dict[str, Any], ranks: int, overrides: list[str]) -> None:
    """A sequence has eight documents, in every kind of layout; the second sequence also has a mask."""
    document_BS = torch.arange(8).repeat_interleave(2048).expand(2, -1).int()
    mask_BS = torch.rand(2, 8 * 2048, generator=torch.Generator().manual_seed(7)) < 0.7
    mask_BS[0] = True
    sizes = ["train.sequence_length=16384", "train.global_batch=2", "train.micro_batch=1"]
    assert_as_alone(run_config(model, *sizes, *overrides, **more), ranks, document_BS, [mask_BS])


def assert_as_alone(config: dict[str, Any], ranks: int, document_BS: Tensor, masks: list[Tensor | None]) -> None:
    tree = load_config(config)
    given = config, masks, document_BS
    results = run_ranks(trained, ranks, *given) if ranks > 1 else [trained(*given)]
    for i, mask_BS in enumerate(masks):
        one = Transformer(tree.model, tree.moe.force_balanced)
        initialize(one, tree.train.seed, tree.model.init_std)
        everything = torch.ones_like(document_BS, dtype=torch.bool) if mask_BS is None else mask_BS
        loss, gradients = alone(one.double(), random_batch(tree, 1), document_BS, everything)
        assert [result[i][0] for result in results] == pytest.approx([loss] * ranks, rel=1e-6)
        assert_same(results[0][i][1], gradients)


def assert_same(found: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
    """Checks that gradients agree within 1e-6 relative to the Frobenius norm."""
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert float((found[name] - gradient).norm() / gradient.norm()) < 1e-6, name


@pytest.mark.in_turn(0, 3)
@pytest.mark.parametrize("heads", [{}, {"family": "mistral", "kv_heads": 1, "window": 700}], ids=["dense", "windows"])
def test_eight_documents_of_2048_tokens_in_a_sequence(heads: dict[str, Any]) -> None:
    """Loss and gradient agree in float32, with and without recomputation."""
    model = load_config(run_config("dense", **({"heads": 2} | heads))).model
    tokens_BS = torch.randint(model.vocab, (8, 2048), generator=torch.Generator().manual_seed(0))
    packed = Batch(tokens_BS.view(1, -1), document_BS=torch.arange(8).repeat_interleave(2048)[None])
    step, found = StepContext(), []
    for batch, kinds in ((Batch(tokens_BS), ()), (packed, ()), (packed, ("block",))):
        one = Transformer(model)
        Recompute(Recomputation(kinds), step).arrange([one.blocks], [])
        initialize(one, 0, 0.02)
        loss = one.losses(batch).cross_entropy
        loss.backward()
        found.append(
            (float(loss.detach()), torch.cat([p.grad.flatten() for p in one.parameters() if p.grad is not None]))
        )
    (alone_loss, alone_gradient), *others = found
    for loss_found, gradient in others:
        assert loss_found == pytest.approx(alone_loss, rel=1e-6)
        assert float((gradient - alone_gradient).norm() / alone_gradient.norm()) < 1e-6


def test_documents_that_do_not_fit_are_refused_before_the_step() -> None:
    steps = Steps(config_of("dense"))
    with pytest.raises(
        UserError, match=r"`document_BS` falls from 1 to 0 at token 19 of sequence 1: .* must not decrease"
    ):
        steps.train(None, DOCUMENT_BS.flip(1))


def test_documents_within_the_learned_positions_may_lie_in_a_longer_sequence() -> None:
    steps = Steps(run_config("dense", precision="float32", **LEARNED))
    tokens_BS, document_BS = torch.arange(48)[None], torch.arange(48)[None] // 24
    losses = [
        training_step(steps.model, steps.state, batch, steps.config, 1, loss_limit=0.0).loss
        for batch in (Batch(tokens_BS, document_BS=document_BS), Batch(tokens_BS.view(2, 24)))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    with pytest.raises(UserError, match="48 tokens, but the model has only 24 learned positions"):
        training_step(steps.model, steps.state, tokens_BS, steps.config, 1)


def counted(config: dict[str, Any]) -> list[Traffic]:
    """Returns the traffic of a step without documents and of one with documents."""
    steps, found = Steps(config), []
    for document_BS in (None, DOCUMENT_BS):
        with counting() as traffic:
            steps.train(None, document_BS)
        found.append(traffic)
    return found


@pytest.mark.parametrize("overrides", [["parallel.pipeline=2"], ["parallel.context=2"], []], ids=str)
def test_no_borders_are_sent(overrides: list[str]) -> None:
    """Ranks know the documents of their own sequences, and data ranks exchange the number of predicted tokens alone."""
    data = {} if overrides else {"all_reduce": 1}
    for plain, documents in run_ranks(counted, 2, run_config("dense", *overrides, precision="float32")):
        assert documents.calls - plain.calls == data
        assert documents.bytes - plain.bytes == {name: 8 * calls for name, calls in data.items()}
