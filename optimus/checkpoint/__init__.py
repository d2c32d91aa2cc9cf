"""Checkpoints: writers complete a checkpoint by a rename, and `Reader` checks the checksums of tensors.

Start with `folder.py`.
"""
