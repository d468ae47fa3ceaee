"""Definitions that every other package uses: axes, errors, sizes, random numbers, weights, configurations, registry.

Imports nothing of lingvo_moe outside itself; anyone may import it.
"""
