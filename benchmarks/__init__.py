"""Optimus and its rivals, measured in one run: `optimus bench NAME` from a checkout (`commands.py`)."""
