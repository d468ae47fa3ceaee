"""Optimizers (Adafactor, Adam) and learning-rate schedules as in their papers; `cpu/` has their updates for CPUs.

Imports core and ops; programs and runtimes import it, layers do not.
"""
