"""Bytes of activations computed from shapes equal those saved and allocated, and `recompute: auto` keeps its budget."""

import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.sweep import in_turns
from optimus.comm import Groups
from optimus.config import ModelConfig, load_config
from optimus.config.sizes import size_text
from optimus.errors import UserError
from optimus.measurements import coarse
from optimus.mesh import Mesh
from optimus.model import transformer
from optimus.model.attention import AttentionPositions
from optimus.model.cache import LayerCache
from optimus.model.transformer import Block
from optimus.model.units import Unit
from optimus.parallel import module_bytes
from optimus.parallel.activations import Activations, activation_bytes
from optimus.parallel.module_bytes import ModuleSetting, block_bytes
from optimus.parallel.options import StageOptions
from optimus.parallel.recompute import Recomputation
from optimus.resolve import recompute_choice
from optimus.resolve.ranks import mesh_of
from optimus.resolve.recompute_choice import BUSY, choose_recomputation, recomputed_flops
from optimus.resolve.shapes import activation_shapes, recomputation_of
from optimus.testing import run_ranks
from optimus.testing.memory import allocated, tracking
from optimus.testing.steps import build
from optimus.training.resolving import resolve_run
from optimus.training.step import terms

DENSE: dict[str, Any] = {"family": "olmo", "hidden": 64, "layers": 4, "heads": 4, "intermediate": 192, "vocab": 256}
EXPERTS: dict[str, Any] = {**DENSE, "family": "olmoe", "intermediate": 48, "experts": 8, "experts_per_token": 2}
MICRO_BATCH, CONTEXT = 4, 256
SHAPES: dict[str, Any] = {"micro_batch": MICRO_BATCH, "context": CONTEXT, "itemsize": 4}

SETS = [["block"], [], ["norm"], ["attention"], ["FF"], ["norm", "attention"], ["norm", "FF"], ["attention", "FF"]]
SETS += [["norm", "attention", "FF"]]


def tree(model: dict[str, Any], **sections: Any) -> dict[str, Any]:
    train = {"output": "-", "steps": 1, "global_batch": 32, "micro_batch": MICRO_BATCH, "sequence_length": CONTEXT}
    train["precision"] = sections.pop("precision", "float32")
    return {"model": model, "data": {"path": "-"}, "train": train, **sections}


