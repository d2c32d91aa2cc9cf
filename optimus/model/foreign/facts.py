"""STAND-IN, replaced when the analysis is merged."""

import re
from dataclasses import dataclass, field
from collections.abc import Mapping
import torch
from torch import Tensor, nn
from optimus.model.foreign.twin import build, small


@dataclass(frozen=True)
class Split:
    dim: int | None = None
    pieces: tuple = ()
    partial: bool = False


@dataclass(frozen=True)
class ModelFacts:
    blocks: str
    layers: int
    outputs: int
    kinds: tuple
    embedding: str
    head: str
    tied: bool
    hidden: int
    vocab: int
    before: frozenset
    logit_scale: float
    logit_cap: float | None
    splits: Mapping = field(default_factory=dict)
    styles: Mapping = field(default_factory=dict)
    divided: Mapping = field(default_factory=dict)
    attention: bool = True
    scored: object = None
    router: object = None
    positions: int | None = None
    refusals: Mapping = field(default_factory=dict)
    sharded_sizes: Mapping = field(default_factory=dict)


_general = lambda s: re.sub(r"(?<=\.)\d+(?=\.|$)", "*", s)


@torch.no_grad()
def facts_of(config):
    module = build(config, "sdpa", "meta")
    twin = build(small(config))
    names = {id(each): name for name, each in module.named_modules()}
    blocks = max(
        (len(e), sum(p.numel() for p in e.parameters()), n)
        for n, e in module.named_modules()
        if isinstance(e, nn.ModuleList)
    )[2]
    embedding, head = names[id(module.get_input_embeddings())], names[id(module.get_output_embeddings())]
    order, made, z = [], [], []
    for name, each in ((n, e) for n, e in twin.named_modules() if e._parameters and not n.startswith(blocks + ".")):
        each.register_forward_pre_hook(lambda m, a, name=name: order.append(name))
    for layer in twin.get_submodule(blocks):
        layer.register_forward_pre_hook(lambda m, a, kw: order.append(blocks), with_kwargs=True)
        layer.register_forward_hook(lambda m, a, out: made.append(out))
    twin.get_submodule(head).register_forward_hook(lambda m, a, out: z.append(out))
    y = twin(input_ids=torch.arange(1, 9)[None], use_cache=False).logits
    outputs = 0 if isinstance(made[0], Tensor) else len(made[0])
    cap = getattr(config, "final_logit_softcapping", None)
    cap = cap if cap and torch.allclose((z[0] / cap).tanh() * cap, y) else None
    scale = 1.0 if cap else float((y.double() / z[0].double())[z[0].abs() > z[0].abs().max() / 2].mean())
    plan = {f"{module.base_model_prefix}.{key}": style for key, style in (config.base_model_tp_plan or {}).items()}
    splits, styles = {}, {}
    word = {"colwise": "column", "rowwise": "row", "colwise_gather_output": "gather", "rowwise_split_input": "scatter"}
    for n, m in module.named_modules():
        if isinstance(m, nn.Linear) and n.startswith(blocks) and plan.get(_general(n)) in word:
            styles[n] = word[plan[_general(n)]]
            col = styles[n] in ("column", "gather")
            splits[n + ".weight"] = Split(0 if col else 1)
            if m.bias is not None:
                splits[n + ".bias"] = Split(0 if col else None)
    for n, p in module.named_parameters():
        if plan.get(_general(n.rpartition(".")[0])) == "replicated_with_grad_allreduce":
            splits[n] = Split(None, (), True)
    L = len(module.get_submodule(blocks))
    t = module.get_submodule(embedding).weight
    return ModelFacts(
        blocks,
        L,
        outputs,
        tuple(range(L)),
        embedding,
        head,
        t is module.get_submodule(head).weight,
        t.shape[1],
        t.shape[0],
        frozenset(order[: order.index(blocks)]),
        round(scale, 7),
        cap,
        splits,
        styles,
        scored=[[(None, 64)]] * L,
    )
