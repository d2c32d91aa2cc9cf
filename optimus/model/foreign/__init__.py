"""Causal language models of `transformers` and of plugins, adapted to the library."""
