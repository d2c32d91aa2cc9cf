"""The expert kernels inside models of `transformers` agree with its own implementations of the experts."""

import copy
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimus
from optimus.errors import UserError
from optimus.hub import drop_in
from optimus.model.foreign import needed
from optimus.model.foreign.configuration import facts_of_text

pytest.importorskip("transformers.integrations.moe", reason="transformers 5 is not installed")
from transformers import AutoModelForCausalLM, MixtralConfig, OlmoeConfig, Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts, OlmoeSparseMoeBlock

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.3,
}
CONFIGS = {
    "olmoe": OlmoeConfig(**SIZES, intermediate_size=24, num_experts=6, num_experts_per_tok=3),
    "olmoe-norm": OlmoeConfig(**SIZES, intermediate_size=24, num_experts=6, num_experts_per_tok=3, norm_topk_prob=True),
    "qwen3": Qwen3MoeConfig(
        **SIZES, head_dim=16, moe_intermediate_size=24, num_experts=5, num_experts_per_tok=2, norm_topk_prob=False
    ),
    "qwen3-norm": Qwen3MoeConfig(
        **SIZES, head_dim=16, moe_intermediate_size=24, num_experts=5, num_experts_per_tok=2, norm_topk_prob=True
    ),
    "mixtral": MixtralConfig(**SIZES, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2),
    "mixtral-gelu": MixtralConfig(
        **SIZES, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2, hidden_act="gelu_pytorch_tanh"
    ),
}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Calls `register_experts`, and undoes the registration after the test."""
    optimus.register_experts()
    yield
    ALL_EXPERTS_FUNCTIONS._global_mapping.pop("optimus", None)


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return made(CONFIGS[request.param])


@pytest.fixture
def olmoe() -> nn.Module:
    return made(CONFIGS["olmoe"])


def made(config: Any, experts: str = "eager") -> nn.Module:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), experts_implementation=experts)


def ids(batch: int = 2, length: int = 11) -> Tensor:
    return torch.randint(1, 61, (batch, length), generator=torch.Generator().manual_seed(5))


def outcome(model: nn.Module, experts: str | None, **arguments: Any) -> dict[str, Tensor]:
    """Returns the loss, logits, balance loss, router logits of every layer and all gradients of one step."""
    if experts is not None:
        model.set_experts_implementation(experts)
    model.zero_grad()
    tokens = ids()
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    out = model(tokens, attention_mask=mask, labels=tokens, output_router_logits=True, **arguments)
    out.loss.backward()
    assert len(out.router_logits) == 2
    found = {"loss": out.loss, "logits": out.logits, "balance": out.aux_loss}
    found |= {f"router {i}": logits for i, logits in enumerate(out.router_logits)}
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert all(grad is not None and grad.any() for grad in grads.values())
    return {name: t.detach().clone() for name, t in (found | grads).items()}


def error(ours: Tensor, theirs: Tensor) -> float:
    """Returns the relative error in Frobenius norm."""
    assert ours.dtype == theirs.dtype
    ours, theirs = ours.detach(), theirs.detach()
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    assert {name: e for name in ours if (e := error(ours[name], theirs[name])) > tolerance} == {}


@pytest.mark.parametrize("rival", ["eager", "grouped_mm", "batched_mm"])
def test_equals_every_implementation_of_transformers(model: nn.Module, rival: str) -> None:
    assert_same(outcome(model, "optimus"), outcome(model, rival), 1e-5)


def test_the_kernels_are_what_runs(olmoe: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernel runs, with the model's own weights; otherwise the tests above would compare `transformers` with itself."""
    kernel, calls = drop_in.expert_mlp, []
    monkeypatch.setattr(drop_in, "expert_mlp", lambda *args, **more: calls.append(args) or kernel(*args, **more))
    outcome(olmoe, "eager")
    assert not calls
    outcome(olmoe, "optimus")
    assert len(calls) == 2
    weights = olmoe.model.layers[0].mlp.experts
    assert calls[0][3] is weights.gate_up_proj  # not a copy
    assert calls[0][4] is weights.down_proj


def test_bf16_is_as_near_to_fp32_as_transformers(model: nn.Module) -> None:
    exact = outcome(model, "eager")
    model.bfloat16()
    ours, theirs = outcome(model, "optimus"), outcome(model, "grouped_mm")
    for name in ("logits", "model.layers.1.mlp.experts.down_proj", "model.embed_tokens.weight"):
        assert ours[name].dtype == torch.bfloat16
        assert (ours[name].float() - exact[name]).norm() < 1.5 * (theirs[name].float() - exact[name]).norm()


