"""The Mixture-of-Experts feed-forward layer: router, balance losses, experts."""
