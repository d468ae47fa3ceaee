"""Optimizers (Adafactor, Adam) and learning-rate schedules as their papers have them; `cpu/` holds what CPUs like.

Imports core and ops. Programs and runtimes import it; layers do not.
"""
