"""Benchmarks of tools/bench.py: steps of a model, a MoE layer, input, attention of beam search, engines, commits."""
