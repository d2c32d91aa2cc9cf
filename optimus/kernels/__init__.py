"""Kernels: optimized implementations of operations, most of them with a reference implementation."""
