"""The model state in chunks, and the optimizer step on the chunks. Begin with `chunk.py`."""
