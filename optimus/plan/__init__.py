"""Choose and predict a configuration before the machine is rented.

A run is described by three things that know nothing of each other: a `ModelConfig` (what is trained), a `Setting` (how it
is divided over ranks and in what precision), and a `Machine` (what it runs on, a file of data). A `Profile` says how well
the framework uses a machine. From these `predict` says how long a step takes and how much memory it needs, term by term;
`search` tries all settings that can be. The model is AxoNN's (dissertation, section 5.1.2) for collectives, extended to
arithmetic, memory, pipelines and experts.
"""
