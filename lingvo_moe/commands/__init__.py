"""Subcommands of lingvo-moe other than jobs, one per file: flags, main, and command() where app.run needs more.

main.py has the table of all subcommands.
"""
