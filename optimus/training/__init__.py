"""The training run: the checks before the first step, the training step, the training loop, and its hooks."""
