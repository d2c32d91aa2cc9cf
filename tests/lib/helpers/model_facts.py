"""The table of facts of the causal models of `transformers`: `python -m helpers.model_facts` writes it anew, with types
of models as arguments only their rows.

Each row is of the configuration that the class has by default, which is mostly that of its first published model.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[2] / "model" / "foreign" / "facts.json"
SECONDS = 120  # of one class
# What a class needs beside its defaults, with which it cannot be built or is not causal; by type of model.
SETTINGS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 10
    },
    "dbrx": {"attn_config": {"rope_theta": 500000.0, "kv_n_heads": 8}},
    "deepseek_v2": {"num_experts_per_tok": 6, "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy"},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 16, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
    },
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "xmod": {"default_language": "en_XX"},
}


def kinds() -> dict[str, str]:
    """Returns the types of models that have a causal class, with its name: one type for each class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    found: dict[str, str] = {}
    for kind in sorted(names, key=lambda each: (not each.endswith("_text"), each)):
        if names[kind] not in found.values():
            found[kind] = names[kind]
    return dict(sorted(found.items()))


def configuration(kind: str, **changed: Any) -> Any:
    """Returns the configuration of a type of model, as its class has it by default, but for what is changed."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind]
    decoder = {"is_decoder": True} if getattr(made, "is_decoder", None) is False else {}
    return made(**decoder | SETTINGS.get(kind, {}) | changed)


def row(kind: str) -> dict[str, Any]:
    """Returns the row of a type of model."""
    from optimus.model.foreign.facts import facts_of

    facts = facts_of(configuration(kind))
    factor = f"cap {facts.logit_cap:g}" if facts.logit_cap else f"times {facts.logit_scale:g}"
    return {
        "blocks": facts.blocks,
        "layers": facts.layers,
        "kinds": len({*facts.kinds}),
        "outputs": facts.outputs,
        "stream": list(facts.stream),
        "chain": facts.chain is None,
        "logits": "other" if "logits" in facts.refusals else factor,
        "tied": facts.tied,
        "causal": facts.causal,
        "attention": facts.attention,
        "documents": facts.documents,
        "position_ids": facts.position_ids,
        "plan": facts.shares["plan"],
        "proof": facts.shares["proof"],
        "divided": facts.shares["both"],
        "ways": list(facts.ways),
        "router": facts.router and facts.router.score,
        "untrained": len(facts.untrained),
        "no_initial": len(facts.no_initial),
        "refusals": sorted(facts.refusals),
    }


def read() -> dict[str, Any]:
    """Returns the table: the version of `transformers`, rows by type, and why other types have none."""
    return json.loads(FILE.read_text(encoding="utf-8"))


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raises `TimeoutError` after so many seconds."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main(chosen: list[str]) -> None:
    """Writes the table: all rows, or the chosen ones anew."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch
    import transformers

    torch.set_num_threads(1)
    table = read() if chosen else {"classes": {}, "absent": {}}
    rows, absent = table["classes"], table["absent"]
    for kind, name in kinds().items():
        if chosen and kind not in chosen:
            continue
        rows.pop(kind, None), absent.pop(kind, None)
        try:
            with limited(SECONDS):
                rows[kind] = {"class": name, **row(kind)}
        except Exception as error:
            absent[kind] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        print(kind, absent.get(kind, ""), file=sys.stderr, flush=True)
    lines = ",\n".join(f"  {json.dumps(kind)}: {json.dumps(rows[kind])}" for kind in sorted(rows))
    missing = json.dumps(dict(sorted(absent.items())), indent=1)
    FILE.parent.mkdir(parents=True, exist_ok=True)
    text = f'{{"transformers": "{transformers.__version__}",\n"classes": {{\n{lines}\n}},\n"absent": {missing}}}\n'
    FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
