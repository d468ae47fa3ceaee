"""Subcommands of lingvo-moe, one per file, that are no job: each has flags, main, and command(), which runs it as typed.

tools/*.py of a checkout call the same functions. main.py has the table of all subcommands.
"""
