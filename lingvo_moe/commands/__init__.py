"""Subcommands of lingvo-moe other than jobs, one per file, with flags, main, and command(), which runs as typed.

tools/*.py of a checkout call the same functions. main.py has the table of all subcommands.
"""
