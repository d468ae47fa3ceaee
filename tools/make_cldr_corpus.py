#!/usr/bin/env python
"""python tools/make_cldr_corpus.py: the command `lingvo-moe cldr`; see lingvo_moe/commands/cldr.py, or --help."""

from lingvo_moe.commands import cldr

if __name__ == '__main__':
  cldr.command()
