"""Applying splits and recomputation to a model that knows nothing of them."""
