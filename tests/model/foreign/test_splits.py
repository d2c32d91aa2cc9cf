"""Divided twins have the loss and the gradients of one process, and what is wrong with a partition shows."""

import dataclasses
import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.model_facts import configuration
from helpers.sweep import in_turns
from optimus.model.foreign import ranks
from optimus.model.foreign.calls import ModuleCall
from optimus.model.foreign.facts import ModelFacts, Split, facts_of
from optimus.model.foreign.full_norms import epsilon_of
from optimus.model.foreign.modules import NormOverAll, StagedPart, become
from optimus.model.foreign.ranks import TensorPartition, largest_difference
from optimus.model.foreign.splits import prove_units
from optimus.model.foreign.twin import build, enlarge, small, tokens_of_twin

pytest.importorskip("transformers", minversion="5.20")

ALWAYS = ["phi3", "gpt2", "stablelm", "olmo2", "deepseek_v3"]
KINDS = [
    *ALWAYS,
    *("llama", "cohere2", "granitemoe", "smollm3", "falcon_h1", "gpt_neox", "qwen3_moe", "gemma3_text", "glm4", "opt"),
    *("nemotron_h", "qwen3_next", "kimi_linear", "deepseek_v4", "gpt_oss", "longcat_flash", "lfm2", "mamba2", "bert"),
]


def divided_twin(kind: str) -> tuple[nn.Module, ModelFacts, TensorPartition, Tensor]:
    """Returns a twin with large weights, its facts and its partition, and tokens."""
    torch.set_num_threads(1)
    config = small(configuration(kind))
    facts, model = facts_of(config), build(config)
    enlarge(model)
    inside = {name: each for name, each in facts.splits.items() if name.startswith(f"{facts.blocks}.")}
    return model.double(), facts, TensorPartition(inside, facts.styles, facts.divided), tokens_of_twin(config)


@pytest.mark.parametrize("kind", in_turns(KINDS, 6, always=len(ALWAYS)))
def test_ranks_have_the_gradients_of_one_process(kind: str) -> None:
    model, facts, partition, tokens_BS = divided_twin(kind)
    assert facts.ways
    for ways in facts.ways:
        difference, where = largest_difference(model, partition, tokens_BS, ways)
        assert difference < 3e-4, where


def without(partition: TensorPartition, end: str) -> TensorPartition:
    """Returns the partition without the styles of modules whose names end so."""
    return dataclasses.replace(
        partition, styles={name: style for name, style in partition.styles.items() if not name.endswith(end)}
    )


@pytest.mark.parametrize("end", ["o_proj", "q_proj", "q_norm", "experts"])
def test_a_collective_that_is_left_out_shows(end: str) -> None:
    model, _, partition, tokens_BS = divided_twin("olmoe")
    assert largest_difference(model, partition, tokens_BS, 2)[0] < 3e-4
    assert largest_difference(model, without(partition, end), tokens_BS, 2)[0] > 1e-2


def test_a_gradient_that_is_not_summed_shows() -> None:
    model, _, partition, tokens_BS = divided_twin("qwen3")
    name = "model.layers.1.self_attn.k_norm.weight"
    assert partition.splits[name] == Split(partial=True)
    wrong = dataclasses.replace(partition, splits={**partition.splits, name: Split()})
    difference, where = largest_difference(model, wrong, tokens_BS, 2)
    assert (difference > 1e-2, where) == (True, name)


class Table(nn.Module):
    """A model of one matrix, with a parameter that one process does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.idle = nn.Parameter(torch.rand(4, 4)), nn.Parameter(torch.ones(2))

    def forward(self, input_ids: Tensor) -> Any:
        return SimpleNamespace(logits=self.weight[input_ids])


@pytest.mark.parametrize("split", [Split(0), Split(), Split(partial=True, share=True)])
def test_gradients_that_are_nan_or_of_unused_parameters_show(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens_BS = Table(), torch.tensor([[0, 1, 2, 3]])
    loss = ranks.loss_of(model, tokens_BS)
    (expected,) = torch.autograd.grad(loss, [model.weight])
    partition = TensorPartition({"weight": split}, {}, {})

    def difference(weight: Tensor, idle: Tensor | None, losses: list[Tensor]) -> tuple[float, str]:
        local = expected.chunk(2)[0] if split.dim == 0 else expected
        other = weight.chunk(2)[1] if split.dim == 0 else weight
        gradients = [{"weight": local, "idle": None}, {"weight": other, "idle": idle}]
        monkeypatch.setattr(ranks, "_run_ranks", lambda *_: (losses, gradients))
        return largest_difference(model, partition, tokens_BS, 2)

    same = [loss.detach()] * 2
    assert difference(expected, None, same)[0] == 0
    assert difference(expected * math.nan, None, same) == (math.inf, "weight")
    assert difference(expected, None, [same[0], same[0] * math.nan]) == (math.inf, "the loss")
    found, where = difference(expected, torch.ones(2), same)
    assert (found > 1, where) == (True, "idle")


def test_heads_that_a_module_counts_itself_are_divided() -> None:
    model, _, partition, tokens_BS = divided_twin("stablelm")
    assert partition.divided["model.layers.0.self_attn"] == ("num_heads", "num_key_value_heads")
    with pytest.raises(RuntimeError, match="a rank of the divided twin fails"):
        largest_difference(model, dataclasses.replace(partition, divided={}), tokens_BS, 2)


@pytest.mark.parametrize(
    ("kind", "module", "style"),
    in_turns(
        [
            ("olmo2", "self_attn.q_norm", "norm_all"),
            ("deepseek_v3", "self_attn", "sums"),
            ("qwen3_moe", "mlp.experts", "experts"),
            ("longcat_flash", "mlp.experts.identity_expert", "share"),
            ("gpt2", "attn.c_attn", "column"),
            ("opt", "fc2", "row"),
        ],
        3,
        always=3,
    ),
)
def test_styles(kind: str, module: str, style: Any) -> None:
    facts = facts_of(small(configuration(kind)))
    assert facts.styles[f"{facts.blocks}.{facts.layers - 1}.{module}"] == style


def test_numbers_of_ranks_that_do_not_divide_are_refused() -> None:
    facts = facts_of(configuration("phi3", num_key_value_heads=8))
    assert facts.refuse_ways(1) is facts.refuse_ways(4) is facts.refuse_ways(8) is None
    assert "8 heads of model.layers.0.self_attn" in str(facts.refuse_ways(16))
    assert "proved for 2" in str(dataclasses.replace(facts, ways=(2,)).refuse_ways(4))


# ---- Modules of our own ----


class Gated(nn.Module):
    """A feed-forward layer of two packed halves, with or without something between that mixes columns."""

    def __init__(self, mixes: bool = False, gate: bool = False) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(16, 48), nn.Linear(24, 16)
        self.gate = nn.Linear(16, 16) if gate else None
        self.mixes = mixes

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.both(x).chunk(2, -1)
        inner = left * torch.nn.functional.silu(right)
        y = self.down(inner.softmax(-1) if self.mixes else inner)
        return y if self.gate is None else y * self.gate(x).sigmoid()


class Own(nn.Module):
    """A block with one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


