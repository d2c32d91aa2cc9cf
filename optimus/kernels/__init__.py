"""Kernels, one operation per file. A file has the optimized path and a plain reference, both with the same signature."""
