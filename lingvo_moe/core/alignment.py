"""Alignment of the tokens of a text and of its translation."""

from collections.abc import Iterable
from typing import NamedTuple, Self

import numpy as np


class Token(NamedTuple):
  """Token of a text, and its place there: text[begin:end]."""

  piece: str  # as the vocabulary has it: '\u2581dog'
  begin: int
  end: int


class Alignment(NamedTuple):
  """Alignment of a source and its translation, without tags and ends."""

  source: list[Token]
  target: list[Token]
  points: list[tuple[int, int]]  # (number of a source token, number of a target token), by target token

  @classmethod
  def of_attention(cls, source: list[Token], target: list[Token], weights_TU: np.ndarray) -> Self:
    """Each target token with the source token that it attends to most."""
    points = list(zip(weights_TU.argmax(axis=1).tolist(), range(len(target)))) if source and target else []
    return cls(source, target, points)

  @classmethod
  def joined(cls, parts: Iterable[tuple[Self, int, int]]) -> Self:
    """Alignment of a text, given those of its parts and the places where the sides of each begin in it."""
    source, target, points = [], [], []
    for part_alignment, *begins in parts:
      points += [(i + len(source), j + len(target)) for i, j in part_alignment.points]
      for side, tokens, by in zip((source, target), part_alignment, begins):
        side += [Token(piece, begin + by, end + by) for piece, begin, end in tokens]
    return cls(source, target, points)

  def behind(self, place: int) -> Self:
    """The alignment without the source tokens that begin before a place."""
    kept = [i for i, token in enumerate(self.source) if token.begin >= place]
    number = {i: n for n, i in enumerate(kept)}
    points = [(number[i], j) for i, j in self.points if i in number]
    return self._replace(source=[self.source[i] for i in kept], points=points)

  @property
  def links(self) -> list[tuple[int, int, int, int]]:
    """Places of the tokens of each point: begin and end in the source, begin and end in the target."""
    return [(*self.source[i][1:], *self.target[j][1:]) for i, j in self.points]

  @property
  def pharaoh(self) -> str:
    """Points in Pharaoh's format: '0-0 1-2'."""
    return ' '.join(f'{source}-{target}' for source, target in self.points)

  @property
  def columns(self) -> list[str]:
    """Source tokens, target tokens and points, as text."""
    return [*(' '.join(token.piece for token in side) for side in self[:2]), self.pharaoh]
