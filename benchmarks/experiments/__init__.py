"""Experiments on recipes, which take minutes on two cores: `python -m benchmarks.experiments.NAME --corpus FOLDER`."""
