"""Subcommands of lingvo-moe other than jobs, one per file: flags and main.

main.py has the table of all subcommands.
"""
