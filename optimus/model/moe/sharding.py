"""How the parameters of a layer may be split: which tensor dim over which mesh axis. Data only; `parallel` applies it."""

SPLITS: dict[str, tuple[tuple[int, str], ...]] = {
    "experts.gate_up": ((0, "ep"),),
    "experts.down": ((0, "ep"),),
}