@pytest.mark.parametrize("family", ["olmoe", "mixtral"])  # Mixtral's router gives fp32 weights beside bf16 activations
def test_one_bf16_layer(family: str) -> None:
    """One bf16 layer agrees; a whole model could differ, because a later router can turn a rounding into another expert."""
    experts = made(CONFIGS[family]).bfloat16().model.layers[0].mlp.experts
    results = {}
    for name in ("eager", "optimus"):
        experts.config._experts_implementation = name
        x_TH, indices_TK, weights_TK = layer_inputs(experts.num_experts, torch.bfloat16)
        weights_TK = weights_TK.float() if family == "mixtral" else weights_TK
        leaves = [x_TH.requires_grad_(), weights_TK.requires_grad_(), *experts.parameters()]
        y_TH = experts(x_TH, indices_TK, weights_TK)
        results[name] = [y_TH, *torch.autograd.grad(y_TH, leaves, torch.ones_like(y_TH))]
    for ours, theirs in zip(results["optimus"], results["eager"], strict=True):
        assert error(ours, theirs) < 1e-2


def layer_inputs(experts: int, dtype: torch.dtype, tokens: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    x_TH = torch.randn(tokens, 32, generator=generator).to(dtype)
    weights_TE = torch.rand(tokens, experts, generator=generator)
    weights_TK, indices_TK = weights_TE.topk(2)
    return x_TH, indices_TK, weights_TK.to(dtype)


def test_autocast_computes_what_eager_does(model: nn.Module) -> None:
    experts = model.model.layers[0].mlp.experts
    results = {}
    for name in ("eager", "optimus"):
        experts.config._experts_implementation = name
        x_TH, indices_TK, weights_TK = layer_inputs(experts.num_experts, torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            y_TH = experts(x_TH.requires_grad_(), indices_TK, weights_TK.requires_grad_())
        leaves = [x_TH, weights_TK, *experts.parameters()]
        results[name] = [y_TH, *torch.autograd.grad(y_TH, leaves, torch.ones_like(y_TH))]
    for ours, theirs in zip(results["optimus"], results["eager"], strict=True):
        assert ours.dtype == torch.float32
        assert error(ours, theirs) < 1e-2
    in_fp32 = experts(*layer_inputs(experts.num_experts, torch.float32))
    assert error(results["optimus"][0], in_fp32) > 1e-4  # the layer really computed in bf16


def test_a_training_step_under_autocast(olmoe: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = outcome(olmoe, "optimus"), outcome(olmoe, "eager")
    assert abs(ours["loss"] - theirs["loss"]) < 0.02 * theirs["loss"]


def test_activations_in_another_type_than_the_weights(olmoe: nn.Module) -> None:
    """Products have the type of the weights and results that of the activations, as with `grouped_mm`."""
    experts = olmoe.bfloat16().model.layers[0].mlp.experts
    inputs = layer_inputs(6, torch.float32)
    results = []
    for name in ("optimus", "grouped_mm"):
        experts.config._experts_implementation = name
        results.append(experts(*inputs))
    assert error(*results) < 1e-2


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(olmoe: nn.Module, reentrant: bool) -> None:
    """Gradient checkpointing gives the results of the eager experts. Its reentrant form gives the balance loss no
    gradient with either."""
    olmoe.gradient_checkpointing_enable({"use_reentrant": reentrant})
    olmoe.enable_input_require_grads()
    olmoe.train()
    ours, theirs = (outcome(olmoe, experts, use_cache=False) for experts in ("optimus", "eager"))
    assert_same(ours, theirs, 1e-5)


def test_generates_the_same_text(model: nn.Module) -> None:
    prompt, texts = ids(length=4), []
    for experts in ("eager", "optimus"):
        model.set_experts_implementation(experts)
        texts.append(model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False))
    assert texts[0].shape == (2, 16)
    assert torch.equal(*texts)


def test_the_compiler_goes_around_the_layer(olmoe: nn.Module) -> None:
    olmoe.set_experts_implementation("optimus")
    layer, (x_TH, *_) = olmoe.model.layers[0].mlp, layer_inputs(6, torch.float32)
    x_BSH = x_TH.view(4, 10, 32)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, backend="eager")
    assert torch.equal(compiled(x_BSH), layer(x_BSH))
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert len(breaks) == 1
    assert "experts_forward" in next(iter(breaks))  # one break; nothing of the kernels is traced


def test_only_some_parameters_are_trained(olmoe: nn.Module) -> None:
    olmoe.set_experts_implementation("optimus")
    frozen = [p for name, p in olmoe.named_parameters() if "experts" in name]
    for parameter in frozen:
        parameter.requires_grad_(False)
    olmoe(ids(), labels=ids()).loss.backward()
    assert all(p.grad is None for p in frozen)
    assert olmoe.model.embed_tokens.weight.grad.any()


def test_no_tokens(olmoe: nn.Module) -> None:
    olmoe.set_experts_implementation("optimus")
    experts = olmoe.model.layers[0].mlp.experts
    x_TH, indices_TK, weights_TK = layer_inputs(6, torch.float32, tokens=0)
    y_TH = experts(x_TH.requires_grad_(), indices_TK, weights_TK)
    assert y_TH.shape == (0, 32)
    y_TH.sum().backward()
    assert x_TH.grad.shape == (0, 32)
    assert not experts.down_proj.grad.any()


def test_choices_of_other_ranks_are_skipped(olmoe: nn.Module) -> None:
    """Choices of other ranks, which `transformers` marks with the number of experts and zero weights, are skipped."""
    experts = olmoe.model.layers[0].mlp.experts
    experts._is_expert_parallel = True
    results = []
    for name in ("grouped_mm", "optimus"):
        experts.config._experts_implementation = name
        x_TH, indices_TK, weights_TK = layer_inputs(6, torch.float32)
        indices_TK[::3, 0] = 6
        indices_TK[5] = 6
        weights_TK = weights_TK.masked_fill(indices_TK == 6, 0)
        before = indices_TK.clone()
        y_TH = experts(x_TH.requires_grad_(), indices_TK, weights_TK.requires_grad_())
        assert torch.equal(indices_TK, before)
        assert not y_TH[5].any()
        results.append([y_TH, *torch.autograd.grad(y_TH.square().sum(), [x_TH, weights_TK, *experts.parameters()])])
    for theirs, ours in zip(*results, strict=True):
        assert error(ours, theirs) < 1e-5


def test_folder_round_trip(model: nn.Module, tmp_path: Path) -> None:
    expected = outcome(model, "eager")
    model.save_pretrained(tmp_path / "first")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "first", experts_implementation="optimus")
    assert loaded.config._experts_implementation == "optimus"
    assert_same(outcome(loaded, None), expected, 1e-5)
    loaded.save_pretrained(tmp_path / "second")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "second", experts_implementation="eager")
    assert_state_equal(again, model)


