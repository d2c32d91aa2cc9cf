"""Every family equals `transformers` on random weights: logits, losses, every gradient, greedy text."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from helpers.sweep import in_turns
from optimus.config import ModelConfig
from optimus.hub.keys import fused, published
from optimus.model import KVCache, Transformer
from optimus.model.families import families
from optimus.model.init import initialize
from optimus.model.parameters import named_tensors

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5
BALANCE, Z = 0.01, 0.001


def olmo(**changed: object) -> ModelConfig:
    base = {"family": "olmo", "hidden": 32, "layers": 2, "heads": 4, "intermediate": 48, "vocab": 97}
    return ModelConfig.model_validate(base | changed)


def olmoe(**changed: object) -> ModelConfig:
    return olmo(**{"family": "olmoe", "intermediate": 24, "experts": 8, "experts_per_token": 2} | changed)


def of(family: str, **changed: object) -> ModelConfig:
    return olmo(**{"family": family, "heads": 4, "norm_eps": 1e-4} | changed)


def yarn(**changed: object) -> dict[str, object]:
    return {"kind": "yarn", "factor": 4.0, "original_context": 16} | changed


LLAMA3 = {"kind": "llama3", "factor": 8.0, "original_context": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SPARSE = {"experts": 6, "experts_per_token": 2, "intermediate": 24}
DEEPSEEK = {
    "head_size": 10,
    "experts": 8,
    "experts_per_token": 3,
    "expert_intermediate": 16,
    "shared_experts": 1,
    "routed_scale": 2.5,
}


def latent(**changed: object) -> dict[str, object]:
    return {"queries": 20, "keys": 16, "rotary": 6, "value": 12} | changed


CONFIGS = {
    "deepseek_v3": of(
        "deepseek_v3", latent=latent(), layers=3, dense_layers=1, expert_groups=4, groups_per_token=2, **DEEPSEEK
    ),
    "deepseek_v3-no-groups-tied": of(
        "deepseek_v3",
        latent=latent(queries=None, value=20),
        renormalise=False,
        tie_embeddings=True,
        **DEEPSEEK | {"shared_experts": 2},
    ),
    "deepseek_v3-yarn": of(
        "deepseek_v3",
        latent=latent(value=16),
        rope_scaling=yarn(mscale=1.0, mscale_all_dim=0.7),
        expert_groups=2,
        **DEEPSEEK,
    ),
    # Fields of YaRN mean nothing with another kind, and the export does not write them.
    "deepseek_v3-linear": of(
        "deepseek_v3",
        latent=latent(),
        rope_scaling={"kind": "linear", "factor": 4.0, "mscale_all_dim": 0.7},
        **DEEPSEEK,
    ),
    "gpt_oss": of("gpt_oss", kv_heads=2, head_size=16, window=5, **SPARSE),
    "gpt_oss-tied": of(
        "gpt_oss",
        kv_heads=1,
        head_size=8,
        window=3,
        full_attention_every=3,
        layers=4,
        tie_embeddings=True,
        rope_scaling=yarn(truncate=False),
        **SPARSE | {"experts_per_token": 3},
    ),
    "gpt_oss-plain": of(
        "gpt_oss", head_size=12, window=7, attention_bias="none", rope_scaling=None, rope_theta=1e4, **SPARSE
    ),
    "llama": of("llama", kv_heads=2),
    "llama-biases-tied": of(
        "llama", attention_bias="all", mlp_bias=True, tie_embeddings=True, head_size=12, kv_heads=1, hidden=64
    ),
    "llama-3": of("llama", rope_theta=5e5, rope_scaling=LLAMA3, layers=3),
    "llama-linear": of("llama", rope_scaling={"kind": "linear", "factor": 2.0}, kv_heads=2),
    "llama-yarn": of("llama", rope_scaling=yarn(), head_size=16),
    "mistral": of("mistral", kv_heads=2, window=5),
    "mistral-no-window": of("mistral", kv_heads=1, head_size=16),
    "mistral-scaled": of("mistral", window=3, rope_scaling=yarn(factor=8.0)),
    "mistral-tied": of("mistral", window=2, tie_embeddings=True, rope_theta=1e6),
    "qwen2": of("qwen2", kv_heads=2),
    "qwen2-tied": of("qwen2", heads=2, tie_embeddings=True, rope_theta=1e6),
    "qwen2-one-key-head": of("qwen2", heads=8, kv_heads=1, layers=3),
    "qwen3": of("qwen3", kv_heads=2, head_size=16),
    "qwen3-tied": of("qwen3", kv_heads=4, head_size=4, tie_embeddings=True),
    "qwen3-biases": of("qwen3", kv_heads=1, attention_bias="all", rope_theta=1e6),
    "qwen3_moe": of("qwen3_moe", kv_heads=2, head_size=16, renormalise=True, **SPARSE),
    "qwen3_moe-raw": of("qwen3_moe", kv_heads=1, head_size=8, **SPARSE | {"experts_per_token": 3}),
    "qwen3_moe-tied": of("qwen3_moe", attention_bias="all", head_size=8, tie_embeddings=True, **SPARSE),
    "qwen3_moe-dense-layers": of(
        "qwen3_moe", head_size=16, layers=4, dense_layers=1, sparse_every=2, expert_intermediate=16, **SPARSE
    ),
    "mixtral": of("mixtral", kv_heads=2, **SPARSE),
    "mixtral-window": of("mixtral", kv_heads=1, window=4, head_size=16, **SPARSE),
    "mixtral-tied": of("mixtral", tie_embeddings=True, **SPARSE | {"experts_per_token": 4}),
    "olmo2": of("olmo2"),
    "olmo2-groups": of("olmo2", kv_heads=2, layers=3, rope_theta=5e5),
    "olmo2-biases": of("olmo2", attention_bias="all", heads=8, kv_heads=2, hidden=64),
    "olmo3": of("olmo3", window=4, layers=4, full_attention_every=4),
    "olmo3-groups": of(
        "olmo3", window=6, layers=4, full_attention_every=2, kv_heads=2, rope_scaling=yarn(attention_factor=1.5)
    ),
    "olmo3-all-windows": of(
        "olmo3", window=3, full_attention_every=3, tie_embeddings=True, rope_scaling=yarn(factor=8.0)
    ),
    "gpt2": of("gpt2", learned_positions=64),
    "gpt2-not-tied": of("gpt2", learned_positions=47, heads=2, layers=3, tie_embeddings=False),
    "gpt2-narrow": of("gpt2", learned_positions=64, hidden=24, heads=6, intermediate=40),
    "opt": of("opt", learned_positions=64, norm_eps=1e-5),
    "opt-gelu": of("opt", learned_positions=47, activation="gelu", heads=2, layers=3, norm_eps=1e-5),
    "opt-not-tied": of("opt", learned_positions=50, hidden=24, heads=6, tie_embeddings=False, norm_eps=1e-5),
    "gemma2": of("gemma2", window=4, kv_heads=2, head_size=16, query_scale=24, score_cap=1.5, logit_cap=2.0),
    "gemma2-large": of("gemma2", window=5, head_size=8, query_scale=2, score_cap=0.7, layers=3, logit_cap=None),
    "gemma2-not-tied": of(
        "gemma2",
        window=3,
        full_attention_every=3,
        head_size=12,
        query_scale=12,
        kv_heads=1,
        score_cap=None,
        logit_cap=1.0,
        attention_bias="all",
        tie_embeddings=False,
        layers=3,
    ),
    "gemma3": of("gemma3_text", window=4, full_attention_every=2, kv_heads=2, head_size=16, query_scale=16, layers=3),
    "gemma3-scaled": of(
        "gemma3_text", window=5, head_size=8, query_scale=20, rope_scaling={"kind": "linear", "factor": 8.0}, layers=6
    ),
    "gemma3-capped": of(
        "gemma3_text",
        window=3,
        head_size=12,
        query_scale=6,
        kv_heads=1,
        logit_cap=1.5,
        tie_embeddings=False,
        attention_bias="all",
        window_rope_theta=50.0,
    ),
    "olmo": olmo(),
    "olmo-wide": olmo(hidden=96, heads=3, intermediate=40, layers=3),
    "olmo-one-head-tied": olmo(heads=1, tie_embeddings=True, rope_theta=500.0),
    "olmoe": olmoe(),
    "olmoe-wide": olmoe(hidden=80, heads=5, experts=13, experts_per_token=5, layers=3),
    "olmoe-renormalised": olmoe(experts_per_token=3, renormalise=True),
    "olmoe-top1-tied": olmoe(hidden=48, heads=2, experts=4, experts_per_token=1, tie_embeddings=True),
    "olmoe-all-experts": olmoe(hidden=24, heads=6, experts=3, experts_per_token=3, norm_eps=1e-3, rope_theta=500.0),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Runs torch on one thread: a second one slows down operations this small, mostly on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random_model(config: ModelConfig, seed: int = 1) -> Transformer:
    """Returns a model with large random weights: attention and routing are far from uniform, norms far from one, and
    biases not zero."""
    model = Transformer(config)
    initialize(model, seed=seed, std=0.15)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                least = -0.5 if config.norm == "rms_offset" else 0.5
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + least)
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
        for buffer in model.buffers():
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
        if config.tie_embeddings:
            model.embedding.weight.mul_(0.1)  # otherwise every token would predict itself
    return model


def rope_parameters(config: ModelConfig) -> dict[str, object]:
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if (scaling := config.rope_scaling) is None:
        return rope
    rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        rope["original_max_position_embeddings"] = scaling.original_context
    if scaling.kind == "llama3":
        rope |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if not scaling.truncate:
        rope["truncate"] = False
    if scaling.attention_factor is not None:
        rope["attention_factor"] = scaling.attention_factor
    if scaling.mscale is not None:
        rope |= {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
    return rope


def twin_of(model: Transformer) -> "transformers.PreTrainedModel":
    """Returns the same model in `transformers`, built and filled without the export."""
    config = model.config
    rope = rope_parameters(config)
    if config.family in ("olmo3", "gemma3_text"):
        windows = {"rope_type": "default", "rope_theta": config.window_rope_theta}
        rope = {"full_attention": rope, "sliding_attention": windows}
    fields = {
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_parameters": rope,
        "pad_token_id": None,  # otherwise its embedding row would have no gradient
        "eos_token_id": None,
        "attn_implementation": "eager",
        "intermediate_size": config.intermediate,
    }
    if config.norm.startswith("rms"):
        fields["rms_norm_eps"] = config.norm_eps
    if config.experts:
        count = "num_local_experts" if config.family in ("mixtral", "gpt_oss") else "num_experts"
        fields |= {count: config.experts, "num_experts_per_tok": config.experts_per_token}
        fields |= {"norm_topk_prob": config.renormalise, "experts_implementation": "eager"}
    if config.latent is not None:
        fields |= {"n_routed_experts": config.experts, "moe_intermediate_size": config.expert_intermediate}
        fields |= {"n_shared_experts": config.shared_experts, "first_k_dense_replace": config.dense_layers}
        fields |= {"n_group": config.expert_groups, "topk_group": config.groups_per_token}
        fields |= {"routed_scaling_factor": config.routed_scale, "qk_nope_head_dim": config.head_size}
        fields |= {"q_lora_rank": config.latent.queries, "kv_lora_rank": config.latent.keys}
        fields |= {"qk_rope_head_dim": config.latent.rotary, "v_head_dim": config.latent.value}
    elif config.family not in ("olmo", "olmoe", "olmo2", "olmo3", "qwen2"):
        fields["head_dim"] = config.head_size
    if config.family not in ("mistral", "mixtral", "qwen2"):
        fields["attention_bias"] = config.attention_bias == "all"
    if config.family == "qwen3_moe":
        fields |= {"moe_intermediate_size": config.expert_intermediate, "decoder_sparse_step": config.sparse_every}
        fields["mlp_only_layers"] = list(range(config.dense_layers))
    if config.family == "llama":
        fields["mlp_bias"] = config.mlp_bias
    if config.family in ("mistral", "mixtral", "olmo3", "gemma2", "gemma3_text", "gpt_oss"):
        fields["sliding_window"] = config.window
    if config.family in ("gemma2", "gemma3_text"):
        fields["attn_logit_softcapping"] = config.score_cap
        fields |= {"query_pre_attn_scalar": config.query_scale, "final_logit_softcapping": config.logit_cap}
    if config.full_attention_every is not None:
        every = config.full_attention_every
        layers = range(1, config.layers + 1)
        fields["layer_types"] = ["sliding_attention" if layer % every else "full_attention" for layer in layers]
    if config.family == "gpt2":
        fields |= {"n_inner": config.intermediate, "n_positions": config.learned_positions}
        fields |= {"layer_norm_epsilon": config.norm_eps, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    if config.family == "opt":
        fields |= {"ffn_dim": config.intermediate, "max_position_embeddings": config.learned_positions, "dropout": 0}
        fields["activation_function"] = config.activation
    made = getattr(transformers, families()[config.family].architecture)
    twin = made(made.config_class(**fields))
    kept = twin.state_dict().keys()
    theirs = dict(twin.named_parameters()) | {name: buffer for name, buffer in twin.named_buffers() if name in kept}
    filled = set()
    with torch.no_grad():
        for name, value in in_their_form(model, dict(named_tensors(model))):
            theirs[name].copy_(value)
            filled.add(name)
    assert filled == set(theirs)
    return twin.eval()


def in_their_form(model: Transformer, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors shaped like our parameters under the names and shapes of `transformers`."""
    for name, tensor in tensors.items():
        whole = fused(model.config.family, name, tensor)
        for each in [whole] if whole else published(model.config.family, name, tensor):
            yield each.name, each.view.reshape(each.shape)


