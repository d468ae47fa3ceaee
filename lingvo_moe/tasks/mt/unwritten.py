"""Target text that a vocabulary cannot write, and the ceiling that it puts on BLEU and chrF."""

from __future__ import annotations

import collections
import itertools
import re
import unicodedata
from collections.abc import Sequence

from lingvo_moe.core.errors import counted
from lingvo_moe.corpora import parallel
from lingvo_moe.corpora import text
from lingvo_moe.tasks.mt import scoring
from lingvo_moe.tasks.mt.vocab import Vocab

_LINES = 10_000  # that are tried


def remark(vocab: Vocab, pairs: Sequence[parallel.Pair]) -> str:
  """How many of the first target lines are not written as they are, with the ceiling and the way out; '' for none.

  Runs of spaces (U+0020) count as one space, as SentencePiece has it.

  Args:
    vocab: target vocabulary.
    pairs: of which as many lines each are tried.
  """
  each = -(-_LINES // len(pairs))
  lines = [line for pair in pairs for line in itertools.islice(_targets(pair), each)]
  written = vocab.written(lines)
  lost = [line for line, back in zip(lines, written, strict=True) if back != re.sub(' +', ' ', line).strip(' ')]
  if not lost:
    return ''
  languages = {pair.target for pair in pairs}
  bleu, chrf = scoring.References(written, lines, languages.pop() if len(languages) == 1 else '').copy
  way_out = 'leave those characters out of the text'
  if vocab.normalization != 'identity':
    way_out = 'identity writes all: lingvo-moe vocab --normalization=identity, or --set target_normalization=identity'
  return (
    f'{len(lost):,} of {counted(len(lines), "target line")} cannot be written with {vocab.path} (rule: {vocab.normalization})'
    f'{_example(vocab, lost)}; a perfect model gets BLEU {bleu:.1f} and chrF {chrf:.1f}: {way_out}'
  )


def _targets(pair: parallel.Pair):
  batches = itertools.chain.from_iterable(map(text.line_batches, pair.target_files))
  return (line.decode('utf-8') for batch in batches for line in batch)


def _example(vocab: Vocab, lines: Sequence[str]) -> str:
  """The most frequent character that becomes another; '' where only sequences of characters do."""
  counts = collections.Counter(''.join(lines))
  becomes = dict(zip(counts, vocab.written([f'x{c}x' for c in counts]), strict=True))
  odd = [c for c in counts if becomes[c] != f'x{c}x']
  if not odd:
    return ''
  worst = max(odd, key=counts.get)
  shown = lambda s: s if s.isprintable() else '+'.join(f'U+{ord(c):04X}' for c in s)
  name = ' '.join([f'U+{ord(worst):04X}', unicodedata.name(worst, '')]).strip()
  return f', such as {name}, which becomes {shown(becomes[worst][1:-1])!r}'