def assert_state_equal(ours: nn.Module, theirs: nn.Module) -> None:
    states = ours.state_dict(), theirs.state_dict()
    assert list(states[0]) == list(states[1])
    for a, b in zip(*(state.values() for state in states)):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("family", ["olmoe", "olmoe-norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_has_the_state_dict_of_the_original(family: str, dtype: torch.dtype) -> None:
    theirs = OlmoeSparseMoeBlock(CONFIGS[family]).to(dtype)
    ours = optimus.FastSparseMoEBlock(CONFIGS[family]).to(dtype)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    assert ours.load_state_dict(theirs.state_dict()).missing_keys == []
    assert_state_equal(ours, theirs)


@pytest.mark.parametrize("family", ["olmoe", "olmoe-norm"])
def test_block_in_a_model(family: str) -> None:
    expected = outcome(made(CONFIGS[family]), "eager")
    model = made(CONFIGS[family])
    replace_blocks(model)
    assert_same(outcome(model, None), expected, 1e-5)
    assert model.config._experts_implementation == "eager"


def replace_blocks(model: nn.Module) -> None:
    for layer in model.model.layers:
        block = optimus.FastSparseMoEBlock(model.config)
        block.load_state_dict(layer.mlp.state_dict())
        layer.mlp = block


def test_block_runs_the_kernels_whatever_the_model_names(monkeypatch: pytest.MonkeyPatch) -> None:
    model, kernel, calls = made(CONFIGS["olmoe"]), drop_in.expert_mlp, []
    replace_blocks(model)
    monkeypatch.setattr(drop_in, "expert_mlp", lambda *args, **more: calls.append(1) or kernel(*args, **more))
    model.set_experts_implementation("grouped_mm")
    outcome(model, None)
    assert len(calls) == 2


def test_block_gets_the_initial_values_of_the_original() -> None:
    model = made(CONFIGS["olmoe"])
    replace_blocks(model)
    block = model.model.layers[0].mlp
    for parameter in block.parameters():
        nn.init.zeros_(parameter)
    block.apply(model._init_weights)
    assert all(0.2 < parameter.std() < 0.4 for parameter in block.parameters())


def refused(experts: nn.Module) -> str:
    experts.config._experts_implementation = "optimus"
    with pytest.raises(UserError) as caught:
        experts(*layer_inputs(4, torch.float32))
    return str(caught.value)


def test_another_activation_is_refused() -> None:
    config = MixtralConfig(**SIZES, intermediate_size=24, num_local_experts=4, hidden_act="quick_gelu")
    text = refused(made(config).model.layers[0].mlp.experts)
    assert text == (
        "experts_implementation='optimus' cannot run MixtralExperts: its activation is QuickGELUActivation, not "
        "SiLU, GELU or ReLU. "
        "Load this model with another implementation, such as experts_implementation='grouped_mm' or 'eager'"
    )
    with pytest.raises(UserError, match="its activation is QuickGELUActivation"):
        optimus.FastSparseMoEBlock(OlmoeConfig(**SIZES, num_experts=4, hidden_act="quick_gelu"))


def test_another_form_of_experts_is_refused() -> None:
    text = refused(GptOssExperts(GptOssConfig(**SIZES, intermediate_size=24, num_local_experts=4)))
    for reason in ("have biases", "stored transposed", "are interleaved", "by its own function"):
        assert reason in text


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("has_bias", True, "its experts have biases"),
        ("is_transposed", True, "its weights are stored transposed"),
        ("is_concatenated", False, "its gate and up projections are interleaved"),
        ("has_gate", False, "its experts have no gate projection"),
        ("has_post_expert_norm", True, "its experts end in a norm"),
    ],
)
def test_each_declared_difference_is_named(attribute: str, value: bool, reason: str) -> None:
    experts = OlmoeExperts(copy.deepcopy(CONFIGS["olmoe"]))
    setattr(experts, attribute, value)
    assert f"cannot run OlmoeExperts: {reason}. " in refused(experts)


