"""Span corruption (Raffel et al., arXiv 1910.10683, section 3.1.4): random spans of a text, its inputs and its targets.

A share of the tokens is noise, in spans. In the inputs each span is replaced by a sentinel, a symbol of its own; the
targets are each sentinel and the tokens that it replaces. Masks and lengths are those of t5.data.preprocessors:
random_spans_noise_mask and random_spans_helper.
"""

from typing import NamedTuple

import numpy as np

from lingvo_moe.corpora.temperature_sampling import fold
from lingvo_moe.vocab.sentencepiece_vocab import EOS


class Counts(NamedTuple):
  """Noise of a text of so many tokens: they do not depend on chance."""

  tokens: int  # tokens that are noise
  spans: int


class Lengths(NamedTuple):
  """Tokens of a window of the text, and of the inputs and targets made of it, with their ends."""

  window: int
  inputs: int
  targets: int


def counts(length: int, density: float, mean_span: float) -> Counts:
  """Noise of a text of `length` tokens, at least 2, of which at least one is noise and one is not."""
  tokens = min(max(round(length * density), 1), length - 1)
  spans = max(round(tokens / mean_span), 1)
  return Counts(tokens, min(spans, tokens, length - tokens))


def lengths(window: int, density: float, mean_span: float) -> Lengths:
  """Lengths of what is made of a window: a sentinel for each span on both sides, and the end."""
  noise = counts(window, density, mean_span)
  return Lengths(window, window - noise.tokens + noise.spans + 1, noise.tokens + noise.spans + 1)


def lengths_for(inputs: int, density: float, mean_span: float) -> Lengths:
  """Lengths of the longest window whose inputs are no longer than `inputs`; with 512 of T5's noise 568, 512 and 114."""
  window = max(inputs - 1, 2)
  while lengths(window + 1, density, mean_span).inputs <= inputs:
    window += 1
  return lengths(window, density, mean_span)


def random_mask(length: int, noise: Counts, keys_B: np.ndarray) -> np.ndarray:
  """Masks [B, length], true at noise: spans of tokens and noise alternate, tokens first, all divisions as likely.

  Args:
    length: T.
    noise: tokens that are noise, and spans.
    keys_B: random key (uint64) of each row.
  """
  kept_lengths = _segments(length - noise.tokens, noise.spans, fold(keys_B, 'kept'))
  noise_lengths = _segments(noise.tokens, noise.spans, fold(keys_B, 'noise'))
  runs = np.stack([kept_lengths, noise_lengths], axis=-1)
  is_noise = np.broadcast_to([False, True], runs.shape)
  return np.repeat(is_noise.ravel(), runs.ravel()).reshape(len(keys_B), length)


def _segments(items: int, segments: int, keys_B: np.ndarray) -> np.ndarray:
  """Lengths [B, segments] of segments of `items` items in all, none empty."""
  order = np.argsort(fold(keys_B[:, np.newaxis], np.arange(items - 1)), axis=1, kind='stable')
  borders = np.sort(order[:, : segments - 1], axis=1) + 1
  edges = np.pad(borders, [[0, 0], [1, 1]])
  edges[:, -1] = items
  return np.diff(edges, axis=1)


def corrupt(ids_BT: np.ndarray, mask_BT: np.ndarray, first_sentinel: int) -> tuple[np.ndarray, np.ndarray]:
  """(inputs, targets) of rows of a text, both with the end.

  Sentinel k is first_sentinel - k. Where text follows the last span, the targets close with one more sentinel, as in
  the paper's figure 2; the masks of `random_mask` end in noise.

  Args:
    ids_BT: the text.
    mask_BT: true at noise. All rows have as many tokens of noise and as many spans, and end alike.
    first_sentinel: id of the first sentinel.
  """
  rows = len(ids_BT)
  begins_BT = mask_BT & ~np.pad(mask_BT, [[0, 0], [1, 0]])[:, :-1]
  sentinel_BT = first_sentinel - np.cumsum(begins_BT, axis=1) + 1
  inputs = np.where(mask_BT, sentinel_BT, ids_BT)[~mask_BT | begins_BT]
  both_BT2 = np.stack([begins_BT, mask_BT], axis=-1)  # the sentinel before a token, the token
  targets = np.stack([sentinel_BT, ids_BT], axis=-1)[both_BT2]
  end_B1 = np.full([rows, 1], EOS)
  last = [] if mask_BT[:, -1].all() else [sentinel_BT[:, -1:] - 1]
  as_rows = lambda flat: flat.reshape(rows, -1)
  made = np.concatenate([as_rows(inputs), end_B1], axis=1), np.concatenate([as_rows(targets), *last, end_B1], axis=1)
  return tuple(x.astype(np.int32) for x in made)
