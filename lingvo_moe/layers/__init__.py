"""Layers: frozen dataclasses that say what weights they own and compute with a `theta` handed to them.

Pure functions. Imports core, xla_sharding and ops; knows no task, runtime, device or flag.
"""
