"""Experts of foreign models run by our kernels, with the numbers of the eager form in a plain PyTorch loop."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimus.config import load_config
from optimus.config.tree import RunConfig
from optimus.errors import UserError
from optimus.kernels.activation import activation_reference
from optimus.model.build import causal_model
from optimus.model.count import count_parameters
from optimus.model.foreign.architecture import TransformersModel
from optimus.model.foreign.experts import FusedExperts, activation_of, choose_experts, is_experts
from optimus.model.init import initialize
from optimus.parallel.dispatch.two_level import TwoLevelDispatch
from optimus.resolve.ranks import least_ranks, mesh_of
from optimus.testing import run_ranks
from optimus.testing.steps import Steps, random_batch

transformers = pytest.importorskip("transformers")

_SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "num_experts_per_tok": 2, "pad_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("GraniteMoeConfig", {"num_local_experts": 4}),
    "qwen3": ("Qwen3MoeConfig", {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32}),
    "gpt_oss": ("GptOssConfig", {"head_dim": 16, "num_local_experts": 4, "sliding_window": 8}),
}
_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "zero3": (2, {"state": {"shard": "parameters"}}),
    "tensor": (2, {"parallel": {"tensor": 2}}),
    "experts": (2, {"parallel": {"expert": 2}}),
}
_STEPS = 3


def config_of(kind: str) -> Any:
    name, more = _KINDS[kind]
    return getattr(transformers, name)(**_SIZES, **more)


def tree(kind: str, more: dict[str, Any]) -> dict[str, Any]:
    train = {
        "steps": _STEPS, "sequence_length": 16, "global_batch": 4, "micro_batch": 2, "output": "/nonexistent",
        "precision": "float32",
    }  # fmt: skip
    schedule = {"lr": 1e-3, "warmup_steps": 0, "name": "constant"}
    return {
        "model": {"transformers": config_of(kind).to_dict()}, "data": {"path": "/nonexistent"},
        "lr_schedule": schedule, **more, "train": train | more.get("train", {}),
    }  # fmt: skip


def trained(kind: str, more: dict[str, Any], per_node: int | None = None) -> list[tuple[float, float]]:
    steps = Steps(tree(kind, more), per_node)
    dispatchers = [module.expert_dispatch for module in steps.model.modules() if isinstance(module, FusedExperts)]
    assert per_node is None or all(isinstance(each, TwoLevelDispatch) for each in dispatchers)
    assert any(isinstance(module, FusedExperts) for module in steps.model.modules())
    found = [steps.train() for _ in range(_STEPS)]
    return [(each.loss, each.grad_norm) for each in found]


def eager(kind: str) -> list[tuple[float, float]]:
    """Returns (loss, gradient norm) of the steps of a plain PyTorch loop with eager experts."""
    config = load_config(tree(kind, {}))
    model = causal_model(config.model)
    initialize(model, config.train.seed, 0.02)
    net = transformers.AutoModelForCausalLM.from_config(config_of(kind), dtype=torch.float32)
    net.set_experts_implementation("eager")
    net.load_state_dict(model.author_tensors(), strict=False)
    return [*_loop(net, config)]


def _loop(net: nn.Module, config: RunConfig) -> list[tuple[float, float]]:
    given = config.optimizer
    betas = (given.betas[0], given.betas[1])
    adamw = torch.optim.AdamW(net.parameters(), 1e-3, betas, given.eps, weight_decay=given.weight_decay)
    found = []
    for step in range(1, _STEPS + 1):
        tokens_BS: Tensor = random_batch(config, step)
        loss = net(input_ids=tokens_BS, labels=tokens_BS, use_cache=False).loss
        adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), given.clip_norm or float("inf"))
        adamw.step()
        found.append((float(loss.detach()), float(norm)))
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, list[tuple[float, float]]]:
    return {kind: eager(kind) for kind in ("granite", "qwen3")}


@pytest.mark.parametrize("kind", ["granite", "qwen3"])
@pytest.mark.parametrize("layout", _LAYOUTS)
def test_losses_are_those_of_eager_experts(
    kind: str, layout: str, expected: dict[str, list[tuple[float, float]]]
) -> None:
    ranks, more = _LAYOUTS[layout]
    found = trained(kind, more) if ranks == 1 else run_ranks(trained, ranks, kind, more)[0]
    for (loss, norm), (right_loss, right_norm) in zip(found, expected[kind], strict=True):
        assert loss == pytest.approx(right_loss, rel=1e-6)
        assert norm == pytest.approx(right_norm, rel=1e-5)


@pytest.mark.in_turn(0, 2)
def test_tokens_go_once_to_each_node(expected: dict[str, list[tuple[float, float]]]) -> None:
    more = {"parallel": {"expert": 4}, "recompute": "block", "train": {"micro_batch": 1}}
    found = run_ranks(trained, 4, "qwen3", more, 2)[0]
    for (loss, norm), (right_loss, right_norm) in zip(found, expected["qwen3"], strict=True):
        assert loss == pytest.approx(right_loss, rel=1e-6)
        assert norm == pytest.approx(right_norm, rel=1e-5)


def test_grouped_products_of_transformers_need_aligned_columns() -> None:
    more = {"parallel": {"tensor": 4}}
    wide = tree("gpt_oss", more)
    wide["model"]["transformers"] |= {"num_key_value_heads": 4, "intermediate_size": 40}
    with pytest.raises(UserError, match=r"parallel\.tensor: the 40 columns of .*down_proj over 4 .*at most 2 ranks"):
        load_config(wide)
    wide["parallel"] = {"tensor": 2}
    load_config(wide)
    wide["model"]["transformers"]["intermediate_size"] = 42
    with pytest.raises(UserError, match=r"the 42 columns of .*choose another size"):
        load_config(wide | {"parallel": {}})


def _with_ignored_choices(ranks: int) -> tuple[Tensor, Tensor]:
    """Returns the output of a layer of experts, and the gradient of its tokens."""
    steps = Steps(tree("granite", {"parallel": {"expert": ranks}}))
    layer: Any = next(module for module in steps.model.modules() if isinstance(module, FusedExperts))
    assert layer.expert_count == 4
    layer.__dict__["gradients"] = {}
    x_TH = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    indices_TK = torch.tensor([[0, 3], [4, 1], [4, 4], [2, 0], [3, 5], [1, 2]])  # there are no experts 4 and 5
    y_TH = layer(x_TH, indices_TK, torch.full((6, 2), 0.5))
    (gradient_TH,) = torch.autograd.grad(y_TH.square().sum(), x_TH)
    return y_TH.detach(), gradient_TH


def test_choices_of_no_expert_add_nothing_on_any_rank() -> None:
    alone, ranks = _with_ignored_choices(1), run_ranks(_with_ignored_choices, 2, 2)
    assert not alone[0][2].any()
    for found in ranks:
        for here, right in zip(found, alone, strict=True):
            torch.testing.assert_close(here, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "parallel", "message"),
    [
        ("granite", {"expert": 3}, r"expert 3: 3 ranks do not divide the 4 experts of .*: choose a divisor of 4"),
        (
            "gpt_oss",
            {"expert": 2},
            r"expert 2: the experts of .* run by `transformers`, .*: remove it, or set .*tensor",
        ),
        (
            "granite",
            {"tensor": 4, "expert_tensor": 2},
            r"expert_tensor 2: parallel\.tensor divides each expert: remove",
        ),
    ],
)
def test_layouts_that_experts_cannot_have(kind: str, parallel: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=rf"parallel\.{message}"):
        load_config(tree(kind, {"parallel": parallel}))


@pytest.mark.parametrize(
    ("family", "billions", "active"),
    [("deepseek_v3", 671.0, 37.6), ("kimi_linear", 49.1, 3.5), ("qwen3_moe", 15.4, 1.8)],
)
def test_chosen_experts_are_active(family: str, billions: float, active: float) -> None:
    """The sizes are the makers' defaults. Only Qwen3 has router logits in its output."""
    found = count_parameters(TransformersModel(transformers=transformers.AutoConfig.for_model(family).to_dict()))
    assert [round(each / 1e9, 1) for each in found] == [billions, active]


