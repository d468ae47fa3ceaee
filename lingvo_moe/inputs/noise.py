"""Noise in training text: case, missing punctuation, typos, dropped words and placeholders to copy.

Each is a pure function of a sentence pair and random numbers. The kinds are those of OpusTrainer (Bogoychev et al.
2023, arXiv:2311.14838), and dropped words.
"""

import random
from collections.abc import Callable

from lingvo_moe.corpora import words as words_lib

Sides = tuple[str, str]  # source and target
Draw = Callable[[int], int]  # draws one of so many numbers from 0 on

_CHARACTERS_A_TYPO = 24
_WORDS_A_DROP = 8


def _case(source: str, target: str, draw: Draw, languages: Sides) -> Sides:
  """Capitals or title case on both sides, or a source in small letters, as their languages have them."""
  change = (words_lib.upper, words_lib.title, None)[draw(3)]
  if change:
    return change(source, languages[0]), change(target, languages[1])
  return words_lib.lower(source, languages[0]), target


def _punctuation(source: str, target: str, draw: Draw) -> Sides:
  """A source without its last punctuation, or without any; what is within words, numbers and links stays."""
  places = words_lib.outer_punctuation(source)
  if draw(2):
    first = len(source.rstrip()) - len(places)
    places = [place for i, place in enumerate(places, first) if place == i]
  left = {*range(len(source))} - {*places}
  return ''.join(source[i] for i in sorted(left)), target


def _typos(source: str, target: str, draw: Draw) -> Sides:
  """A letter in some 24 characters of the source is left out, doubled, exchanged with the next or another.

  Letters move with their marks.
  """
  clusters = words_lib.clusters(source)
  for _ in range(1 + len(clusters) // _CHARACTERS_A_TYPO):
    letters = [i for i, cluster in enumerate(clusters) if words_lib.is_letter(cluster)]
    if letters:
      i, other = letters[draw(len(letters))], clusters[letters[draw(len(letters))]]
      edits = [], [clusters[i]] * 2, [*clusters[i + 1 : i + 2], clusters[i]], [other]
      kind = draw(4)
      clusters[i : i + 1 + (kind == 2)] = edits[kind]
  return ''.join(clusters), target


def _words(source: str, target: str, draw: Draw) -> Sides:
  """One of some 8 words of the source is dropped; one stays."""
  words = words_lib.spaced(source)
  for _ in range(1 + len(words) // _WORDS_A_DROP if len(words) > 1 else 0):
    del words[draw(len(words))]
  return ''.join(words).strip(), target


def _placeholders(source: str, target: str, draw: Draw) -> Sides:
  """The same number, link, name or variable before or after both sides, to be copied."""
  word = ''.join('abcdefghijklmnopqrstuvwxyz0123456789'[draw(36)] for _ in range(3 + draw(6)))
  kinds = f'{{{word}}}', f'<{word}>', f'%{word}%', f'https://{word}.org/{draw(1000)}', f'@{word}', str(draw(10**6))
  placeholder = kinds[draw(len(kinds))]
  if draw(2):
    return f'{source} {placeholder}', f'{target} {placeholder}'
  return f'{placeholder} {source}', f'{placeholder} {target}'


KINDS = {'words': _words, 'typos': _typos, 'punctuation': _punctuation, 'case': _case, 'placeholders': _placeholders}


def add(kind: str, source: str, target: str, key: int, languages: Sides = ('', '')) -> Sides:
  """Source and target, of two languages, with noise of a kind, which is an integer's."""
  drawn = random.Random(key).random  # equal in every version of Python, as its other methods need not be
  draw = lambda count: int(drawn() * count)
  return KINDS[kind](source, target, draw, *[languages] * (kind == 'case'))
