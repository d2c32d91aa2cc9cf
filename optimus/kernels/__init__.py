"""Kernels, one operation per file: a plain reference and the optimized path, with one signature."""
