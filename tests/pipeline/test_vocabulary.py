"""Embedding and output layer over all ranks of a pipeline: passes in any schedule, exact numbers, and balance."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers.drawing import short_run
from helpers.equality import Layout, assert_same_as_one_process
from optimus.comm import Groups
from optimus.config import load_config
from optimus.errors import UserError
from optimus.model import Batch
from optimus.model.head import LogitGradients, OutputHead
from optimus.model.vocabulary import Vocabulary
from optimus.parallel.vocabulary import SplitVocabulary, tokens_along
from optimus.pipeline import Costs, check, make_schedule, simulate
from optimus.pipeline.schedule import VOCABULARY, VOCABULARY_ALGORITHMS, Action, Kind, Schedule
from optimus.pipeline.vocabulary import ALGORITHMS as ALGORITHMS_OF
from optimus.pipeline.vocabulary import VocabularyLinks
from optimus.resolve.groups import run_groups
from optimus.resolve.ranks import mesh_of
from optimus.testing import run_ranks
from optimus.testing.memory import allocated
from optimus.testing.steps import build

SCHEDULES = [
    ("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 3), ("zb-h1", 1), ("zbv", 2), ("v-half", 2),
    ("v-min", 2),
]  # fmt: skip
ALGORITHMS = [*VOCABULARY_ALGORITHMS]
MODEL: dict[str, Any] = {"family": "olmo", "hidden": 16, "layers": 4, "heads": 2, "vocab": 59, "intermediate": 24}
# With this cap the logits are far from linear.
GEMMA: dict[str, Any] = {**MODEL, "family": "gemma2", "head_size": 8, "logit_cap": 0.5}
EXPERTS: dict[str, Any] = {**MODEL, "family": "olmoe", "experts": 4, "experts_per_token": 2}


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(SCHEDULES),
    ranks=st.integers(2, 5),
    microbatches=st.integers(1, 12),
    algorithm=st.sampled_from(ALGORITHMS),
)
def test_every_schedule_takes_the_passes(kind: tuple[str, int], ranks: int, microbatches: int, algorithm: int) -> None:
    """`check` accepts every schedule with its vocabulary passes, and each kind of pass runs in order of microbatches."""
    name, stages_per_rank = kind
    microbatches = max(microbatches, ranks) if name == "interleaved-1f1b" else microbatches
    schedule = make_schedule(name, ranks, microbatches, stages_per_rank, vocabulary=algorithm)
    check(schedule)
    for rank, actions in enumerate(schedule.actions):
        passes = [action for action in actions if action.kind.is_vocabulary]
        assert len(passes) == 4 * microbatches
        assert all(action.stage == rank for action in passes)
        for kind_ in VOCABULARY:
            assert [each.microbatch for each in passes if each.kind is kind_] == list(range(microbatches))


def looked_at(monkeypatch: pytest.MonkeyPatch, ranks: int) -> float:
    """Returns the calls of `input_of` per action while the passes are placed."""
    calls, input_of = 0, Schedule.input_of

    def counted(schedule: Schedule, action: Action) -> Action | None:
        nonlocal calls
        calls += 1
        return input_of(schedule, action)

    with monkeypatch.context() as patched:
        patched.setattr(Schedule, "input_of", counted)
        made = make_schedule("1f1b", ranks, 2 * ranks, vocabulary=1, transfers=False)
    return calls / sum(map(len, made.actions))


def test_each_pass_is_placed_in_the_same_time_on_few_ranks_and_on_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked_at(monkeypatch, 16) < 1.5 * looked_at(monkeypatch, 4)


@pytest.mark.parametrize("fault", ["without", "late"])
def test_broken_schedules_are_found(fault: str) -> None:
    from dataclasses import replace

    schedule = make_schedule("1f1b", 2, 4, vocabulary=1)
    first, second = schedule.actions
    loss = Action(Kind.LOSS, 0, 1)
    without = tuple(action for action in first if action != loss)
    broken = without if fault == "without" else (*without, loss)
    expected = "lacks loss" if fault == "without" else "before loss|deadlock"
    with pytest.raises(UserError, match=expected):
        check(replace(schedule, actions=(broken, second)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("name", "stages_per_rank"), SCHEDULES)
def test_the_output_layer_is_no_bottleneck(name: str, stages_per_rank: int, algorithm: int) -> None:
    """An output layer of half a stage's time adds an equal share to every rank, not all its time to the last one."""
    ranks, microbatches, head = 4, 32, 0.5
    unit = 1 / stages_per_rank
    shared = Costs(unit, unit, unit, logits=head / ranks)
    times = [unit] * (ranks * stages_per_rank - 1) + [unit + head]
    alone = Costs(times, times, times)
    spread = simulate(make_schedule(name, ranks, microbatches, stages_per_rank, vocabulary=algorithm), shared).makespan
    usual = simulate(make_schedule(name, ranks, microbatches, stages_per_rank), alone).makespan
    assert spread < 0.85 * usual
    assert spread > microbatches * (3 + 3 * head / ranks)  # the computations of each rank


