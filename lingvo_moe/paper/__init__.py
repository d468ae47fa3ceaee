"""GShard (arXiv 2006.16668) held against this zoo: its numbers, its operators, its tables and figures."""
