"""Facts about causal language models of `transformers` that their authors do not publish, each of
them proved on a small twin."""
