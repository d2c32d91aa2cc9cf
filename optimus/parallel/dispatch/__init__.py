"""Token dispatchers: carry tokens to experts on other ranks and results back (expert parallelism).

Expert e of a layer with E experts is on rank e // (E / N) of the N ranks along `ep`, and may be sharded over `etp`. All
dispatchers are exact and drop no tokens. Each rank calls its layers with its own tokens, in the same order as other ranks.
After the backward pass, an expert's gradient is the sum over the tokens of all N ranks, while all other gradients cover
this rank's tokens only.
"""
