"""Reproduction of the numbers, operators, tables and figures of GShard (arXiv 2006.16668) from compiled programs."""
