#!/usr/bin/env python
"""python tools/lint_sharding.py: the command `lingvo-moe lint`; see lingvo_moe/commands/lint.py, or --help."""

from lingvo_moe.commands import lint

if __name__ == '__main__':
  lint.command()
