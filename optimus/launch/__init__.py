"""Launch of a run's ranks. Read `here.py` first, then `local.py` (one machine) or `nodes.py` (several), and `rank.py`."""
