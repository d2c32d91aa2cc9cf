"""Causal language models of `transformers` and of plugins."""