def test_names_of_activations() -> None:
    """Every activation of `transformers` that the kernels take is the function of its name, and nearly all others differ."""
    from transformers.activations import ACT2CLS, ACT2FN

    x, known = torch.linspace(-5, 5, 101, dtype=torch.float64), set[str]()
    functions = {name: ACT2FN[name] for name in ACT2CLS} | {str(each): each for each in (F.silu, F.gelu, F.relu)}
    functions |= {"GELU": nn.GELU(), "GELU, tanh": nn.GELU("tanh")}
    for name, function in functions.items():
        if (kind := activation_of(SimpleNamespace(act_fn=function))) is not None:
            known.add(name)
            torch.testing.assert_close(function(x), activation_reference(x, kind, gated=False), rtol=1e-12, atol=1e-12)
    theirs = {"gelu", "gelu_new", "gelu_python", "gelu_pytorch_tanh", "gelu_python_tanh", "relu", "silu", "swish"}
    assert known == theirs | (functions.keys() - ACT2CLS.keys())


def test_ranks_that_experts_need() -> None:
    for parallel, ranks in (({"expert": 2}, 2), ({"expert": 2, "tensor": 2}, 4), ({"tensor": 2}, 2)):
        config = load_config(tree("granite", {"parallel": parallel}))
        assert least_ranks(config) == ranks
        assert mesh_of(config, ranks).etp == parallel.get("tensor", 1)


def test_experts_that_the_kernels_cannot_compute_run_by_grouped_mm_and_a_note_says_why() -> None:
    with torch.device("meta"):
        model = causal_model(load_config(tree("gpt_oss", {})).model)
    (note,) = model.notes
    assert note.startswith(
        "model.transformers: GptOssExperts runs by grouped_mm of `transformers`, not by our kernels: "
    )
    assert "its experts have biases" in note
    experts = [module for module in model.modules() if is_experts(module)]
    assert len(experts) == 2
    assert not any(isinstance(each, FusedExperts) for each in experts)
    assert {each.config._experts_implementation for each in experts} == {"grouped_mm"}  # type: ignore[union-attr]


def test_a_model_without_experts_has_no_notes() -> None:
    assert choose_experts(nn.ModuleList([nn.Linear(2, 2)])) == ([], ())
