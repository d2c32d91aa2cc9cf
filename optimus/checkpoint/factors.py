"""Low-rank factors in checkpoints: `model.X.lora_b` and `model.X.lora_a` beside the frozen `model.X.weight`.

A run that goes on reads all three. Whoever else reads the weight gets the sum, zero where it is pruned, and no factors: a
model, an export, an average, a run that begins with it.
"""

_WEIGHT, _FACTORS = ".weight", (".lora_b", ".lora_a")


def factors_of(key: str) -> tuple[str, ...]:
    """The keys that the factors B and A of a weight would have; none, if it is no weight."""
    return tuple(key.removesuffix(_WEIGHT) + each for each in _FACTORS) if key.endswith(_WEIGHT) else ()


def is_factor(key: str) -> bool:
    """Whether a parameter, by key or name, is a factor."""
    return key.endswith(_FACTORS)