def prove(layer: nn.Module) -> Any:
    torch.manual_seed(0)
    call = ModuleCall((torch.randn(2, 5, 16).requires_grad_(),), {})
    return prove_units(nn.ModuleDict({"block": Own(layer)}), "block", {"block.layer": call}, 16)


def test_packed_halves_are_found() -> None:
    (unit,) = prove(Gated())
    assert unit.splits["block.layer.both.weight"] == Split(0, (24, 24))
    assert unit.splits["block.layer.both.bias"] == Split(0, (24, 24))
    assert unit.splits["block.layer.down.weight"] == Split(1)
    assert unit.styles == {"block.layer.both": "column", "block.layer.down": "row"}
    assert unit.ways == (2, 4)


def test_what_mixes_all_columns_is_not_divided() -> None:
    assert prove(Gated(mixes=True)) == []


def test_what_follows_the_last_product_is_outside_of_the_sum() -> None:
    (unit,) = prove(Gated(gate=True))
    assert unit.styles["block.layer.down"] == "row"
    assert "block.layer.gate" not in unit.styles
    assert math.prod(unit.ways) == 8


def test_a_single_key_head_stays_whole_with_partial_gradients() -> None:
    torch.set_num_threads(1)
    facts = facts_of(configuration("llama", num_key_value_heads=1))
    assert facts.splits["model.layers.0.self_attn.k_proj.weight"] == Split(partial=True)
    assert facts.splits["model.layers.0.self_attn.q_proj.weight"] == Split(0)
    assert facts.styles["model.layers.0.self_attn"] == "sums"
    assert facts.heads["model.layers.0.self_attn"] == 32


class Gating(nn.Module):
    """A module that a model may call by the names of its arguments, in any order."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask


def test_the_stream_is_the_first_argument_whatever_the_order_of_the_names() -> None:
    module, entered = Gating(), list[Tensor]()

    def unit(x: Tensor, call: Any) -> Any:
        entered.append(x)
        return call(x)

    host = SimpleNamespace(passing=None, running=lambda passing: nullcontext())
    become(module, StagedPart, unit=unit, host=host, outputs=0)
    x, mask = torch.rand(3), torch.zeros(3)
    for options in ({"mask": mask, "x": x}, {"x": x, "mask": mask}):
        assert torch.equal(module(**options), x * mask)
        assert entered.pop() is x


class SmallNorm(nn.Module):
    """An RMS norm with its epsilon under a name of its own."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.weight, self.layer_norm_eps = nn.Parameter(torch.ones(columns)), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.layer_norm_eps).rsqrt() * self.weight


def test_a_norm_without_weight_has_the_default_epsilon() -> None:
    bare = nn.RMSNorm(8, elementwise_affine=False)
    assert epsilon_of(bare) == epsilon_of(nn.RMSNorm(8)) == torch.finfo(torch.float32).eps


@pytest.mark.parametrize("kind", [SmallNorm, nn.RMSNorm])
def test_a_norm_over_all_ranks_has_the_authors_epsilon(kind: Any) -> None:
    torch.manual_seed(0)
    x = 1e-3 * torch.randn(3, 8)
    part = kind(4)
    part.__class__ = type("OverAll", (NormOverAll, kind), {})
    part.__dict__["host"] = SimpleNamespace(
        columns=SimpleNamespace(size=2, mean=lambda own: x.square().mean(-1, keepdim=True))
    )
    torch.testing.assert_close(part(x[:, :4]), kind(8)(x)[:, :4])