def settled(current: Callable[[], int]) -> int:
    """Returns the bytes alive once Gloo's threads, which free sent tensors with a delay, have freed them."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return current()
    time.sleep(0.05)
    return current()


def measured(source: dict[str, Any], ranks: int, *, splits: bool = False) -> tuple[int, Activations, Activations]:
    """Returns the bytes that autograd saves on this rank, and its activations as measured and as computed.

    Activations are the saved bytes, the peak and, with a split backward pass, the bytes that wait for its second part.
    """
    config = load_config(source)
    groups = Groups(mesh_of(config, ranks))
    model, state = build(config, groups)
    state.initialize(0, 0.02)
    tokens = torch.randint(config.model.vocab, (MICRO_BATCH, CONTEXT), generator=torch.Generator().manual_seed(0))
    own = {chunk.parameter.untyped_storage()._cdata for chunk in state.chunks}
    shown: dict[int, torch.UntypedStorage] = {}  # holds every storage, so no address is reused

    def forward() -> torch.Tensor:
        state.begin_step()
        return terms(model.model.losses(tokens)).sum()

    def show(tensor: torch.Tensor) -> torch.Tensor:
        shown[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(show, lambda tensor: tensor):
        forward().backward()  # allocates what later passes reuse
    hooked = sum(storage.nbytes() for key, storage in shown.items() if key not in own)
    shown.clear()
    found = []
    for _ in range(8 if ranks > 1 else 1):  # Gloo's threads free late where the machine is busy, never early
        with tracking() as allocations:
            loss = forward()
            alive = settled(lambda allocations=allocations: allocations.current)
            with groups.step.deferring() if splits else nullcontext([]) as deferred:
                loss.backward()
            del loss
            after = allocations.current
            while deferred:
                deferred.pop(0)()
            waiting = after - allocations.current if splits else 0
        found.append((alive, allocations.peak, waiting))
    chosen = recomputation_of(config)
    itemsize = 2 if config.train.precision == "bfloat16" else 4
    shapes = activation_shapes(config, groups.mesh, (), itemsize) | {"splits": splits}
    computed = activation_bytes(config.model, chosen, **shapes)
    return hooked, Activations(*map(min, zip(*found))), computed


def measured_all(
    sources: list[dict[str, Any]], ranks: int, splits: bool = False
) -> list[tuple[int, Activations, Activations]]:
    return [measured(source, ranks, splits=splits) for source in sources]


RANGES = [{"layers": "0-1", "recompute": ["block"]}, {"layers": 3, "recompute": ["norm", "attention"]}]


@pytest.mark.parametrize("splits", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_ranges_of_layers_are_measured(model: dict[str, Any], splits: bool) -> None:
    for kinds in ([], ["block"], ["attention"]):
        _, found, computed = measured(tree(model, recompute=kinds, parallel={"layers": RANGES}), 1, splits=splits)
        assert computed.saved == pytest.approx(found.saved, rel=0.02)
        assert computed.peak == pytest.approx(found.peak, rel=0.05)
        assert computed.waiting == pytest.approx(found.waiting, rel=0.02)


IN_ONE_PROCESS = [*product(((DENSE, "mlp"), (EXPERTS, "moe")), SETS, ("float32", "bfloat16"))]


@pytest.mark.parametrize(("made_of", "kinds", "precision"), in_turns(IN_ONE_PROCESS, always=1), ids=str)
def test_computed_is_measured(made_of: tuple[dict[str, Any], str], kinds: list[str], precision: str) -> None:
    model, feed_forward = made_of
    named = [feed_forward if kind == "FF" else kind for kind in kinds]
    for every in (1, 2) if precision == "float32" and len(kinds) in (1, 3) else (1,):
        source = tree(model, recompute=named, recompute_every=every, precision=precision)
        hooked, found, computed = measured(source, 1)
        assert computed.saved == pytest.approx(found.saved, rel=0.02)
        assert computed.saved == pytest.approx(hooked, rel=0.05, abs=2**17)  # autograd saves no rotary table
        assert computed.peak == pytest.approx(found.peak, rel=0.05)


@pytest.mark.parametrize(("made_of", "kinds", "precision"), in_turns(IN_ONE_PROCESS), ids=str)
def test_what_waits_for_the_gradients_of_weights_is_measured(
    made_of: tuple[dict[str, Any], str], kinds: list[str], precision: str
) -> None:
    """The second part of a split backward pass needs the inputs of the projections and the gradients of their outputs.

    Recomputation of the inputs changes nothing about these bytes.
    """
    model, feed_forward = made_of
    named = [feed_forward if kind == "FF" else kind for kind in kinds]
    for every in (1, 2) if len(kinds) == 1 else (1,):
        source = tree(model, recompute=named, recompute_every=every, precision=precision)
        _, found, computed = measured(source, 1, splits=True)
        assert computed.waiting == pytest.approx(found.waiting, rel=0.02)
        assert computed.peak == pytest.approx(found.peak, rel=0.05)


class Parallel(Block):
    """x + attention(norm(x)) + feed_forward(norm(x))."""

    def forward(self, x_TH: Tensor, positions: AttentionPositions, cache: LayerCache | None = None) -> Any:
        y_TH, stats = self.feed_forward(x_TH, positions.position_T)
        return x_TH + self.attend(x_TH, positions, cache) + y_TH, stats


class SharedNorm(Block):
    """x + attention(n) + feed_forward(n), where n = norm(x)."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.normalise = Unit("norm", self.mlp_norm)
        self.attend, self.feed_forward = Unit("attention", self.attention), Unit("mlp", self.mlp)

    def forward(self, x_TH: Tensor, positions: AttentionPositions, cache: LayerCache | None = None) -> Any:
        n_TH = self.normalise(x_TH)
        y_TH, stats = self.feed_forward(n_TH, positions.position_T)
        return x_TH + self.attend(n_TH, positions, cache) + y_TH, stats


