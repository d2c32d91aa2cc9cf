"""Low-rank factors in checkpoints: `model.X.lora_b` and `model.X.lora_a` beside the frozen `model.X.weight`.

A run that resumes reads all three. All other readers of the weight get the sum, zero where the weight is pruned, and no
factors: models, exports, averages, and runs that start from the checkpoint.
"""

_WEIGHT, _FACTORS = ".weight", (".lora_b", ".lora_a")


def factors_of(key: str) -> tuple[str, ...]:
    """Returns the keys of a weight's possible factors B and A, or an empty tuple if `key` is no weight."""
    return tuple(key.removesuffix(_WEIGHT) + each for each in _FACTORS) if key.endswith(_WEIGHT) else ()


def is_factor(key: str) -> bool:
    """Returns True if a parameter, by key or name, is a factor."""
    return key.endswith(_FACTORS)
