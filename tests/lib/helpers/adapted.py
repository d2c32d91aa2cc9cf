"""Adapted families of `transformers`, trained through the library and by a plain PyTorch loop."""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from helpers.equality import prune_as_configured
from optimus.config import RunConfig, load_config
from optimus.model.build import causal_model
from optimus.model.foreign.configuration import hf_config
from optimus.model.foreign.twin import build, small
from optimus.model.init import initialize
from optimus.testing.ranks import run_ranks
from optimus.testing.steps import Steps, random_batch

STEPS, LENGTH, BATCH, LR = 4, 32, 4, 1e-3

_FEW = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 321}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GROUPED = _FEW | _TOKENS | {"num_key_value_heads": 2}
_DECODER = _FEW | _TOKENS | {"is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ROUTED = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.05}

SETTINGS: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "phi3": _GROUPED,
    "stablelm": _GROUPED | {"use_qkv_bias": True},
    "cohere2": _GROUPED | {"sliding_window": 8, "logit_scale": 0.25},
    "smollm3": _GROUPED | {"no_rope_layers": [1, 1, 1, 0]},
    "gpt_neox": _FEW | _TOKENS,
    "olmo2": _GROUPED,
    "gpt2": _TOKENS
    | {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_inner": 96, "vocab_size": 321}
    | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "gemma3_text": _GROUPED
    | {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "granitemoe": _GROUPED
    | _ROUTED
    | {"num_local_experts": 4, "logits_scaling": 4.0, "embedding_multiplier": 6.0, "attention_multiplier": 0.2},
    "qwen3_moe": _GROUPED | _ROUTED | {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32},
    "falcon_h1": _GROUPED
    | {"head_dim": 16, "lm_head_multiplier": 0.5, "embedding_multiplier": 3.0, "mamba_d_ssm": 64, "mamba_n_heads": 4}
    | {"mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16},
    "bert": _DECODER,
    "camembert": _DECODER | {"pad_token_id": 1},
    "openai-gpt": _TOKENS
    | {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 321, "n_positions": 64}
    | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "glm4": {},
    "nemotron_h": {},
    "qwen3_next": {},
    "kimi_linear": {},
    "deepseek_v4": {},
}
"""For each family, keys of a tiny config.json; a family without keys is shrunk from its makers' defaults."""
LAYERS = {"glm4": 4, "qwen3_next": 4, "kimi_linear": 5}
"""The number of layers of shrunk families that would have fewer than four, the stages of some layouts."""


class Layout(NamedTuple):
    """Sections of a configuration, and the number of ranks that they need.

    The plain loop has neither pruning nor Muon. With `changed`, the sections change the numbers, and one process of the
    library is the reference.
    """

    ranks: int
    sections: dict[str, Any]
    changed: bool = False


_SHARDED = {"shard": "parameters"}
LAYOUTS = {
    "one": Layout(1, {}),
    "zero1": Layout(2, {"state": {"shard": "optimizer"}}),
    "zero3": Layout(2, {"state": _SHARDED}),
    "hsdp": Layout(4, {"state": _SHARDED | {"shard_ranks": 2}}),
    "tensor": Layout(2, {"parallel": {"tensor": 2}}),
    "1f1b": Layout(2, {"parallel": {"pipeline": 2}}),
    "zero-bubble": Layout(2, {"parallel": {"pipeline": 2, "stages_per_rank": 2, "schedule": "zbv"}}),
    "interleaved": Layout(2, {"parallel": {"pipeline": 2, "stages_per_rank": 2, "schedule": "interleaved-1f1b"}}),
    "message-driven": Layout(2, {"parallel": {"pipeline": 2, "executor": "message-driven"}}),
    "context": Layout(2, {"parallel": {"context": 2}}),
    "ulysses": Layout(2, {"parallel": {"context": 2, "context_method": "ulysses"}}),
    "offload": Layout(2, {"state": _SHARDED | {"offload": "all"}}),
    "recompute": Layout(2, {"state": _SHARDED, "recompute": "block"}),
    "recompute attention": Layout(2, {"state": _SHARDED, "recompute": ["attention"]}),
    "recompute modules x tensor": Layout(
        2, {"parallel": {"tensor": 2}, "recompute": ["norm", "mlp"], "recompute_every": 2}
    ),
    "tensor x pipeline": Layout(4, {"parallel": {"tensor": 2, "pipeline": 2}}),
    "tensor x zero3 x recompute": Layout(4, {"parallel": {"tensor": 2}, "state": _SHARDED, "recompute": "block"}),
    "pipeline x zero3 x offload": Layout(
        4, {"parallel": {"pipeline": 2}, "state": _SHARDED | {"offload": "optimizer"}}
    ),
    "expert": Layout(2, {"parallel": {"expert": 2}}),
    "expert x tensor x zero3 x offload": Layout(
        4, {"parallel": {"expert": 2, "tensor": 2}, "state": _SHARDED | {"offload": "all"}}
    ),
    "expert x pipeline x recompute": Layout(
        4,
        {
            "parallel": {"expert": 2, "pipeline": 2, "stages_per_rank": 2, "schedule": "zbv"},
            "recompute": "block",
        },
    ),
    "expert x pruning x zero3": Layout(
        4,
        {"parallel": {"expert": 2}, "state": _SHARDED, "pruning": {"sparsity": 0.6, "at": [1, 2], "method": "random"}},
        changed=True,
    ),
    "expert x muon": Layout(2, {"parallel": {"expert": 2}, "optimizer": {"name": "muon"}}, changed=True),
    "disk": Layout(2, {"state": _SHARDED | {"offload": "disk"}}),
    "pruning": Layout(2, {"state": _SHARDED, "pruning": {"sparsity": 0.6, "at": 0}}, changed=True),
    "pruning x tensor": Layout(
        2, {"parallel": {"tensor": 2}, "pruning": {"sparsity": 0.6, "at": [1, 2], "method": "random"}}, changed=True
    ),
    "muon x zero3": Layout(2, {"state": _SHARDED, "optimizer": {"name": "muon"}}, changed=True),
}
_OWN_ATTENTION = "camembert", "openai-gpt"  # positions of its own; attention that is not behind the interface
_DISPATCHED = "granitemoe", "qwen3_moe", "qwen3_next", "kimi_linear"  # experts that the kernels compute
_WITHOUT_PARTS = "openai-gpt", "deepseek_v4"  # attention that returns a list; gradients between children of a block
LEAKING = "falcon_h1", "nemotron_h", "qwen3_next", "kimi_linear", "deepseek_v4"  # states of one position reach the next


def config_json(family: str) -> dict[str, Any]:
    """Returns the config.json of a tiny model."""
    from transformers import AutoConfig

    settings = SETTINGS.get(family, {})
    made = AutoConfig.for_model(family, **settings)
    found: dict[str, Any] = (made if settings else small(made, LAYERS.get(family))).to_dict()
    return found


def config_of(family: str, **sections: Any) -> RunConfig:
    """Returns the configuration of a run of a tiny model."""
    tree: dict[str, Any] = {
        "model": {"transformers": config_json(family)},
        "data": {"path": "data"},
        "train": {
            "output": "run",
            "steps": STEPS,
            "sequence_length": LENGTH,
            "global_batch": BATCH,
            "micro_batch": 1,
            "precision": "float32",
        },
        "lr_schedule": {"lr": LR, "warmup_steps": 0, "name": "constant"},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section} if isinstance(section, dict) else section
    return load_config(tree)


def trained(family: str, sections: dict[str, Any], documents: bool = False) -> list[tuple[float, float]]:
    """Returns the loss and the norm of the gradient of each step, on one rank of a layout."""
    more = {"data": {"documents": "mask"}} if documents else {}
    steps = Steps(config_of(family, **sections, **more))
    found = []
    for _ in range(STEPS):
        prune_as_configured(steps)
        result = steps.train(document_BS=document_BS() if documents else None)
        found.append((result.loss, result.grad_norm))
    return found


def refused(family: str, layout: str) -> str | None:
    """Returns a pattern of the error with which the configuration refuses the layout for the family, or None."""
    if layout in ("context", "ulysses") and family in (*LEAKING, *_OWN_ATTENTION):
        return r"parallel\.context: "
    if layout.startswith("expert") and family not in _DISPATCHED:
        return r"parallel\.expert 2: the (model is dense|experts of .* run by `transformers`)"
    if layout in ("recompute attention", "recompute modules x tensor") and family in _WITHOUT_PARTS:
        return "recomputes whole blocks only"
    return None


def on_layout(family: str, layout: str) -> list[tuple[float, float]]:
    """Returns the result of `trained` on the ranks of a layout."""
    ranks, sections, _ = LAYOUTS[layout]
    return trained(family, sections) if ranks == 1 else run_ranks(trained, ranks, family, sections)[0]


@cache
def expected(family: str, layout: str) -> list[tuple[float, float]]:
    """Returns the losses and norms that a layout must have: of a plain loop, or of one process of the library."""
    _, sections, changed = LAYOUTS[layout]
    if not changed:
        return plain(family)
    return trained(family, {name: section for name, section in sections.items() if name not in ("parallel", "state")})


def document_BS() -> Tensor:
    """Returns the documents of a batch: three in each sequence, at other places in each."""
    ends = torch.tensor([[5, 11], [8, 23], [16, 17], [2, 30]])
    return torch.stack([torch.bucketize(torch.arange(LENGTH), row, right=True) for row in ends])


def by_plain_loop(family: str, documents: bool = False) -> list[tuple[float, float]]:
    """Returns the result of `trained` of the author's module in a plain PyTorch loop.

    Each document runs by itself, and each sequence is a microbatch.
    """
    config = config_of(family)
    made = causal_model(config.model)
    initialize(made, config.train.seed, 0.0)
    model: Any = build(hf_config(config.model.text), "sdpa", "cpu").train()  # type: ignore[union-attr]
    with torch.no_grad():
        tensors = made.author_tensors()
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])
    options = config.optimizer
    optimizer = torch.optim.AdamW(model.parameters(), LR, options.betas, options.eps, options.weight_decay)
    of_balance, _ = config.model.router_weights(0.0, 0.0)
    found = []
    for step in range(1, STEPS + 1):
        batch_BS, total = random_batch(config, step), 0.0
        optimizer.zero_grad()
        for tokens_S, number_S in zip(batch_BS, document_BS() if documents else torch.zeros_like(batch_BS)):
            predicted = (
                int((document_BS()[:, 1:] == document_BS()[:, :-1]).sum()) if documents else BATCH * (LENGTH - 1)
            )
            for document_S in tokens_S.split(torch.bincount(number_S).tolist()):
                made_of = model(input_ids=document_S[None], use_cache=False)
                loss = nn.functional.cross_entropy(made_of.logits[0, :-1], document_S[1:], reduction="sum") / predicted
                total += loss.item()
                if of_balance:
                    loss = loss + of_balance / BATCH * made_of.aux_loss
                loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm or 1e9).item()
        found.append((total, norm))
        optimizer.step()
    return found


plain = cache(by_plain_loop)
