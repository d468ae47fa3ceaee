"""Tables of a family: which tensor there is which weight here, and how one becomes the other."""

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from lingvo_moe.addons.interop.config_keys import ACTIVATIONS
from lingvo_moe.core.weights import WeightSpec

ReadRows = Callable[[slice], np.ndarray]  # rows of a table of symbols, [V] or [V, M]


class Symbols(NamedTuple):
  """Order of the symbols of an imported model: the special ones first, as all models here have them."""

  # ids there of pad, of the symbol with which the decoder begins, of eos and unk; -1: it is not there
  special: tuple[int, int, int, int]
  size: int  # number of symbols there
  unknown: int = 0  # number of symbols here, the last ones, that are the unknown one there

  @property
  def theirs(self) -> list[int]:
    """Id there by id here."""
    rest = [i for i in range(self.size) if i not in self.special]
    return [*self.special, *rest, *[self.special[3]] * self.unknown]

  @property
  def masked(self) -> tuple[int, ...]:
    """Ids that no output may have: of symbols that are not there, or are there under another id too."""
    return tuple(sorted(set(range(len(self.theirs))) - set(self.firsts())))

  def inwards(self, read: ReadRows, part: slice = slice(None)) -> np.ndarray:
    """Rows in the order of ids here, or part of them; zeros for a symbol that is not there."""
    return _picked(read, self.theirs[part])

  def outwards(self, read: ReadRows, part: slice = slice(None)) -> np.ndarray:
    """Rows in the order of ids there, or part of them."""
    return _picked(read, self.firsts()[part])

  def firsts(self) -> list[int]:
    """The first id here of each id there, in order."""
    first, theirs = {}, self.theirs
    for here in (0, *range(2, len(theirs)), 1):  # the begin symbol, which is no output, gives way to any other
      first.setdefault(theirs[here], here)
    first.pop(-1, None)
    return [first[there] for there in sorted(first)]


def _picked(read: ReadRows, ids: Sequence[int]) -> np.ndarray:
  """Rows by id, of which those from the least to the greatest are read; zeros for -1."""
  ids = np.asarray(ids)
  least = max(ids.min(), 0)
  picked = read(slice(least, max(ids.max(), least) + 1))[np.maximum(ids - least, 0)]
  picked[ids < 0] = 0
  return picked


@dataclasses.dataclass(frozen=True)
class TensorEntry:
  """A tensor there and the weight here, or the part of it that is an expert's."""

  theirs: str  # name there
  ours: str  # name here, '' for one that has no counterpart: a bias of keys, which softmax cancels
  # 'matrix', [out, in] there and [*in, *out] here; 'same', of the same order; 'symbols', a row a symbol
  kind: str = 'same'
  expert: int | None = None  # number on the first axis of the weight; None: the whole weight
  copies: tuple[str, ...] = ()  # other names of the same tensor there, of which a folder has one or more

  def named(self, names: Collection[str]) -> Self:
    """The entry by that of its names which a folder has."""
    found = [name for name in (self.theirs, *self.copies) if name in names] or [self.theirs]
    return dataclasses.replace(self, theirs=found[0], copies=tuple(found[1:]))

  def inwards(self, tensor: np.ndarray, shape: Sequence[int], symbols: Symbols) -> np.ndarray:
    """The weight, or the expert's part, of this shape."""
    if self.kind == 'matrix':
      tensor = tensor.T
    elif self.kind == 'symbols':
      tensor = symbols.inwards(tensor.reshape(-1, *shape[1:]).__getitem__)
    return tensor.reshape(shape)

  def fits(self, theirs: Sequence[int], shape: Sequence[int], symbols: Symbols) -> bool:
    """Whether a tensor of a shape is the weight, or the expert's part, of this shape here."""
    if self.kind == 'matrix':
      return any(list(theirs) == [math.prod(shape[i:]), math.prod(shape[:i])] for i in range(1, len(shape)))
    there = [n for n in ((symbols.size, *shape[1:]) if self.kind == 'symbols' else shape) if n != 1]
    theirs = [n for n in theirs if n != 1]
    return theirs in (there, [math.prod(there)])

  def shape_there(self, spec: WeightSpec, symbols: Symbols) -> list[int]:
    """Shape of the tensor of a weight, or of an expert's part of it."""
    shape, dims = (spec.shape, spec.dims) if self.expert is None else (spec.shape[1:], spec.dims[1:])
    if self.kind == 'symbols':
      return [symbols.size, *shape[1:]] if len(shape) > 1 else [1, symbols.size]
    if self.kind == 'same':
      return [math.prod(shape)] if self.theirs.endswith('bias') else list(shape)
    at = dims.index(spec.factored[0]) + 1 if spec.factored else 1  # axes of the inputs end here
    return [math.prod(shape[at:]), math.prod(shape[:at])]

  def outwards(self, weight: np.ndarray, shape: Sequence[int], symbols: Symbols) -> np.ndarray:
    """The tensor of this shape."""
    if self.kind == 'matrix':
      weight = weight.reshape(tuple(reversed(shape))).T
    elif self.kind == 'symbols':
      weight = symbols.outwards(weight.__getitem__)
    return np.ascontiguousarray(weight).reshape(shape)


def their_activation(ours: str) -> tuple[bool, str]:
  """Whether an activation here is gated, and its first name there; LookupError where it has none."""
  for name, pair in ACTIVATIONS.items():
    if ours in pair:
      return pair[1] == ours, name
  raise LookupError(ours)


def ours_of(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
  """Values of fields here by those of config.json, for names there and here."""
  return {ours: config[theirs] for theirs, ours in names.items()}


def theirs_of(config: Any, names: Mapping[str, str]) -> dict[str, Any]:
  """Values of config.json by those of a configuration here, for names there and here."""
  return {theirs: getattr(config, ours) for theirs, ours in names.items()}


def linear(
  theirs: str, ours: str, weight: str, bias: str | None = None, expert: int | None = None
) -> Iterator[TensorEntry]:
  """A linear layer: torch's `weight` [out, in] and, unless `bias` is None, `bias` [out]; '' for one that is dropped."""
  yield TensorEntry(f'{theirs}.weight', f'{ours}/{weight}', 'matrix', expert)
  if bias is not None:
    yield TensorEntry(f'{theirs}.bias', bias and f'{ours}/{bias}', 'same', expert)


def norm(theirs: str, ours: str, bias: bool = True) -> Iterator[TensorEntry]:
  """A normalisation: `weight`, and `bias`."""
  yield TensorEntry(f'{theirs}.weight', f'{ours}/scale')
  if bias:
    yield TensorEntry(f'{theirs}.bias', f'{ours}/bias')


class Imported(NamedTuple):
  """A folder's model as a run here: what a family's module makes of it."""

  model: str  # name of the registered class
  values: Mapping[str, Any]  # of its fields, but for those that name vocabularies
  entries: Sequence[TensorEntry]  # tensors there and weights here
  symbols: Symbols  # order of the symbols
  vocabularies: Mapping[str, bytes]  # contents of SentencePiece models by the field that names one
  tokeniser: Sequence[str]  # files of the folder that belong to its vocabulary
  unused: Sequence[str] = ()  # patterns of names of tensors that a folder may hold and the class does not use
  # tensors that a folder may hold, and the class then reads, though they are computed here: arrays of a shape by name
  computed: Mapping[str, Callable[[Sequence[int]], np.ndarray]] = {}
  unread: Sequence[str] = ()  # keys of config.json that the class does not read

  def is_unused(self, name: str) -> bool:
    """Whether the class does not use a tensor of this name."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.unused)
