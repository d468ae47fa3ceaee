"""Samples: how texts are drawn, and the text of continuations of a language model while it is drawn."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from lingvo_moe.core import hash32
from lingvo_moe.core.errors import UserError, shown

_ENDS = 2, 0  # eos and pad, after which no byte completes a character


LEAST_TEMPERATURE = 2.0**-126  # the least normal float32: smaller ones are divided by as 0


class Sampling(NamedTuple):
  """Values for drawing a text, by the names of a model's fields."""

  sample_temperature: float  # divides the logits; 0: the likeliest symbols (greedy)
  top_k: int
  top_p: float
  sample_seed: int
  max_new_tokens: int = 0  # of a continuation; a translation's length is limited by its source

  def changed(self, chosen: Mapping[str, Any], search: str) -> Self:
    """Values with the chosen ones in their place; UserError for one that is out of its range, or not of the search."""
    ranges = {
      'sample_temperature': (int | float, 0, 1e6),
      'top_k': (int, 0, 2**31 - 1),
      'top_p': (int | float, 1e-6, 1),
      'sample_seed': (int, 0, 2**31 - 1),
      'max_new_tokens': (int, 1, self.max_new_tokens),
    }
    for name, value in chosen.items():
      if name not in ranges:
        raise UserError(f'a continuation has no {name}; there are {", ".join(ranges)}')
      kind, least, most = ranges[name]
      if search == 'beam' and name != 'max_new_tokens':
        raise UserError(f'beam search draws no samples; saw {name}: leave it out, or choose search=sample')
      if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:
        what = 'a whole number' if kind is int else 'a number'
        raise UserError(f'{name} must be {what} from {least} to {most}; saw {shown(value):.60}')
    return self._replace(**chosen)


class Request(NamedTuple):
  """Prompt, and how it is continued."""

  prompt: str
  sampling: Sampling
  number: int = 0  # a sample depends on it and on the seed
  # Called with each piece of the first continuation's text; returns whether to go on. Pieces may be empty.
  listen: Callable[[str], bool] | None = None

  @classmethod
  def of_text(cls, text: str, sampling: Sampling) -> Self:
    """Request for samples that depend on the text and the seed alone."""
    return cls(text, sampling, zlib.crc32(text.encode()))


class Listeners:
  """Listeners of the requests of a batch: they get text as it is drawn, and say which continuations go on."""

  def __init__(self, requests: Sequence[Request], decode: Callable[[Sequence[int]], str]) -> None:
    self._requests, self._decode = requests, decode
    self._ids: list[list[int]] = [[] for _ in requests]
    self._sent = [0] * len(requests)  # characters

  def __call__(self, rows_B: np.ndarray, symbols_BW: np.ndarray) -> np.ndarray:
    """Whether each row goes on, given its number and the symbols just drawn; pad where a continuation has ended."""
    drawn = zip(rows_B, symbols_BW, strict=True)
    return np.array([not symbols.any() or self._tell(row, symbols) for row, symbols in drawn], bool)

  def _tell(self, row: int, symbols_W: np.ndarray) -> bool:
    if (listen := self._requests[row].listen) is None:
      return True
    self._ids[row].append(int(symbols_W[0]))
    text = self._decode(self._ids[row])
    return self._send(row, text if symbols_W[0] in _ENDS else text.rstrip('\ufffd'), listen)

  def _send(self, row: int, text: str, listen: Callable[[str], bool]) -> bool:
    begin, self._sent[row] = self._sent[row], max(self._sent[row], len(text))
    return listen(text[begin:])

  def finish(self, texts: Sequence[str]) -> None:
    """Sends what is left of each first continuation, of which this is the text."""
    for row, (request, text) in enumerate(zip(self._requests, texts, strict=True)):
      if request.listen:
        self._send(row, text, request.listen)


def by_row(requests: Sequence[Request], copies: int) -> dict[str, np.ndarray]:
  """Values of requests as arrays [B], and random `keys` [B, W] of W = `copies` samples of each."""
  column = lambda name, kind: np.array([getattr(request.sampling, name) for request in requests], kind)
  return {
    'temperature': column('sample_temperature', np.float32),
    'top_k': column('top_k', np.int32),
    'top_p': column('top_p', np.float32),
    'limits': column('max_new_tokens', np.int32),
    'keys': np.stack([keys(r.sampling.sample_seed, copies, r.number) for r in requests]),
  }


def keys(seed: int, copies: int, number: int) -> np.ndarray:
  """Random keys, uint32, of `copies` samples of the prompt of this number."""
  key = hash32.fold(hash32.fold(hash32.fold(0, seed), 'sample'), number)
  return hash32.fold(key, np.arange(copies, dtype=np.uint32))
