"""Operations that a machine may want done its own way.

Imports core and xla_sharding; layers, optimizers and search import it.
"""
