"""What a layer owns, before anything is allocated: shapes, axes and initial values by name."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from lingvo_moe.core import prng
from lingvo_moe.core.axes import check as check_letters

# Nested dicts of something; the '/'-joined paths of its leaves are the names in a checkpoint.
Nested = Mapping[str, Any]
Specs = dict[str, Any]  # nested dicts of WeightSpec: what a layer owns
Theta = Mapping[str, Any]  # nested dicts of tensors: the values of what a layer owns

_LAYER = re.compile(r'layer_(\d+)$')
_LAYERS = re.compile(r'layers_(\d+)of(\d+)$')  # every so manieth layer, from the first number on


@dataclasses.dataclass(frozen=True)
class Normal:
  """Gaussian initial values with this standard deviation."""

  stddev: float

  def __call__(self, key: tf.Tensor, spec: WeightSpec) -> tf.Tensor:
    return tf.cast(prng.normal(key, spec.shape) * self.stddev, spec.dtype)


@dataclasses.dataclass(frozen=True)
class Uniform:
  """Uniform initial values in [-limit, limit)."""

  limit: float

  def __call__(self, key: tf.Tensor, spec: WeightSpec) -> tf.Tensor:
    return tf.cast((2 * prng.uniform(key, spec.shape) - 1) * self.limit, spec.dtype)


@dataclasses.dataclass(frozen=True)
class Constant:
  """Every initial value is the same."""

  value: float

  def __call__(self, key: tf.Tensor, spec: WeightSpec) -> tf.Tensor:
    del key
    return tf.fill(spec.shape, tf.cast(self.value, spec.dtype))


def glorot_uniform(fan_in: int, fan_out: int) -> Uniform:
  """Glorot and Bengio's (2010) uniform initial values: variance 2 / (fan_in + fan_out)."""
  return Uniform(math.sqrt(6.0 / (fan_in + fan_out)))


@dataclasses.dataclass(frozen=True)
class WeightSpec:
  """One logical weight.

  Attributes:
    shape: its sizes.
    dims: its axis letters, one a size: what sharding tables read.
    init: (key, spec) -> initial values.
    factored: the two axis letters over which Adafactor factors the second moment; '' for none.
    dtype: stored type.
  """

  shape: tuple[int, ...]
  dims: str
  init: Callable[[tf.Tensor, WeightSpec], tf.Tensor]
  factored: str = ''
  dtype: tf.DType = tf.float32

  def __post_init__(self):
    check_letters(self.dims)
    if len(self.shape) != len(self.dims):
      raise ValueError(f'weight of shape {self.shape} needs {len(self.shape)} axis letters, not {self.dims!r}')
    if self.factored and (len(self.factored) != 2 or not set(self.factored) <= set(self.dims)):
      raise ValueError(f'factored={self.factored!r} must be two of the axes {self.dims!r}')

  @property
  def size(self) -> int:
    """Number of elements (a Python int: the 1T model's do not fit 32 bits)."""
    return math.prod(self.shape)


def flatten(nested: Nested, prefix: str = '') -> dict[str, Any]:
  """{'a': {'b': x}} -> {'a/b': x}, in order."""
  flat = {}
  for name, value in nested.items():
    path = f'{prefix}/{name}' if prefix else name
    if isinstance(value, Mapping):
      flat.update(flatten(value, path))
    else:
      flat[path] = value
  return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
  """{'a/b': x} -> {'a': {'b': x}}."""
  nested: dict[str, Any] = {}
  for path, value in flat.items():
    *parents, leaf = path.split('/')
    at = nested
    for parent in parents:
      at = at.setdefault(parent, {})
    at[leaf] = value
  return nested


def initialize(specs: Nested, seed: int | tf.Tensor) -> dict[str, tf.Tensor]:
  """Initial values by flat name: each depends on (seed, its name, its position) and nothing else."""
  return {name: spec.init(initial_key(seed, name, spec), spec) for name, spec in flatten(specs).items()}


def initial_key(seed: int | tf.Tensor, name: str, spec: WeightSpec) -> tf.Tensor:
  """The key of a weight's initial values, of the path in its name with a layer as its number; of a stack's, a key a layer."""

  def number(part):
    if match := _LAYER.match(part):
      return int(match[1])
    if match := _LAYERS.match(part):
      return tf.range(spec.shape[0]) * int(match[2]) + int(match[1])
    return part

  return prng.key(seed, 'init', *map(number, name.split('/')))


def stack(specs: Nested, count: int) -> Specs:
  """The weights of so many equal layers as one, on a leading axis L."""
  stacked = lambda s: dataclasses.replace(s, shape=(count, *s.shape), dims='L' + s.dims)
  return unflatten({name: stacked(spec) for name, spec in flatten(specs).items()})


def stack_name(first: int, period: int) -> str:
  """The name of the layers first, first + period, ... where they are stacked."""
  return f'layers_{first}of{period}'


def layer_name(number: int) -> str:
  """The name of a layer by itself."""
  return f'layer_{number:02d}'


def names_by_layer(name: str, count: int) -> list[str] | None:
  """What the first `count` layers of a stacked weight are called by themselves; None if the name is of no stack.

  'encoder/layers_1of2/moe/wi' -> ['encoder/layer_01/moe/wi', 'encoder/layer_03/moe/wi', ...].
  """
  parts = name.split('/')
  for at, part in enumerate(parts):
    if match := _LAYERS.match(part):
      numbers = (int(match[1]) + i * int(match[2]) for i in range(count))
      return ['/'.join([*parts[:at], layer_name(n), *parts[at + 1 :]]) for n in numbers]
  return None


def count(specs: Nested) -> int:
  """Weights in all."""
  return sum(spec.size for spec in flatten(specs).values())