@pytest.fixture(params=CONFIGS, scope="module")
def pair(request: pytest.FixtureRequest) -> tuple[Transformer, "transformers.PreTrainedModel", Tensor]:
    model = random_model(CONFIGS[request.param])
    tokens_BS = torch.randint(model.config.vocab, (3, 19), generator=torch.Generator().manual_seed(2))
    return model, twin_of(model), tokens_BS


def test_logits_equal(pair: tuple) -> None:
    model, twin, tokens_BS = pair
    with torch.no_grad():
        ours, theirs = model(tokens_BS), twin(tokens_BS).logits
    assert theirs.abs().max() > 0.1
    assert (ours - theirs).abs().max() < TOLERANCE


def test_losses_and_every_gradient_equal(pair: tuple) -> None:
    model, twin, tokens_BS = pair
    model.zero_grad()
    twin.zero_grad()
    losses = model.losses(tokens_BS)
    (losses.cross_entropy + BALANCE * losses.balance + Z * losses.z).backward()

    dense = model.config.experts is None
    output = twin(tokens_BS, labels=tokens_BS, **({} if dense else {"output_router_logits": True}))
    if dense:
        assert losses.balance == losses.z == 0
        cross_entropy, total = output.loss, output.loss
    else:
        balance = output.get("aux_loss")
        if balance is None:
            cross_entropy, balance = output.loss, balance_of(twin, tokens_BS, output.router_logits)
        else:
            cross_entropy = output.loss - twin.router_aux_loss_coef * balance
        z = torch.stack([logits.logsumexp(-1).square() for logits in output.router_logits]).mean()
        assert abs(losses.balance - balance) < TOLERANCE
        assert abs(losses.z - z) < TOLERANCE
        total = cross_entropy + BALANCE * balance + Z * z
    assert abs(losses.cross_entropy - cross_entropy) < TOLERANCE
    total.backward()

    theirs = dict(twin.named_parameters())
    ours = dict(in_their_form(model, {name: p.grad for name, p in model.named_parameters()}))
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert theirs[name].grad.abs().max() > 0, name
        assert (gradient - theirs[name].grad).abs().max() < TOLERANCE, name