@pytest.mark.parametrize("splits", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("kinds", [[], ["norm", "attention"], ["mlp"], ["block"]], ids=str)
@pytest.mark.parametrize("block", [Parallel, SharedNorm])
def test_blocks_of_other_forms(
    block: type[Block], kinds: list[str], splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor that two modules read is saved once, and units run in any order."""
    monkeypatch.setattr(transformer, "Block", block)
    # A size of no other test: measurements are cached by architecture
    vocab = 260 + [Parallel, SharedNorm].index(block)
    _, found, computed = measured(tree(DENSE | {"family": "llama", "vocab": vocab}, recompute=kinds), 1, splits=splits)
    assert computed.saved == pytest.approx(found.saved, rel=0.01)
    assert computed.peak == pytest.approx(found.peak, rel=0.02)
    assert computed.waiting == pytest.approx(found.waiting, rel=0.01)


GROUPED = {
    "shared keys": {"family": "llama", "kv_heads": 2},
    "wide heads, normed": {"family": "qwen3", "kv_heads": 2, "head_size": 32},
    "normed whole, norms behind": {"family": "olmo2", "kv_heads": 1},
}


@pytest.mark.parametrize("fields", GROUPED.values(), ids=GROUPED)
def test_heads_that_share_keys(fields: dict[str, Any]) -> None:
    for kinds in ([], ["norm", "attention"]):
        _, found, computed = measured(tree(DENSE | fields, recompute=kinds), 1)
        assert computed.saved == pytest.approx(found.saved, rel=0.01)
        assert computed.peak == pytest.approx(found.peak, rel=0.05)


OTHERS: dict[str, dict[str, Any]] = {
    "experts of their own width": EXPERTS | {"family": "qwen3_moe", "intermediate": 192, "expert_intermediate": 48},
    "dense layers, windows": DENSE | {"family": "mistral", "window": 100, "kv_heads": 2},
    "layer norms, no gate, learned positions": DENSE | {"family": "gpt2", "learned_positions": 256},
    "positions with an offset": DENSE | {"family": "opt", "learned_positions": 300},
    "norms on both sides, windows in turn": DENSE | {"family": "gemma3_text", "window": 64, "full_attention_every": 2},
    "capped scores and logits": DENSE | {"family": "gemma2", "window": 64, "score_cap": 5.0, "logit_cap": 3.0},
    "latent attention, shared experts, a dense layer": EXPERTS
    | {
        "family": "deepseek_v3",
        "latent": {"queries": 48, "keys": 32, "rotary": 8, "value": 16},
        "intermediate": 192,
        "expert_intermediate": 48,
        "shared_experts": 1,
        "dense_layers": 1,
        "expert_groups": 2,
    },
    "sinks, windows in turn, biases of experts": EXPERTS
    | {"family": "gpt_oss", "kv_heads": 2, "window": 64, "head_size": 16},
    "more experts in later layers": DENSE
    | {"family": "pr_moe", "experts_by_layer": [0, 4, 4, 8], "expert_intermediate": 48},
}


def test_norms_on_both_sides_of_experts_are_measured() -> None:
    """Norms before and after experts are measured; no family has them, but a user's own model may."""
    sizes = {
        "hidden": 32,
        "layers": 1,
        "heads": 2,
        "intermediate": 16,
        "vocab": 50,
        "experts": 4,
        "experts_per_token": 2,
    }
    config = ModelConfig.model_validate({"family": "olmoe", **sizes}).model_copy(update={"norm_place": "both"})
    setting = ModuleSetting.canonical(config, Mesh(), StageOptions(), 64, 4, 1.0)
    others, experts = (block_bytes(setting, 0, 1, experts=each) for each in (False, True))
    assert [others[place].kind for place in sorted(others)] == ["norm", "attention", "norm", "norm", "norm"]
    assert [each.kind for each in experts.values()] == ["moe"]


@pytest.mark.parametrize("model", in_turns([*OTHERS.values()], 4, always=3), ids=OTHERS)
def test_whatever_the_architecture(model: dict[str, Any]) -> None:
    feed_forward = "moe" if any(name.startswith("experts") for name in model) else "mlp"
    for kinds in ([], ["norm", feed_forward], ["attention"]):
        _, found, computed = measured(tree(model, recompute=kinds), 1)
        assert computed.saved == pytest.approx(found.saved, rel=0.01), kinds
        assert computed.peak == pytest.approx(found.peak, rel=0.01), kinds


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tp=2, cp=2), Mesh(dp=8, ep=4, etp=2)], ids=str)
@pytest.mark.parametrize("again", [False, True], ids=["once", "again"])
def test_many_sequences_follow_from_few(mesh: Mesh, again: bool) -> None:
    """Bytes of 24 sequences that follow from a few measured ones equal those measured with 24."""
    config = ModelConfig(**EXPERTS | {"hidden": 32, "intermediate": 32, "vocab": 8192})
    setting = ModuleSetting.canonical(config, mesh, StageOptions(sequence=mesh.tp > 1), CONTEXT, 2, 1.3)
    followed, direct = {}, {}
    for experts, own in ((False, setting.without_experts), (True, setting)):
        followed |= module_bytes.block_bytes(setting, 0, 24, experts=experts, again=again)
        direct |= module_bytes._block_bytes(own, 0, experts, again, 24)
    assert len(direct) == len(followed) == 4
    for place, exact in direct.items():
        assert len(followed[place].works) == 1 < len(exact.works)
        assert followed[place].saved_input == exact.saved_input
        assert (followed[place].saved, followed[place].work) == pytest.approx((exact.saved, exact.work), rel=0.01)
    head = module_bytes.end_bytes(setting, "head", 24)
    exact = module_bytes._end_bytes(setting.without_experts, "head", 24)[0, 0]
    assert (head.saved, head.work) == pytest.approx((exact.saved, exact.work), rel=0.01)


