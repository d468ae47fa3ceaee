"""Layers: frozen dataclasses that specify their weights and compute with a `theta` passed to them.

Pure functions. Imports core, xla_sharding and ops, and no task, runtime, device or flag.
"""
