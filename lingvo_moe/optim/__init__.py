"""Optimizers (Adafactor, Adam) and learning-rate schedules as in their papers, by name in `tables`; `cpu/` for CPUs.

Imports core and ops; programs and runtimes import it, layers do not.
"""
