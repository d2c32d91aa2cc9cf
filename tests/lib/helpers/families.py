"""The smallest model of every family."""

from optimus.model.families import families

SIZES = {"hidden": 32, "layers": 2, "heads": 2, "intermediate": 24, "vocab": 48}
SPARSE = {"experts": 4, "experts_per_token": 2}
LATENT = {"keys": 8, "rotary": 4, "value": 6}


def needed(name: str) -> dict[str, object]:
    """Returns the fields, besides sizes, that a model of the family needs."""
    fields = families()[name].fields
    windows = {"window": 8} if "window" in fields else {}
    given = {"head_size": 16} if "head_size" in fields else {}
    given |= {"query_scale": 8} if "query_scale" in fields else {}
    learned = {"learned_positions": 64} if "learned_positions" in fields else {}
    latent = {"latent": LATENT, "head_size": 6, "shared_experts": 1} if "latent" in fields else {}
    sparse = SPARSE | ({"experts_per_token": 1} if name == "pr_moe" else {})
    return given | windows | learned | latent | (sparse if "experts" in fields else {})
