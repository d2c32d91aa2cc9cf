"""Hooks around the training steps, one per file; `chosen.py` selects those of a run. See `training/trainer.py`."""
