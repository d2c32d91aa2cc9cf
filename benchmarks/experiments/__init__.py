"""Experiments about recipes, each minutes on two cores: `python -m benchmarks.experiments.NAME --corpus FOLDER`."""
