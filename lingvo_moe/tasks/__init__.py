"""Tasks: models with their data, vocabularies and metrics, without training loops or devices.

Imports layers, search, optim and program.py; no runtime and no flag.
"""