def test_half_of_the_layers() -> None:
    """A rank that has some of the blocks saves the bytes of a shorter model."""
    config, shorter = ModelConfig(**DENSE), ModelConfig(**{**DENSE, "layers": 2})
    for chosen in (Recomputation(), Recomputation(("mlp",), 2), Recomputation(("block",), 2)):
        assert activation_bytes(config, chosen, layers=range(2), **SHAPES) == activation_bytes(
            shorter, chosen, **SHAPES
        )


ONE_EACH = {**EXPERTS, "experts_per_token": 1}
SHARED = DENSE | GROUPED["shared keys"]
UNIFORM = {"force_balanced": True}


ON_RANKS: list[tuple[dict[str, Any], int, dict[str, Any]]] = [
    (DENSE, 2, {"parallel": {"tensor": 2}}),
    (DENSE, 4, {"parallel": {"tensor": [2, 2]}}),
    (DENSE, 2, {"parallel": {"context": 2}}),
    (SHARED, 2, {"parallel": {"tensor": 2}}),
    (SHARED, 2, {"parallel": {"context": 2, "context_method": "ulysses"}}),
    (EXPERTS, 2, {"parallel": {"context": 2, "context_method": "ulysses"}}),
    (EXPERTS, 2, {"parallel": {"tensor": 2, "sequence": False}}),
    (EXPERTS, 2, {"parallel": {"tensor": [1, 2]}}),
    (EXPERTS, 2, {"parallel": {"expert": 2}, "moe": {**UNIFORM, "dispatch": "allgather"}}),
    (ONE_EACH, 4, {"parallel": {"expert": 4}, "moe": UNIFORM}),
    (ONE_EACH, 4, {"parallel": {"tensor": 2, "expert": 2, "expert_tensor": 2}, "moe": UNIFORM}),
    (DENSE, 4, {"parallel": {"tensor": 4, "layers": [{"layers": "0", "tensor": 1}, {"layers": "1", "tensor": 2}]}}),
    (EXPERTS, 2, {"parallel": {"tensor": 2, "layers": [{"layers": "0", "tensor": 1}]}}),
]


