#!/usr/bin/env python
"""python tools/train_vocab.py: the command `lingvo-moe vocab`; see lingvo_moe/commands/vocab.py, or --help."""

from lingvo_moe.commands import vocab

if __name__ == '__main__':
  vocab.command()
