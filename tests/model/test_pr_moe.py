"""PR-MoE equals its definition, which is written here in float64 because no class of it is published.

Legend: T tokens of one sequence, H hidden, N heads, D head size, E experts.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from optimus.config import ModelConfig
from optimus.errors import UserError
from optimus.hub import export_model
from optimus.hub.config_json import read_model
from optimus.kernels.attention import attention_reference
from optimus.kernels.rotary import rotary_reference, rotary_table
from optimus.model import KVCache, Transformer
from optimus.model.count import count_parameters
from optimus.model.init import initialize

SIZES = {"family": "pr_moe", "hidden": 16, "heads": 2, "intermediate": 20, "vocab": 37}
CONFIGS = {
    "pyramid": {"layers": 4, "experts_by_layer": [0, 3, 0, 5], "expert_intermediate": 12},
    "all layers": {"layers": 3, "experts_by_layer": [2, 2, 6], "tie_embeddings": True},
    "one number": {"layers": 2, "experts": 4, "kv_heads": 1},
}


def model_of(name: str) -> Transformer:
    model = Transformer(ModelConfig.model_validate(SIZES | CONFIGS[name]))
    initialize(model, seed=3, std=0.3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.dim() == 1):
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return model.double()


def normed(x_TH: Tensor, weight_H: Tensor) -> Tensor:
    return weight_H * x_TH / (x_TH.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def swiglu(x_TH: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x_TH @ half.T for half in gate_up)
    return (F.silu(gate) * up) @ down.T


def reference(model: Transformer, tokens_T: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (logits, balance loss) of one sequence."""
    config, w = model.config, dict(model.named_parameters())
    x_TH = w["embedding.weight"][tokens_T]
    table = rotary_table(torch.arange(len(tokens_T)), config.head_size, config.rope_theta)
    routed: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for i in range(config.layers):
        own = {name.removeprefix(f"blocks.{i}."): value for name, value in w.items() if name.startswith(f"blocks.{i}.")}
        n_TH = normed(x_TH, own["attention_norm.weight"])
        if "attention.qkv.weight" in own:
            q, k, v = (n_TH @ each.T for each in own["attention.qkv.weight"])
        else:
            q, (k, v) = n_TH @ own["attention.q.weight"].T, (n_TH @ each.T for each in own["attention.kv.weight"])
        q, k, v = (t.view(1, len(tokens_T), -1, config.head_size) for t in (q, k, v))
        y, _ = attention_reference(rotary_reference(q, table), rotary_reference(k, table), v, True)
        x_TH = x_TH + y.flatten(2)[0] @ own["attention.out.weight"].T
        n_TH = normed(x_TH, own["mlp_norm.weight"])
        if "mlp.down.weight" in own:
            x_TH = x_TH + swiglu(n_TH, own["mlp.gate_up.weight"], own["mlp.down.weight"])
            continue
        p_TE = (n_TH @ own["moe.router.weight"].T).softmax(-1)
        chosen_T = p_TE.argmax(-1)
        gate_up, down = own["moe.experts.gate_up"], own["moe.experts.down"]
        expert = [swiglu(n_TH[t], gate_up[e], down[e]) for t, e in enumerate(chosen_T)]
        dense_TH = swiglu(n_TH, own["moe.shared.gate_up.weight"], own["moe.shared.down.weight"])
        x_TH = x_TH + dense_TH + p_TE.gather(1, chosen_T[:, None]) * torch.stack(expert)
        routed.setdefault(p_TE.shape[1], []).append((p_TE, F.one_hot(chosen_T, p_TE.shape[1]).double()))
    balance, layers = torch.zeros((), dtype=torch.float64), sum(map(len, routed.values()))
    for experts, of_layers in routed.items():
        p_E, share_E = (torch.cat(each).mean(0) for each in zip(*of_layers, strict=True))
        balance = balance + len(of_layers) / layers * experts * (p_E * share_E).sum()
    head = w["embedding.weight"] if config.tie_embeddings else w["head.weight"]
    return normed(x_TH, w["final_norm.weight"]) @ head.T, balance


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_losses_and_gradients_are_those_of_the_definition(name: str) -> None:
    model, tokens_T = model_of(name), torch.randint(37, (23,), generator=torch.Generator().manual_seed(1))
    logits_TV, balance = reference(model, tokens_T)
    losses = model.losses(tokens_T[None])
    right = F.cross_entropy(logits_TV[:-1], tokens_T[1:]) + balance
    torch.testing.assert_close(model(tokens_T[None])[0], logits_TV, atol=1e-6, rtol=0)  # rotary positions are in fp32
    torch.testing.assert_close(losses.balance.double(), balance, atol=1e-6, rtol=0)
    expected = torch.autograd.grad(right, list(model.parameters()))
    (losses.cross_entropy + losses.balance).backward()
    for (parameter_name, parameter), gradient in zip(model.named_parameters(), expected, strict=True):
        assert gradient.abs().max() > 0, parameter_name
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=0, msg=parameter_name)


def test_text_with_a_cache_is_that_without() -> None:
    model, tokens_BS = model_of("pyramid"), torch.arange(24).view(2, 12)
    cache = KVCache(4)
    with torch.no_grad():
        pieces = [model(piece, cache=cache) for piece in tokens_BS.split([5, 1, 6], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, 1), model(tokens_BS))


def test_counts() -> None:
    config = model_of("pyramid").config
    assert (config.experts, config.experts_per_token, config.sparse_layers()) == (5, 1, 2)
    attention, norms, ends = 4 * 16 * 16, 2 * 16, 2 * 37 * 16 + 16
    dense, expert = 3 * 16 * 20, 3 * 16 * 12
    total = 4 * (attention + norms) + ends + 2 * dense + (3 + 5) * (expert + 16) + 2 * expert
    assert count_parameters(config) == (total, total - (2 + 4) * expert)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"experts_by_layer": [2, 4]}, r"experts_by_layer \[2, 4\] must be 4 numbers, one per layer"),
        ({"experts": 4}, r"the largest of them experts 4"),
        ({"dense_layers": 1}, "dense_layers 1 cannot be combined with experts_by_layer: remove it"),
        ({"sparse_every": 2}, "sparse_every 2 cannot be combined with experts_by_layer"),
        ({"experts_by_layer": [0, 0, 0, 0]}, "family pr_moe needs experts"),
        ({"experts_per_token": 2}, "experts_per_token is 2, but 1 in all models of family pr_moe"),
    ],
)
def test_what_makes_no_sense_is_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.model_validate(SIZES | CONFIGS["pyramid"] | changed)


def test_it_has_no_form_in_transformers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="transformers has no model of family pr_moe: it cannot be exported"):
        export_model(model_of("pyramid"), tmp_path / "out", context=8, tokenizer=None, eos_id=None)
    (tmp_path / "config.json").write_text('{"model_type": "pr_moe"}')
    with pytest.raises(UserError, match=r"model_type is 'pr_moe': only .*mixtral.* can be read"):
        read_model(tmp_path)