def balance_of(twin: "transformers.PreTrainedModel", tokens_BS: Tensor, logits: tuple[Tensor, ...]) -> Tensor:
    """Returns the balance loss by definition, from sigmoid scores normalised to sum 1 (DeepSeek-V3, equations 17 to 20)."""
    chosen: list[Tensor] = []
    gates = [module for name, module in twin.named_modules() if name.endswith("mlp.gate")]
    handles = [gate.register_forward_hook(lambda _, __, output: chosen.append(output[2])) for gate in gates]
    with torch.no_grad():
        twin(tokens_BS)
    for handle in handles:
        handle.remove()
    scores_TE = torch.cat(logits).sigmoid()
    experts = scores_TE.shape[1]
    share_E = torch.bincount(torch.cat(chosen).flatten(), minlength=experts) / len(scores_TE)
    return experts * (share_E * (scores_TE / scores_TE.sum(-1, keepdim=True)).mean(0)).sum()


def greedy(model: Transformer, prompt_S: Tensor, new: int, cached: bool) -> list[int]:
    """Returns the greedy continuation, with a cache or by recomputing every token."""
    tokens, fresh, cache = prompt_S.tolist(), prompt_S.tolist(), KVCache(model.config.layers)
    with torch.no_grad():
        for _ in range(new):
            logits_BSV = model(torch.tensor([fresh]), cache=cache) if cached else model(torch.tensor([tokens]))
            fresh = [int(logits_BSV[0, -1].argmax())]
            tokens += fresh
    return tokens


