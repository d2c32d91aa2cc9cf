"""Kernels: the optimized path of an operation and, for most operations, a plain reference for tests."""
