"""Runtimes: how the pure functions of a program are run. Each has the same small interface (runtime.py).

Imports program.py and what is below it; knows no task, run directory or flag.
"""
