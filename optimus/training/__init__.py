"""The training run: checks before it, the step, the loop, the hooks around it."""
