"""Hooks around the training steps. `chosen.py` selects the library's hooks for a run. See `training/trainer.py`."""
