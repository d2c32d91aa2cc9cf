"""Starting and ending the ranks of a run: `here.py` first, then `local.py` (this machine) or `nodes.py`, and `rank.py`."""
