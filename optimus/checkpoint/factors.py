"""Low-rank factors in checkpoints, with the keys `model.X.lora_b` and `model.X.lora_a`."""

_WEIGHT, _FACTORS = ".weight", (".lora_b", ".lora_a")


def factors_of(key: str) -> tuple[str, ...]:
    """Returns the keys that a weight's factors B and A would have, or an empty tuple if `key` is no weight."""
    return tuple(key.removesuffix(_WEIGHT) + each for each in _FACTORS) if key.endswith(_WEIGHT) else ()


def is_factor(key: str) -> bool:
    """Returns True if `key` is the checkpoint key or the parameter name of a low-rank factor."""
    return key.endswith(_FACTORS)
