"""Predicts the step time and the memory of a configuration on a machine, and searches for the fastest layout.

A `Job` combines a run's configuration, a mesh, a `Machine` (the hardware, read from a data file) and a `Profile` (how
well the framework uses the machine). `predict` returns the time of a job's step by term, and the memory of the fullest
rank by kind. `search` finds the fastest layouts. The model of collectives is AxoNN's (dissertation, section 5.1.2).
This package adds models of arithmetic, memory, pipelines and experts.
"""