@pytest.mark.parametrize(("model", "ranks", "sections"), in_turns(ON_RANKS), ids=str)
def test_computed_is_measured_on_ranks(model: dict[str, Any], ranks: int, sections: dict[str, Any]) -> None:
    """The computed bytes include cached results of collectives, but not the transient buffers of the collectives.

    The bound of the peak is therefore wider.
    """
    modules = ["norm", "attention", "moe" if "experts" in model else "mlp"]
    cases = [([], "keep"), (modules, "keep"), (modules, "repeat"), (["block"], "keep")]
    sources = [tree(model, recompute=kinds, recompute_collectives=how, **sections) for kinds, how in cases]
    for results in run_ranks(measured_all, ranks, sources, ranks):
        for case, (_, found, computed) in zip(cases, results, strict=True):
            assert computed.saved == pytest.approx(found.saved, rel=0.05), case
            assert computed.peak == pytest.approx(found.peak, rel=0.1), case


@pytest.mark.in_turn(1, 3)
def test_cached_results_are_given_up_when_a_block_is_run_again() -> None:
    """Recomputing a block frees all its cached results, also that of its last collective, before the peak is reached.

    The feed-forward layer is so narrow that the backward pass of attention has the peak.
    """
    narrow = DENSE | {"intermediate": 16}
    sources = [tree(narrow, recompute=["block"], parallel={"tensor": 2, "sequence": each}) for each in (False, True)]
    for results in run_ranks(measured_all, 2, sources, 2):
        for _, found, computed in results:
            assert computed.peak == pytest.approx(found.peak, rel=0.01)


@pytest.mark.in_turn(0, 3)
def test_a_split_backward_pass_is_measured_on_ranks() -> None:
    """The gradient that waits for the second part is also that of the residual stream, and its bytes count once."""
    cases = ["block"], ["attention"]
    sources = [tree(SHARED, recompute=kinds, parallel={"tensor": 2, "sequence": False}) for kinds in cases]
    for results in run_ranks(measured_all, 2, sources, 2, True):
        for case, (_, found, computed) in zip(cases, results, strict=True):
            assert computed.saved == pytest.approx(found.saved, rel=0.01), case
            assert computed.peak == pytest.approx(found.peak, rel=0.01), case
            assert computed.waiting == pytest.approx(found.waiting, rel=0.01), case


# ---- recompute: auto ----


def choose(config: ModelConfig, budget: int) -> tuple[Recomputation, Activations]:
    return choose_recomputation(
        config, budget, CONTEXT, lambda chosen: activation_bytes(config, chosen, load=BUSY, **SHAPES)
    )


@pytest.mark.swept
@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("share", [0.999, 0.8, 0.6, 0.5, 0.4])
def test_auto_stays_within_its_budget(model: dict[str, Any], share: float) -> None:
    """`share` is the ratio of the budget to the peak without recomputation."""
    most = activation_bytes(ModelConfig(**model), Recomputation(), **SHAPES).peak
    budget = int(share * most)
    source = tree(model, recompute="auto", recompute_budget=budget)
    chosen, _ = choose(ModelConfig(**model), budget)
    assert chosen.kinds
    _, found, _ = measured(source, 1)
    _, expected, _ = measured(tree(model, recompute=list(chosen.kinds), recompute_every=chosen.every), 1)
    assert found == expected  # the run applies the choice
    assert found.peak <= budget
    assert found.peak > 0.5 * budget  # and uses most of the budget