def test_experts_that_clamp_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OlmoeExperts, "_apply_gate", lambda self, z: z.chunk(2, -1)[0].clamp(max=7))
    assert "by its own function" in refused(OlmoeExperts(copy.deepcopy(CONFIGS["olmoe"])))


def test_quantised_weights_are_refused() -> None:
    experts = OlmoeExperts(copy.deepcopy(CONFIGS["olmoe"]))
    experts.down_proj = nn.Parameter(experts.down_proj.detach().to(torch.float8_e4m3fn), requires_grad=False)
    assert "its weights are Parameter of float32 and Parameter of float8_e4m3fn, not dense" in refused(experts)


@pytest.mark.parametrize(("installed", "found"), [("4.57.1", "4.57.1"), ("5.9.0", "5.9.0"), (None, "none")])
def test_an_older_transformers_is_refused(monkeypatch: pytest.MonkeyPatch, installed: str | None, found: str) -> None:
    def version(package: str) -> str:
        if installed is None:
            raise PackageNotFoundError(package)
        return installed

    monkeypatch.setattr(drop_in, "version", version)
    for call in (optimus.register_experts, lambda: optimus.FastSparseMoEBlock(CONFIGS["olmoe"])):
        with pytest.raises(
            UserError, match=rf"needs transformers 5\.17 or newer, and {found} is installed: pip install"
        ):
            call()


@pytest.mark.parametrize("installed", ["5.17rc1", "5.17", "6.0.0.dev0"])
def test_versions_of_any_form(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    for module in (drop_in, needed):
        monkeypatch.setattr(module, "version", lambda package: installed)
    drop_in._check_version()
    needed.needed_transformers()
    monkeypatch.setattr(needed, "version", lambda package: "5.16rc2")
    with pytest.raises(UserError, match=r"5\.17 or newer, and 5\.16rc2 is installed"):
        needed.needed_transformers()


def test_a_run_of_a_model_of_transformers_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(needed, "version", version)
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"model\.transformers needs the package transformers, version 5\.17 or newer"):
        facts_of_text('{"model_type": "a model that no test has read"}')


def test_the_names_do_not_import_transformers() -> None:
    code = (
        "import sys, optimus; optimus.register_experts, optimus.FastSparseMoEBlock; "
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
