"""Choose and predict a configuration before the machine is rented.

A `Job` is a run on a machine: its configuration, its mesh, a `Machine` (what it runs on, a file of data) and a `Profile`
(how well the framework uses the machine). From these `predict` says how long a step takes and how much memory it needs, term
by term; `search` tries all layouts that can be. The model is AxoNN's (dissertation, section 5.1.2) for collectives, extended
to arithmetic, memory, pipelines and experts.
"""
