"""PlaceholderKeeper: a translator whose model sees no placeholder, and which puts them back where their words went."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from lingvo_moe.core.alignment import Alignment, Token
from lingvo_moe.text import placeholders
from lingvo_moe.text.inline_placement import WORD, Aligned, Atom, placed, without_outer_spaces
from lingvo_moe.text.translator import Answers, Hypothesis, Translator
from lingvo_moe.vocab.language_tags import Languages

_PIECE = re.compile(rf'\s++|{WORD}|.', re.S)
_PUNCTUATION = re.compile(r'[.,:;!?…)\]}>»”’、。，：；！？）」》–—-]')


class _Source(NamedTuple):
  """Text whose placeholders are no text of its atoms."""

  atoms: list[Atom]
  kept: Collection[int]  # numbers of the atoms that are placeholders

  @classmethod
  def of(cls, text: str) -> _Source | None:
    """The text in atoms; None where it has no placeholder."""
    if not (spans := placeholders.with_what_is_beside(text)):
      return None
    atoms, kept, at = [], [], 0
    for begin, end in [*spans, (len(text), len(text))]:
      atoms += [Atom((), ' ' if piece.isspace() else piece, piece) for piece in _PIECE.findall(text, at, begin)]
      if end > begin:
        kept.append(len(atoms))
        atoms.append(Atom((), '', text[begin:end]))
      at = end
    # Punctuation that follows a placeholder follows the word before: a space before it is no text, nor is punctuation
    # at the beginning.
    first = 0  # of the atoms with text; those that lose theirs are passed over
    for i in kept:
      while first < i and not atoms[first].text.strip():
        first += 1
      begins = first == i
      for j in range(i + 1, len(atoms)):
        if not atoms[j].text or not (begins and (atoms[j].is_space or _PUNCTUATION.match(atoms[j].text))):
          break
        atoms[j] = atoms[j]._replace(text='')
      if not begins and i + 1 < len(atoms) and _PUNCTUATION.match(atoms[i + 1].text) and atoms[i - 1].is_space:
        atoms[i - 1] = atoms[i - 1]._replace(text='')
    return cls(without_outer_spaces(atoms), kept)

  @property
  def text(self) -> str:
    """Text that is translated; '' where no letter is left."""
    text = ''.join(atom.text for atom in self.atoms)
    return text if any(map(str.isalpha, text)) else ''

  def translated(self, hypothesis: Hypothesis, alignment: Alignment | None) -> tuple[Hypothesis, int]:
    """Hypothesis with its placeholders, and the number of those that have no place among its words."""
    written, lost = self.atoms, 0
    if self.text and hypothesis.text.strip():
      aligned = Aligned(hypothesis.text, alignment.links if alignment else ())
      written = list(placed(self.atoms, aligned, in_order=False))
    elif self.text:
      written, lost = [atom for i in self.kept for atom in (Atom((), ' '), self.atoms[i])][1:], len(self.kept)
    text = ''.join(atom.raw or atom.text for atom in written)
    if hypothesis.alignment is not None:
      hypothesis = hypothesis._replace(alignment=self._alignment(hypothesis.alignment, hypothesis.text, written))
    return hypothesis._replace(text=text), lost

  def _alignment(self, alignment: Alignment, translation: str, written: Sequence[Atom]) -> Alignment:
    """The alignment with places in the whole texts, and each placeholder as a token."""
    kept = {id(self.atoms[i]): number for number, i in enumerate(self.kept)}
    sides, numbers, numbers_of = [], [], []
    texts = ''.join(atom.text for atom in self.atoms), translation
    for of_text, plain, atoms in zip(alignment[:2], texts, (self.atoms, written)):
      places, at, side, own = [], 0, [], {}  # own: the token of each placeholder, by its number
      for atom in atoms:
        shown = atom.raw or atom.text
        places += [at + i for i, c in enumerate(shown) if atom.text and not c.isspace()]
        if id(atom) in kept:
          own[kept[id(atom)]] = Token(shown, at, at + len(shown))
        at += len(shown)
      before = [0, *itertools.accumulate(not c.isspace() for c in plain)]  # visible characters before each place
      for piece, begin, end in of_text:
        first, last = before[begin], before[end]
        begin = places[first] if first < len(places) else at
        side.append(Token(piece, begin, places[last - 1] + 1 if last > first else begin))
      tokens = [*side, *own.values()]
      order = sorted(range(len(tokens)), key=lambda i: tokens[i].begin)
      sides.append([tokens[i] for i in order])
      numbers.append({old: new for new, old in enumerate(order)})
      numbers_of.append(dict(zip(own, [numbers[-1][len(side) + k] for k in range(len(own))])))
    points = [(numbers[0][i], numbers[1][j]) for i, j in alignment.points]
    points += [(numbers_of[0][i], numbers_of[1][i]) for i in numbers_of[0].keys() & numbers_of[1].keys()]
    return Alignment(*sides, sorted(points, key=lambda point: point[::-1]))


class PlaceholderKeeper(Translator):
  """Translator of sentences that gives another one their text without placeholders.

  Placeholders go beside the words of a translation that come from those beside them, by alignments where the translator
  has some, else in the order of the source. A sentence without any is translated as it is; one without other words not.
  """

  def __init__(self, translator: Translator) -> None:
    self._translator = translator
    self.n_best, self.able, self.unable = translator.n_best, translator.able, translator.unable

  def configured(self, name: str) -> Any:
    return self._translator.configured(name)

  def too_long(self, texts: Sequence[str], target: Languages = None) -> list[int]:
    return self._translator.too_long(_without(map(_Source.of, texts), texts), target)

  def translate(
    self,
    texts: Sequence[str],
    target: Languages = None,
    *arguments: Any,
    keep: Callable[[int, list[Hypothesis]], object] = lambda text, hypotheses: None,
    known: Collection[int] = (),
    **more: Any,
  ) -> Answers:
    sources = list(map(_Source.of, texts))
    if not any(sources):
      return self._translator.translate(texts, target, *arguments, keep=keep, known=known, **more)
    plain = _without(sources, texts)
    keep_plain = lambda i, hypotheses: sources[i] or keep(i, hypotheses)
    answers = self._translator.translate(plain, target, *arguments, keep=keep_plain, known=known, **more)
    flat = [(i, h) for i, s in enumerate(sources) if s and s.text and i not in known for h in answers.hypotheses[i]]
    alignments = [h.alignment for _, h in flat]
    if 'alignments' in self.able and None in alignments:
      alignments = self._translator.align([plain[i] for i, _ in flat], [h.text for _, h in flat], target)
    following, hypotheses, lost = iter(alignments), list(answers.hypotheses), list(answers.lost)
    for i, source in enumerate(sources):
      if source and i not in known:
        found = [source.translated(h, next(following) if source.text else None) for h in hypotheses[i]]
        hypotheses[i] = [h for h, _ in found]
        lost += [i] * found[0][1]
        keep(i, hypotheses[i])
    return answers._replace(hypotheses=hypotheses, lost=lost)


def _without(sources: Iterable[_Source | None], texts: Sequence[str]) -> list[str]:
  """Texts without placeholders."""
  return [text if source is None else source.text for source, text in zip(sources, texts)]