@pytest.mark.parametrize(
    ("model", "ranks", "overrides"),
    [
        (MODEL, 2, ["schedule=gpipe"]),
        (EXPERTS | {"tie_embeddings": True}, 2, ["schedule=interleaved-1f1b", "stages_per_rank=2"]),
        (EXPERTS, 4, ["schedule=zbv", "stages_per_rank=2", "tensor=2"]),
        (MODEL | {"tie_embeddings": True}, 4, ["schedule=zb-h1", "tensor=[1,2]", "context=1"]),
        (EXPERTS, 4, ["pipeline=4", "warmup_factor=2"]),
        (EXPERTS, 4, ["expert=2", "context=2"]),
        (GEMMA, 2, ["schedule=v-half", "stages_per_rank=2", "vocabulary_algorithm=2"]),
        (
            EXPERTS | {"tie_embeddings": True},
            4,
            ["schedule=v-min", "stages_per_rank=2", "tensor=2", "vocabulary_algorithm=2"],
        ),
        (MODEL, 4, ["tensor=[1,2]", "vocabulary_algorithm=2"]),
        (EXPERTS, 4, ["tensor=2", "sequence=false", "schedule=zb-h1", "vocabulary_algorithm=2"]),
        (EXPERTS, 4, ["pipeline=4", "warmup_factor=2", "vocabulary_algorithm=2"]),
        (EXPERTS, 4, ["expert=2", "context=2", "schedule=v-half", "stages_per_rank=2", "vocabulary_algorithm=2"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("shard", ["none", "parameters"])
@pytest.mark.swept("shard")
def test_numbers_are_those_of_one_process(model: dict[str, Any], ranks: int, overrides: list[str], shard: str) -> None:
    keys = ["parallel.pipeline=2", "parallel.vocabulary=true", *(f"parallel.{each}" for each in overrides)]
    layout = Layout(
        ranks, [*keys, f"state.shard={shard}", "moe.balance_scope=global"][: None if "experts" in model else -1]
    )
    assert_same_as_one_process(short_run(model, context=12), [layout], 3, rtol=2e-5)


def likely_gradient(ranks: int, tensor: int, algorithm: int) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Returns (output [T, H], weight [V, H], targets, gradient of the output) in bf16 on the first rank with the last
    stage, for rows whose target's probability is close to 1."""
    overrides = [
        "parallel.pipeline=2",
        "parallel.vocabulary=true",
        f"parallel.tensor={tensor}",
        "parallel.sequence=false",
    ]
    config = load_config(short_run(MODEL, context=12), overrides[: 4 if tensor > 1 else 3])
    mesh = mesh_of(config, ranks)
    groups = Groups(mesh, planned=run_groups(config, mesh, {}, tags=True))
    parts, everyone = groups.along("tp_out"), groups.along("pp", "tp_out")
    draw = torch.Generator().manual_seed(0)
    weight_VH, x_TH = (torch.randn(rows, 16, generator=draw).bfloat16() for rows in (59, 12))
    target_T = (x_TH.double() @ weight_VH.double().T).argmax(-1)
    x_TH += 0.75 * weight_VH[target_T]
    tokens = tokens_along(groups, 59, "pp", "tp_out")
    head = OutputHead()
    head.weight = nn.Parameter(weight_VH[tokens[everyone.rank]].clone())
    head.vocabulary = SplitVocabulary(parts, groups.along("tp_in"), tokens, False, everyone)
    model: Any = SimpleNamespace(head=head, predict=head.forward, targets=lambda batch, positions_S: target_T)
    links = VocabularyLinks.along(groups, make_schedule("1f1b", 2, 1), algorithm)
    batches = [Batch(target_T[None])]
    receive_buffer = partial(torch.empty_like, x_TH)
    passes = ALGORITHMS_OF[algorithm](
        links, model, batches, torch.arange(12), lambda number: receive_buffer(), 1.0, 1.0, True
    )
    last = links.outputs.rank == links.last
    if last:
        passes.send_output(0, x_TH)
    found_TH = None
    for kind in (Kind.LOGITS, Kind.LOSS):
        passes.run(kind, 0)
        if kind is VOCABULARY_ALGORITHMS[algorithm].awaited and last:
            found_TH = passes.output_gradient(0)[-1]
    passes.finish()
    return None if found_TH is None or parts.rank else (x_TH, weight_VH, target_T, found_TH)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("ranks", "tensor"), [(2, 1), (4, 2)])
def test_gradients_of_tokens_that_are_nearly_certain(ranks: int, tensor: int, algorithm: int) -> None:
    """A small gradient is no difference of two rounded numbers, also in bf16.

    The gradient of a row is the sum over all other entries j of p_j (W_j - W_t). Logits of at most |y| have errors of
    2^-9 |y|, so a ratio of two probabilities is wrong by a factor of at most exp(2^-8 |y|). The roundings of p_j, the
    product, the rescaled sum and the sums over the shards add 2^-8 each, of which there are at most 8. The normaliser
    and its difference to the target's logit are in fp32, with errors of 2^-24 |y| each, and W_t multiplies them.
    """
    (found,) = [each for each in run_ranks(likely_gradient, ranks, ranks, tensor, algorithm) if each is not None]
    x_TH, weight_VH, target_T, found_TH = found
    logits_TV = x_TH.double() @ weight_VH.double().T
    p_TV = logits_TV.softmax(-1).scatter(1, target_T[:, None], 0.0)
    apart_TVH = weight_VH.double() - weight_VH[target_T][:, None].double()
    assert p_TV.sum(-1).min() < 2.0**-9  # the rounding of the target's row alone would be larger than the gradient
    size_T = torch.einsum("tv,tvh->th", p_TV, apart_TVH.abs()).amax(-1)
    error_T = (found_TH - torch.einsum("tv,tvh->th", p_TV, apart_TVH)).abs().amax(-1)
    largest_T = logits_TV.abs().amax(-1)
    bound_T = size_T * ((2.0**-8 * largest_T).expm1() + 8 * 2.0**-8)
    assert (error_T <= bound_T + 4 * 2.0**-24 * largest_T * weight_VH.abs().max()).all()


@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_the_output_layer_finds_gradients_of_its_input(cap: float | None, factor: float) -> None:
    """Against autograd, in float64."""
    draw = torch.Generator().manual_seed(0)
    x_TH = torch.randn(5, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    head = OutputHead()
    head.weight = nn.Parameter(torch.randn(7, 4, generator=draw, dtype=torch.float64))
    head.vocabulary, head.cap, head.factor = Vocabulary(), cap, factor
    grad_TV, row_T = torch.randn(5, 7, generator=draw, dtype=torch.float64), torch.tensor([0, 3, 6, 3, 1])
    grad_T = torch.randn(5, generator=draw, dtype=torch.float64)
    logits_TV, of_all_TH, of_rows_TH = head.forward(
        x_TH, part=True, find=lambda logits_TV: LogitGradients(grad_TV, row_T, grad_T)
    )
    plain_TV = head.forward(x_TH, part=True)
    torch.testing.assert_close(logits_TV, plain_TV)
    one_TV = torch.zeros_like(grad_TV).scatter(1, row_T[:, None], grad_T[:, None])
    for found_TH, cotangent_TV in ((of_all_TH, grad_TV), (of_rows_TH, one_TV)):
        (expected_TH,) = torch.autograd.grad(plain_TV, x_TH, cotangent_TV, retain_graph=True)
        torch.testing.assert_close(found_TH, expected_TH)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_barriers_between_the_passes_of_the_last_stage(algorithm: int) -> None:
    """Counted along the chain of waits: how often the last stage's backward pass waits for passes of all ranks."""
    schedule, kinds = make_schedule("1f1b", 4, 8, vocabulary=algorithm), []
    action: Action | None = Action(Kind.BACKWARD, schedule.stages - 1, 0)
    while action is not None and (kind := schedule.waits_for(action)[1]) is not None:
        kinds.append(kind)
        action = Action(kind, 0, 0)
    assert len(kinds) == VOCABULARY_ALGORITHMS[algorithm].barriers == {1: 2, 2: 1}[algorithm]
    # The activations of 1F1B's first stage (Yeung et al. 2024, figure 10): p + 2 microbatches, or p + 1.
    assert simulate(schedule).peak_activations[0] == 4 + {1: 2, 2: 1}[algorithm]


def parameter_bytes(config: dict[str, Any], ranks: int) -> int:
    tree = load_config(config)
    _, state = build(tree, Groups(mesh_of(tree, ranks)))
    return allocated(state.chunks)["parameters"]


def test_stages_hold_as_much() -> None:
    """Parameter bytes of the ranks differ by less than 5 % for a vocabulary larger than the blocks.

    Without vocabulary parallelism they differ by more than a factor of 5.
    """
    config = short_run(MODEL | {"vocab": 4096}, context=12)
    spread = run_ranks(parameter_bytes, 4, config | {"parallel": {"pipeline": 4, "vocabulary": True}}, 4)
    usual = run_ranks(parameter_bytes, 4, config | {"parallel": {"pipeline": 4}}, 4)
    assert max(spread) < 1.05 * min(spread)
    assert max(usual) > 5 * min(usual)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.vocabulary=true"], "parallel.vocabulary applies to a pipeline only, but parallel.pipeline is 1"),
        (
            ["parallel.pipeline=2", "parallel.vocabulary=true", "parallel.executor=message-driven"],
            "parallel.vocabulary applies to executor: scheduled only, .* remove one of them",
        ),
        (
            ["parallel.pipeline=2", "parallel.vocabulary=true", "parallel.tensor=2", "model.vocab=3"],
            r"model.vocab 3 is less than parallel.tensor x pipeline 4: every rank needs a token",
        ),
        (
            ["parallel.pipeline=2", "parallel.vocabulary_algorithm=2"],
            "parallel.vocabulary_algorithm needs parallel.vocabulary: true: set vocabulary, or remove",
        ),
        (
            ["parallel.vocabulary_algorithm=2"],
            "parallel.vocabulary_algorithm applies to a pipeline only, but parallel.pipeline is 1",
        ),
    ],
)
def test_bad_configurations_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(short_run(MODEL, context=12), overrides)
