"""Tasks: what is computed and on what text, with no loops and no devices.

Imports layers, search, optim and program.py; knows no runtime and no flag.
"""
