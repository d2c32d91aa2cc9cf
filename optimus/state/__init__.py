"""The home of the model state: chunks, and the optimizer step on them. Begin with `chunk.py`."""
