"""Checkpoints, which a rename completes, and whose tensors `Reader` reads with checksums.

Start with `folder.py`.
"""
