"""Benchmarks of lingvo-moe bench: one measurement per file, the clock that they share, and comparisons of results."""
