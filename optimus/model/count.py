"""How many parameters and how much arithmetic an architecture has, from its shapes alone."""

from typing import NamedTuple

from optimus.model.architecture import ModelConfig


class ParameterCount(NamedTuple):
    """`active` counts what one token passes through: of the experts, the chosen ones only."""

    total: int
    active: int


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Exact numbers of parameters, embedding and output layer included."""
    h, i = config.hidden, config.intermediate
    attention, expert = 4 * h * h, 3 * h * i
    if config.experts is not None and config.experts_per_token is not None:
        norms = 4 * h
        fixed = attention + norms + h * config.experts
        total, active = fixed + config.experts * expert, fixed + config.experts_per_token * expert
        final_norm = h
    else:
        total = active = attention + expert
        final_norm = 0
    outside = config.vocab * h * (1 if config.tie_embeddings else 2) + final_norm
    return ParameterCount(config.layers * total + outside, config.layers * active + outside)


def flops_per_token(config: ModelConfig, context: int) -> float:
    """Floating point operations of forward and backward per token (PaLM, appendix B; backward twice the forward).

    6 per active weight of a matrix product (the input embedding is a look-up), and 12 L H S for the attention scores over a
    whole square, as is usual for model-FLOP utilisation.
    """
    active = count_parameters(config).active
    look_up = 0 if config.tie_embeddings else config.vocab * config.hidden
    return 6.0 * (active - look_up) + 12.0 * config.layers * config.hidden * context