@pytest.mark.parametrize("name", in_turns([*CONFIGS], 4, always=3))
def test_greedy_text_equals_generate(name: str) -> None:
    model = random_model(CONFIGS[name], seed=5)
    prompt_S = torch.randint(model.config.vocab, (7,), generator=torch.Generator().manual_seed(3))
    options = {"attention_mask": torch.ones(1, 7), "max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    theirs = twin_of(model).generate(prompt_S[None], **options)[0].tolist()
    assert len(set(theirs[7:])) > 3
    assert greedy(model, prompt_S, 40, cached=False) == theirs
    assert greedy(model, prompt_S, 40, cached=True) == theirs


def test_cache_takes_several_tokens_at_a_time() -> None:
    model = random_model(olmoe())
    tokens_BS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(4))
    cache = KVCache(2)
    with torch.no_grad():
        pieces = [model(piece, cache=cache) for piece in tokens_BS.split([5, 1, 4, 2], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, 1), model(tokens_BS), atol=TOLERANCE, rtol=0)
    assert cache.lengths == [12, 12]


@pytest.mark.parametrize(("experts", "chosen", "tokens"), [(8, 2, 12), (6, 4, 9), (4, 4, 5), (5, 1, 10)])
def test_uniform_routing_gives_every_expert_the_same_number_of_tokens(experts: int, chosen: int, tokens: int) -> None:
    model = Transformer(olmoe(experts=experts, experts_per_token=chosen, layers=1), force_balanced=True)
    initialize(model, seed=0, std=0.5)
    x_TH = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(0))
    weights_TK, indices_TK, stats = model.blocks[0].moe.router(x_TH)
    assert stats.counts_E.tolist() == [tokens * chosen / experts] * experts
    assert all(len(set(row)) == chosen for row in indices_TK.tolist())
    probabilities_TE = (x_TH @ model.blocks[0].moe.router.weight.T).softmax(-1)
    torch.testing.assert_close(weights_TK, probabilities_TE.gather(1, indices_TK))
    assert abs(stats.balance_loss() - chosen) < TOLERANCE  # the value for perfectly balanced counts


def test_learned_routing_differs_from_uniform() -> None:
    learned = random_model(olmoe())
    uniform = Transformer(learned.config, force_balanced=True)
    uniform.load_state_dict(learned.state_dict())
    tokens_BS = torch.arange(16)[None]
    assert not torch.allclose(learned(tokens_BS), uniform(tokens_BS))
