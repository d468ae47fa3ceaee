"""Target text that a vocabulary cannot write, and the ceiling that it puts on BLEU and chrF."""

import collections
import itertools
import re
import sys
import unicodedata
from collections.abc import Sequence

from lingvo_moe.core.errors import plural
from lingvo_moe.corpora import text
from lingvo_moe.corpora.parallel import Pair
from lingvo_moe.vocab.sentencepiece_vocab import TaggedVocab

_LINES = 10_000  # of targets that are tried


def unwritten(vocab: TaggedVocab, pairs: Sequence[Pair]) -> str:
  """Target text that a vocabulary cannot write, and the ceiling that it puts on BLEU and chrF; '' for none.

  Says how many of the first target lines are not written as they are, with the way out. Runs of spaces (U+0020) count
  as one space, as SentencePiece has it.
  """
  from lingvo_moe.tasks.mt import scoring  # imports sacreBLEU

  each = -(-_LINES // len(pairs))
  lines = [line for pair in pairs for line in itertools.islice(text.lines(pair.target_files), each)]
  written = vocab.written(lines)
  lost = [line for line, back in zip(lines, written, strict=True) if back != re.sub(' +', ' ', line).strip(' ')]
  if not lost:
    return ''
  languages = {pair.target for pair in pairs}
  copied = scoring.References(written, lines, languages.pop() if len(languages) == 1 else '').copy
  way_out = 'leave those characters out of the text'
  if vocab.normalization != 'identity':
    way_out = 'identity writes all: lingvo-moe vocab --normalization=identity, or --set target_normalization=identity'
  return (
    f'{len(lost):,} of {plural(len(lines), "target line")} cannot be written with {vocab.path} (rule: '
    f'{vocab.normalization}){_example(vocab, lost)}; a perfect model gets BLEU {copied["bleu"]:.1f} and chrF '
    f'{copied["chrf"]:.1f}: {way_out}'
  )


def warn(vocab: TaggedVocab, pairs: Sequence[Pair]) -> None:
  """Prints what `unwritten` says, if it says anything."""
  if warning := unwritten(vocab, pairs):
    print(warning, file=sys.stderr)


def _example(vocab: TaggedVocab, lines: Sequence[str]) -> str:
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
