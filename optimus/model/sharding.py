"""How each parameter may be split: which tensor dim over which mesh axis. Data only; `parallel` applies it.

A projection's outputs are split over one axis of the tensor-parallel grid and its inputs over the other. Projections
alternate: what leaves the residual stream has its outputs over `tp_out`, what returns to it is 'transposed' (AxoNN, section
5.1.1). So the residual stream's columns lie over `tp_in`, heads and feed-forward columns over `tp_out`; with `tp_in` 1 this
is Megatron-LM. Keys are ends of parameter names.
"""

SPLITS: dict[str, tuple[tuple[int, str], ...]] = {
    "embedding.weight": ((0, "tp_out"), (1, "tp_in")),
    "head.weight": ((0, "tp_out"), (1, "tp_in")),
    "attention.qkv.weight": ((1, "tp_out"), (2, "tp_in")),
    "attention.out.weight": ((0, "tp_in"), (1, "tp_out")),
    "attention.q_norm.weight": ((0, "tp_out"),),
    "attention.k_norm.weight": ((0, "tp_out"),),
    "attention_norm.weight": ((0, "tp_in"),),
    "mlp_norm.weight": ((0, "tp_in"),),
    "final_norm.weight": ((0, "tp_in"),),
    "mlp.gate_up.weight": ((1, "tp_out"), (2, "tp_in")),
    "mlp.down.weight": ((0, "tp_in"), (1, "tp_out")),
    "experts.gate_up": ((0, "ep"), (2, "etp")),
    "experts.down": ((0, "ep"), (2, "etp")),
}

# Any number of rows may be on a rank: tokens have nothing in common.
VOCABULARY = ("embedding.weight", "head.weight")
# What is applied to the residual stream, token by token: each rank has other tokens with sequence parallelism.
ON_ROWS = ("attention_norm.weight", "mlp_norm.weight", "final_norm.weight")
# What is applied to whole tokens, each on one rank, unless tokens are duplicated.
ON_TOKENS = ("router.weight",)
EXPERTS = ("experts.gate_up", "experts.down")


def splits_of(name: str) -> tuple[tuple[int, str], ...]:
    """The splits of the parameter `name`; none for what is whole everywhere."""
    return next((splits for end, splits in SPLITS.items() if f".{name}".endswith(f".{end}")), ())


def ends_with(name: str, ends: tuple[str, ...]) -> bool:
    """Whether `name` is one of these parameters of some module."""
    return any(f".{name}".endswith(f".{end}") for end in ends)