def test_auto_recomputes_dense_layers_and_experts() -> None:
    """A model with both kinds of layers has some budget for which both are recomputed."""
    config = ModelConfig(**OTHERS["latent attention, shared experts, a dense layer"])
    most = activation_bytes(config, Recomputation(), **SHAPES).peak
    choices = [choose(config, most * share // 20)[0].kinds for share in range(19, 6, -1)]
    assert any({"mlp", "moe"} <= set(kinds) for kinds in choices)


def test_auto_leaves_out_what_a_model_does_not_support(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules outside the known parts of a block have the kind "block", which is never one of several modules."""
    config = ModelConfig(**EXPERTS)
    costs = {"block": 1.0, "attention": 1.0, "moe": 1.0}
    monkeypatch.setattr(recompute_choice, "forward_flops", lambda *_: costs)
    monkeypatch.setattr(ModelConfig, "limits", {"segments": "", "moe": ""})
    found = list(recompute_choice._candidates(config, CONTEXT))
    assert {each.kinds for each in found} == {(), ("norm",), ("attention",), ("norm", "attention"), ("block",)}
    assert [each.every for each in found if "block" in each.kinds] == [1]


def test_auto_recomputes_more_only_for_less_memory() -> None:
    config = ModelConfig(**{**DENSE, "layers": 16})
    most = activation_bytes(config, Recomputation(), **SHAPES).peak
    budgets = [most * 11 // 10, *(most * share // 20 for share in range(19, 4, -1))]
    choices = [choose(config, budget)[0] for budget in budgets]
    flops = [recomputed_flops(config, chosen, CONTEXT) for chosen in choices]
    assert choices[0] == Recomputation()
    assert flops == sorted(flops)
    assert len(set(choices)) > 5


def test_of_the_segments_that_fit_the_one_nearest_to_the_root() -> None:
    """All segments recompute each block once, so equation 3.1 of the AxoNN dissertation decides among those that fit.

    The equation asks for the square root of the number of layers.
    """
    config = ModelConfig(**{**DENSE, "layers": 64})
    segments = [Recomputation(("block",), every) for every in range(1, 65)]
    peaks = {chosen: activation_bytes(config, chosen, **SHAPES).peak for chosen in segments}
    least = min(segments, key=peaks.__getitem__)
    assert 1 < least.every < 8  # a block saves more than its input
    found = set()
    for share in (1.02, 1.1, 1.2, 1.4):
        budget = int(share * peaks[least])
        chosen, _ = choose(config, budget)
        fitting = [segment for segment in segments if peaks[segment] * 1.01 <= budget]
        assert chosen == min(fitting, key=lambda segment: abs(segment.every - 8))
        found.add(chosen)
    assert len(found) > 2


def test_an_impossible_budget_names_the_least() -> None:
    config = ModelConfig(**DENSE)
    with pytest.raises(UserError, match=r"^recompute_budget 1,000 bytes: activations take at least ") as error:
        choose(config, 1000)
    assert "raise the budget, or lower train.micro_batch or train.sequence_length" in str(error.value)
    found = re.search(r"take at least ([\d,]+) bytes, with recompute: \[(.*?)\]", str(error.value))
    assert found is not None
    least = int(found[1].replace(",", ""))
    assert choose(config, least)[0].kinds == tuple(found[2].split(", "))
    with pytest.raises(UserError):
        choose(config, least * 99 // 100)


def test_the_default_budget_is_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default budget is nine tenths of the free memory, rounded down, that the state leaves; a note tells the user."""
    config = load_config(tree(EXPERTS, recompute="auto", tuning={"cache": None}))
    groups = Groups(mesh_of(config, 1))
    state = sum(allocated(build(config, groups)[1].chunks).values())
    most = activation_bytes(config.model, Recomputation(), **SHAPES).peak
    free = state + most
    monkeypatch.setattr("optimus.resolve.facts.free_memory", lambda _: free)
    run = resolve_run(config, torch.device("cpu"), groups)
    (counted,) = run.facts.notes
    (note,) = {str(decision) for decision in run.decisions if decision.key == "recompute"}
    assert counted == f"memory: the run counts on {size_text(coarse(free))} of the {size_text(free)} that are free"
    assert note.startswith("recompute: [")
    assert note.endswith(f"; {size_text(0.9 * (coarse(free) - state))} are available)")
