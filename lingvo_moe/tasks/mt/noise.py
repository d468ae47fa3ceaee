"""Noise in training text: case, missing punctuation, typos, dropped words and placeholders to copy.

Each is a pure function of a sentence pair and random numbers. The kinds are those of OpusTrainer (Bogoychev et al.
2023, arXiv:2311.14838), and dropped words.
"""

import random
import re
from collections.abc import Callable

Sides = tuple[str, str]  # source and target
Draw = Callable[[int], int]  # draws one of so many numbers from 0 on

_PUNCTUATION = re.compile(r'[^\w\s]+')
_LAST_PUNCTUATION = re.compile(r'[^\w\s]+\s*$')
_LETTERS = re.compile(r'[^\W\d_]')
_CHARACTERS_A_TYPO = 24
_WORDS_A_DROP = 8


def _case(source: str, target: str, draw: Draw) -> Sides:
  """Capitals or title case on both sides, or a source in small letters."""
  change = (str.upper, str.title, None)[draw(3)]
  return (change(source), change(target)) if change else (source.lower(), target)


def _punctuation(source: str, target: str, draw: Draw) -> Sides:
  """A source without its last punctuation, or without any."""
  return (_PUNCTUATION, _LAST_PUNCTUATION)[draw(2)].sub('', source), target


def _typos(source: str, target: str, draw: Draw) -> Sides:
  """A letter in some 24 characters of the source is left out, doubled, exchanged with the next or another."""
  for _ in range(1 + len(source) // _CHARACTERS_A_TYPO):
    letters = [match.start() for match in _LETTERS.finditer(source)]
    if letters:
      i, other = letters[draw(len(letters))], source[letters[draw(len(letters))]]
      edits = '', source[i] * 2, source[i + 1 : i + 2] + source[i], other
      kind = draw(4)
      source = source[:i] + edits[kind] + source[i + 1 + (kind == 2) :]
  return source, target


def _words(source: str, target: str, draw: Draw) -> Sides:
  """One of some 8 words of the source is dropped."""
  words = source.split(' ')
  for _ in range(1 + len(words) // _WORDS_A_DROP if len(words) > 1 else 0):
    del words[draw(len(words))]
  return ' '.join(words), target


def _placeholders(source: str, target: str, draw: Draw) -> Sides:
  """The same number, link, name or variable before or after both sides, to be copied."""
  word = ''.join('abcdefghijklmnopqrstuvwxyz0123456789'[draw(36)] for _ in range(3 + draw(6)))
  kinds = f'{{{word}}}', f'<{word}>', f'%{word}%', f'https://{word}.org/{draw(1000)}', f'@{word}', str(draw(10**6))
  placeholder = kinds[draw(len(kinds))]
  if draw(2):
    return f'{source} {placeholder}', f'{target} {placeholder}'
  return f'{placeholder} {source}', f'{placeholder} {target}'


KINDS = {'words': _words, 'typos': _typos, 'punctuation': _punctuation, 'case': _case, 'placeholders': _placeholders}


def add(kind: str, source: str, target: str, key: int) -> Sides:
  """Source and target with noise of a kind, which is an integer's."""
  drawn = random.Random(key).random  # equal in every version of Python, as its other methods need not be
  return KINDS[kind](source, target, lambda count: int(drawn() * count))
