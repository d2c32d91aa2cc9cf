"""What happens around the steps: a hook a file; `chosen.py` has those of a run. See `training/trainer.py`."""
