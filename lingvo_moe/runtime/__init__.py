"""Runtimes: how a program's pure functions are run. Each has the same small interface."""
