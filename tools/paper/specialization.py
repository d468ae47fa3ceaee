"""What experts have learnt: how much a choice tells of language and token, and which languages choose alike.

A token counts 1 in every layer, divided among its choices as the gate weighs them.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lingvo_moe.core import errors
from lingvo_moe.tasks.task import SentenceRouting

try:
  from scipy.cluster import hierarchy
  from scipy.spatial import distance
except ImportError as e:
  raise errors.not_installed('distances between languages need scipy', e, 'figures') from None


class LayerChoices(NamedTuple):
  """Choices of a MoE layer for N tokens, R choices each."""

  experts: np.ndarray  # int [N, R]
  weights: np.ndarray  # float [N, R]; those of a token sum to 1
  languages: np.ndarray  # int [N], places in the list of languages
  pieces: np.ndarray  # int [N], numbers of the tokens' pieces, from 0


class Information(NamedTuple):
  """Information on a token's expert, in nats."""

  entropy: float  # H(expert): log E where all experts are used alike
  language: float  # I(expert; language), adjusted for chance
  token: float  # I(expert; token), adjusted for chance


class Neighbours(NamedTuple):
  """How often the language with the most similar experts has the same label; nan where no language counts."""

  same: float  # share of the languages whose nearest neighbour has their label
  by_chance: float  # the same of a random neighbour
  languages: int  # that count: those with a neighbour of their label


def collect(routed: Mapping[str, Sequence[SentenceRouting]]) -> dict[str, LayerChoices]:
  """Choices of every MoE layer.

  Args:
    routed: sentences of each language; those without tokens add nothing, nor do tokens that no expert took. Of an
      encoder's layer the tokens are those that the encoder reads, of a decoder's those that the decoder reads.
  """
  by_layer: dict[str, list[tuple]] = {}
  numbers: dict[str, int] = {}
  for place, sentences in enumerate(routed.values()):
    for sentence in sentences:
      for name, layer in sentence.layers.items():
        pieces = sentence.source if name.startswith('encoder/') else sentence.target
        ids = [numbers.setdefault(piece, len(numbers)) for piece in pieces]
        by_layer.setdefault(name, []).append(
          (layer.experts, layer.weights, np.full(len(ids), place), np.array(ids, int))
        )

  def joined(parts):
    experts, weights, languages, pieces = (np.concatenate(part) for part in zip(*parts))
    taken = weights.sum(axis=1) > 0
    weights = weights[taken] / weights[taken].sum(axis=1, keepdims=True)
    return LayerChoices(experts[taken], weights, languages[taken], pieces[taken])

  return {name: joined(parts) for name, parts in by_layer.items()}


def counts(labels: np.ndarray, choices: LayerChoices, num_experts: int) -> np.ndarray:
  """Tokens of each label [L] that each expert serves: float [L, E] of labels [N] that are 0 to L - 1."""
  cells = labels[:, np.newaxis] * num_experts + choices.experts
  size = (int(labels.max(initial=-1)) + 1) * num_experts
  return np.bincount(cells.ravel(), choices.weights.ravel(), minlength=size).reshape(-1, num_experts)


def entropy(counted: np.ndarray) -> float:
  """Entropy of a distribution given as counts, in nats."""
  shares = counted[counted > 0] / counted.sum()
  return float(-np.sum(shares * np.log(shares)))


def mutual_information(joint: np.ndarray) -> float:
  """I(row; column) of a table of counts, in nats."""
  return entropy(joint.sum(axis=0)) + entropy(joint.sum(axis=1)) - entropy(joint.ravel())


def information(choices: LayerChoices, num_experts: int, seed: int = 1) -> Information:
  """Information that language and token give on a layer's experts.

  A table of few counts has mutual information by chance, the more the more cells it has. So with C, that of shuffled
  labels, and H, the entropy of experts, I becomes H * (I - C) / (H - C): 0 where labels tell nothing, H where they tell
  all (Vinh et al., 2010, 'Information Theoretic Measures for Clusterings Comparison').
  """
  random = np.random.default_rng(seed)
  all_tokens = counts(np.zeros(len(choices.languages), int), choices, num_experts)
  most = entropy(all_tokens)

  def adjusted(labels):
    told, by_chance = (
      mutual_information(counts(of, choices, num_experts)) for of in (labels, random.permutation(labels))
    )
    return most * (told - by_chance) / (most - by_chance) if most > by_chance else 0.0

  return Information(most, adjusted(choices.languages), adjusted(choices.pieces))


def distances(shares_of_layers: Sequence[np.ndarray]) -> np.ndarray:
  """Distances between languages [P, P], from 0, the same experts, to 1, none in common: over layers, the mean distance
  of Jensen and Shannon between P(expert | language), each [P, E]."""
  own = [distance.pdist(shares, 'jensenshannon') / np.sqrt(np.log(2)) for shares in shares_of_layers]
  # Of equal rows SciPy may take the root of a rounding error below 0.
  return distance.squareform(np.mean(np.nan_to_num(own), axis=0))


def order(distances_PP: np.ndarray) -> list[int]:
  """Rows so that similar ones are side by side: the leaves of a tree of average distances."""
  if len(distances_PP) < 3:
    return list(range(len(distances_PP)))
  flat = distance.squareform(distances_PP, checks=False)
  return hierarchy.leaves_list(hierarchy.linkage(flat, 'average', optimal_ordering=True)).tolist()


def same_neighbour(distances_PP: np.ndarray, labels: Sequence[str], within: Sequence[str] | None = None) -> Neighbours:
  """Whether languages with similar experts have the same label.

  Args:
    distances_PP: between languages.
    labels: of each language; '': not known.
    within: other labels; the neighbours of a language are those that share it.
  """
  both = lambda names: (names[:, np.newaxis] == names) & (names != '')
  others_PP = ~np.eye(len(labels), dtype=bool)
  if within is not None:
    others_PP &= both(np.array(within))
  same_PP = both(np.array(labels)) & others_PP
  counted = same_PP.any(axis=1)
  if not counted.any():
    return Neighbours(float('nan'), float('nan'), 0)
  nearest = np.where(others_PP, distances_PP, np.inf)[counted].argmin(axis=1)
  same_PP, others_PP = same_PP[counted], others_PP[counted]
  by_chance = same_PP.sum(axis=1) / others_PP.sum(axis=1)
  return Neighbours(float(same_PP[np.arange(len(nearest)), nearest].mean()), float(by_chance.mean()), len(nearest))
