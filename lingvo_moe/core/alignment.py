"""Alignment of the tokens of a text and of its translation."""

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

  def after(self, before: Self | None, begin: int, target_begin: int) -> Self:
    """Alignment of a longer text, given that of what comes before and the places where these sides begin in it."""
    moved = lambda tokens, by: [Token(piece, begin + by, end + by) for piece, begin, end in tokens]
    source, target, points = before or ([], [], [])
    own = [(i + len(source), j + len(target)) for i, j in self.points]
    return Alignment([*source, *moved(self.source, begin)], [*target, *moved(self.target, target_begin)], points + own)

  @property
  def pharaoh(self) -> str:
    """Points in Pharaoh's format: '0-0 1-2'."""
    return ' '.join(f'{source}-{target}' for source, target in self.points)

  @property
  def columns(self) -> list[str]:
    """Source tokens, target tokens and points, as text."""
    return [*(' '.join(token.piece for token in side) for side in self[:2]), self.pharaoh]
