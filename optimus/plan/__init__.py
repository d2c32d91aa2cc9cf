"""Predicts configurations on a machine, and chooses among them, before the machine is rented.

A `Job` is a run on a machine: its configuration, its mesh, a `Machine` (hardware, as a file of data) and a `Profile` (how
well the framework uses the machine). `predict` returns the time of a job's step and the memory that the job needs, term by
term. `search` tries all possible layouts. The model of collectives is AxoNN's (dissertation, section 5.1.2), extended to
arithmetic, memory, pipelines and experts.
"""
