"""Benchmarks of tools/bench.py: one measurement per file, the clock that they share, and comparisons of results."""
