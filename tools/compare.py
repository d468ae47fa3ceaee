#!/usr/bin/env python
"""python tools/compare.py: the command `lingvo-moe compare`; see lingvo_moe/commands/compare.py, or --help."""

from lingvo_moe.commands import compare

if __name__ == '__main__':
  compare.command()
