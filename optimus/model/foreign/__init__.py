"""Analysis of causal language models of `transformers`: facts about a model that its authors do not publish, each of
them proved on a small twin."""
