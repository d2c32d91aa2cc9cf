"""Low-rank factors in checkpoints: `model.X.lora_b` and `model.X.lora_a`, in addition to the frozen `model.X.weight`.

A resumed run reads all three tensors, as does the conversion into one file of tensors. Models, exports, averages and
runs that start from the checkpoint get no factors. Instead, their weight includes the factors' product wherever the
frozen weight is not zero.
"""

_WEIGHT, _FACTORS = ".weight", (".lora_b", ".lora_a")


def factors_of(key: str) -> tuple[str, ...]:
    """Returns the keys that a weight's factors B and A would have, or an empty tuple if `key` is no weight."""
    return tuple(key.removesuffix(_WEIGHT) + each for each in _FACTORS) if key.endswith(_WEIGHT) else ()


def is_factor(key: str) -> bool:
    """Returns True if `key`, the key or the name of a parameter, belongs to a factor."""
    return key.endswith(_FACTORS)
