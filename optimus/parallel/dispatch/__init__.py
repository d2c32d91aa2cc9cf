"""Token dispatchers: how tokens reach experts on other ranks, and the results come back (expert parallelism).

Expert e of a layer with E experts lives on rank e // (E / N) of the N ranks along `ep`, and may be split over `etp`. All
dispatchers are exact and drop no token. Each rank calls its layers with tokens of its own, in the same order as the others.
What autograd then leaves in an expert's gradient is the sum over the tokens of all N ranks, while all other gradients are of
this rank's tokens alone.
"""
