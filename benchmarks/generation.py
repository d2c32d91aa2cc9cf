"""Generation of many texts together, against one at a time and against `transformers`' `generate` on the same model.

All contestants continue the same prompts of 8 to 64 random tokens by the same number of greedy tokens, in fp32, on one
core. `transformers` pads the prompts of its batch on the left. Before the measurement, all must find the same tokens.
"""

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
from typer import Option

from benchmarks.harness import Result, Rounds, take_turns
from optimus.evaluation.generation import Generation, Request
from optimus.hub.exporting import export_model
from optimus.model import Transformer
from optimus.model.architecture import ModelConfig
from optimus.model.init import initialize

MODELS: dict[str, dict[str, Any]] = {
    "llama, 58M": {"family": "llama", "hidden": 512, "layers": 8, "heads": 8, "intermediate": 1408, "vocab": 32_000},
    "llama, groups, 28M": {
        "family": "llama",
        "hidden": 384,
        "layers": 8,
        "heads": 6,
        "kv_heads": 2,
        "intermediate": 1024,
        "vocab": 16_000,
    },
    "olmoe, 22M": {
        "family": "olmoe",
        "hidden": 256,
        "layers": 6,
        "heads": 4,
        "intermediate": 128,
        "vocab": 16_000,
        "experts": 16,
        "experts_per_token": 2,
    },
}

_Turn = tuple[float, list[list[int]]]  # tokens per second, and the tokens


def run(
    rounds: Rounds = 3,
    sequences: Annotated[int, Option(help="Sequences that are decoded together.")] = 64,
    tokens: Annotated[int, Option(help="Tokens that each sequence gets.")] = 64,
) -> Result:
    """Returns rows (tokens per second of each contestant and model) and, for each model, the ratios `generation.batch`
    (our batch against one sequence) and `generation.vs_transformers` (our batch against theirs)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows, ratios = [], dict[str, float | None]()
        for name, sizes in MODELS.items():
            contestants = _contestants(ModelConfig.model_validate(sizes), sequences, tokens)
            first = {each: turn() for each, turn in contestants.items()}
            _check_equal(name, {each: found for each, (_, found) in first.items()})
            seen = take_turns(contestants, rounds)
            best = {each: max(speed for speed, _ in turns) for each, turns in seen.items()}
            rows += [{"model": name, "contestant": each, "tokens/s": speed} for each, speed in best.items()]
            ratios[f"generation.batch ({name})"] = best["ours"] / best["ours, one sequence"]
            ratios[f"generation.vs_transformers ({name})"] = best["ours"] / best["transformers"]
    finally:
        torch.set_num_threads(threads)
    return Result(rows, ratios)


def _contestants(config: ModelConfig, sequences: int, tokens: int) -> dict[str, Callable[[], _Turn]]:
    from transformers import AutoModelForCausalLM

    model, draw = Transformer(config), random.Random(0)
    initialize(model, seed=0, std=0.05)
    prompts = [[draw.randrange(config.vocab) for _ in range(draw.randint(8, 64))] for _ in range(sequences)]
    with tempfile.TemporaryDirectory() as folder:
        export_model(model, Path(folder) / "hf", context=256, tokenizer=None, eos_id=None)
        rival = AutoModelForCausalLM.from_pretrained(Path(folder) / "hf", dtype=torch.float32)
    longest = max(map(len, prompts))
    ids_BS = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask_BS = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens, "pad_token_id": 0}

    def ours(count: int) -> _Turn:
        found: list[list[int]] = [[] for _ in range(count)]
        began = time.perf_counter()
        for number, token in Generation(model, [Request(prompt, tokens) for prompt in prompts[:count]], rows=count):
            found[number].append(token)
        return count * tokens / (time.perf_counter() - began), found

    def theirs() -> _Turn:
        began = time.perf_counter()
        found = rival.generate(ids_BS, attention_mask=mask_BS, **options)
        return sequences * tokens / (time.perf_counter() - began), found[:, longest:].tolist()

    return {"ours": lambda: ours(sequences), "ours, one sequence": lambda: ours(1), "transformers": theirs}


def _check_equal(name: str, found: dict[str, list[list[int]]]) -> None:
    """Raises `RuntimeError` unless the contestants' first tokens are equal. Later tokens may differ by rounding, as a
    random model often has two tokens of nearly equal probability."""
    for contestant, rows in found.items():
        for ours, theirs in zip(found["ours"], rows):
            if ours[:4] != theirs[:4]:
                raise RuntimeError(f"{name}: {contestant} continues with {theirs[:4]}, the others with {ours[:4]}")
