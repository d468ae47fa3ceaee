"""What a vocabulary is to those who keep ids of text."""

from typing import Protocol


class Tokeniser(Protocol):
  """Vocabulary: turns text into ids."""

  size: int  # number of ids, special ones included
  fingerprint: str  # of everything that the ids depend on
