"""Benchmarks against rivals, as users run them."""
