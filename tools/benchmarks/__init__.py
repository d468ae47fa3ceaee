"""Benchmarks of tools/bench.py: one MoE layer, the input pipeline, attention of beam search, and two commits."""
