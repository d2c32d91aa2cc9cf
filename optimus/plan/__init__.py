"""Predicts the step time and the memory of a configuration on a machine, and searches for the fastest layout.

The model of collectives is AxoNN's (dissertation, section 5.1.2).
"""
