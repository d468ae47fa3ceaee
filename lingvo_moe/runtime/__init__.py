"""Runtimes, which run or compile the pure functions of a program; all have the interface of runtime.py.

Imports program.py and the packages below it; no task, run directory or flag.
"""
