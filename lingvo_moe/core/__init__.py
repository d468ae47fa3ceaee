"""Words that all other packages use: axes, errors, sizes, random numbers, weights, configurations, the registry.

Imports nothing of lingvo_moe outside itself; anyone may import it.
"""
