"""Both families against `transformers` on random weights: logits, losses, every gradient, greedy text."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from optimus.config import ModelConfig
from optimus.hub.keys import fused, published
from optimus.model import KVCache, Transformer
from optimus.model.init import initialize

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5
BALANCE, Z = 0.01, 0.001


def olmo(**changed: object) -> ModelConfig:
    base = {"family": "olmo", "hidden": 32, "layers": 2, "heads": 4, "intermediate": 48, "vocab": 97}
    return ModelConfig.model_validate(base | changed)


def olmoe(**changed: object) -> ModelConfig:
    return olmo(**{"family": "olmoe", "intermediate": 24, "experts": 8, "experts_per_token": 2} | changed)


CONFIGS = {
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
    """Operations this small only lose time to a second thread, much of it on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random_model(config: ModelConfig, seed: int = 1) -> Transformer:
    """Weights large enough that attention and routing are far from uniform; norms' weights far from one."""
    model = Transformer(config)
    initialize(model, seed=seed, std=0.15)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
        if config.tie_embeddings:
            model.embedding.weight.mul_(0.1)  # else every token's most probable successor is the token itself
    return model


def twin_of(model: Transformer) -> "transformers.PreTrainedModel":
    """The same model in `transformers`, built and filled without the code that exports."""
    config = model.config
    fields = {
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "pad_token_id": None,  # else that row of the embedding has no gradient
        "eos_token_id": None,
        "attn_implementation": "eager",
    }
    if config.family == "olmo":
        twin = transformers.OlmoForCausalLM(transformers.OlmoConfig(**fields))
    else:
        fields |= {"num_experts": config.experts, "num_experts_per_tok": config.experts_per_token}
        fields |= {"norm_topk_prob": config.renormalise}
        fields |= {"rms_norm_eps": config.norm_eps, "experts_implementation": "eager"}
        twin = transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**fields))
    theirs = dict(twin.named_parameters())
    filled = set()
    with torch.no_grad():
        for name, value in in_their_form(model, dict(model.named_parameters())):
            theirs[name].copy_(value)
            filled.add(name)
    assert filled == set(theirs)
    return twin.eval()


def in_their_form(model: Transformer, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors named and shaped like our parameters, under the names and shapes of `transformers`' own parameters."""
    for name, tensor in tensors.items():
        whole = fused(model.config.family, name, tensor)
        yield from [whole] if whole else published(model.config.family, name, tensor)


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

    dense = model.config.family == "olmo"
    output = twin(tokens_BS, labels=tokens_BS, **({} if dense else {"output_router_logits": True}))
    if dense:
        assert losses.balance == losses.z == 0
        cross_entropy, total = output.loss, output.loss
    else:
        cross_entropy = output.loss - twin.router_aux_loss_coef * output.aux_loss
        z = torch.stack([logits.logsumexp(-1).square() for logits in output.router_logits]).mean()
        assert abs(losses.balance - output.aux_loss) < TOLERANCE
        assert abs(losses.z - z) < TOLERANCE
        total = cross_entropy + BALANCE * output.aux_loss + Z * z
    assert abs(losses.cross_entropy - cross_entropy) < TOLERANCE
    total.backward()

    theirs = dict(twin.named_parameters())
    ours = dict(in_their_form(model, {name: p.grad for name, p in model.named_parameters()}))
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert theirs[name].grad.abs().max() > 0, name
        assert (gradient - theirs[name].grad).abs().max() < TOLERANCE, name


def greedy(model: Transformer, prompt_S: Tensor, new: int, cached: bool) -> list[int]:
    """The continuation that always takes the most probable token, with a cache or by starting over each time."""
    tokens, fresh, cache = prompt_S.tolist(), prompt_S.tolist(), KVCache(model.config.layers)
    with torch.no_grad():
        for _ in range(new):
            logits_BSV = model(torch.tensor([fresh]), cache=cache) if cached else model(torch.tensor([tokens]))
            fresh = [int(logits_BSV[0, -1].argmax())]
            tokens += fresh
    return tokens


@pytest.mark.parametrize("name", CONFIGS)
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
    assert cache.length == 12


@pytest.mark.parametrize(("experts", "chosen", "tokens"), [(8, 2, 12), (6, 4, 9), (4, 4, 5), (5, 1, 10)])
def test_uniform_routing_gives_every_expert_the_same_number_of_tokens(experts: int, chosen: int, tokens: int) -> None:
    model = Transformer(olmoe(experts=experts, experts_per_token=chosen, layers=1), routing="uniform")
    initialize(model, seed=0, std=0.5)
    x_TH = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(0))
    weights_TK, indices_TK, stats = model.blocks[0].moe.router(x_TH)
    assert stats.counts_E.tolist() == [tokens * chosen / experts] * experts
    assert all(len(set(row)) == chosen for row in indices_TK.tolist())
    probabilities_TE = (x_TH @ model.blocks[0].moe.router.weight.T).softmax(-1)
    torch.testing.assert_close(weights_TK, probabilities_TE.gather(1, indices_TK))
    assert abs(stats.balance_loss() - chosen) < TOLERANCE  # its value for perfectly balanced counts


def test_learned_routing_differs_from_uniform() -> None:
    learned = random_model(olmoe())
    uniform = Transformer(learned.config, routing="uniform")
    uniform.load_state_dict(learned.state_dict())
    tokens_BS = torch.arange(16)[None]
    assert not torch.allclose(learned(tokens_BS), uniform(tokens_BS))
