"""Token dispatchers, which send tokens to experts on other ranks, and send results back (expert parallelism).

Expert e of a layer with E experts is on rank e // (E / N) of the N ranks along `ep`, and may be sharded over `etp`. No
dispatcher drops tokens. All ranks must call their layers in the same order.
"""
