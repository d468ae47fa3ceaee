"""Weight specs: the name, shape, axes and initial values of each weight of a layer, before anything is allocated."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_moe.core import prng
from lingvo_moe.core.axes import check as check_letters
from lingvo_moe.core.errors import UserError, closest

# Nested dicts; the '/'-joined path of a leaf is its name in a checkpoint.
Nested = Mapping[str, Any]
Specs = dict[str, Any]  # nested dicts of WeightSpec: the weights of a layer
Theta = Mapping[str, Any]  # nested dicts of tensors: the values of a layer's weights

_LAYER = re.compile(r'layer_(\d+)$')
_LAYERS = re.compile(r'layers_(\d+)of(\d+)$')  # 'layers_FIRSTofPERIOD': layers first, first + period, ...


@dataclasses.dataclass(frozen=True)
class Normal:
  """Normal initial values with mean 0 and this standard deviation."""

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
  """Constant initial values."""

  value: float

  def __call__(self, key: tf.Tensor, spec: WeightSpec) -> tf.Tensor:
    del key
    return tf.fill(spec.shape, tf.cast(self.value, spec.dtype))


@dataclasses.dataclass(frozen=True)
class TruncatedNormal:
  """Normal initial values of this standard deviation, from which those beyond two deviations of the whole are cut."""

  stddev: float

  def __call__(self, key: tf.Tensor, spec: WeightSpec) -> tf.Tensor:
    within = math.erf(math.sqrt(2))  # share of a normal within two deviations
    cut = math.sqrt(1 - 4 / math.sqrt(2 * math.pi) * math.exp(-2) / within)  # deviation of what is left
    x = math.sqrt(2) * tf.math.erfinv((2 * prng.uniform(key, spec.shape) - 1) * within)
    return tf.cast(x * (self.stddev / cut), spec.dtype)


@dataclasses.dataclass(frozen=True)
class Glorot:
  """Glorot uniform initial values of a matrix (Glorot and Bengio, 2010), of variance 2 / (fan_in + fan_out).

  They are times `scale`. Program.init_scale replaces them.
  """

  fan_in: int
  fan_out: int
  scale: float = 1.0

  @property
  def limit(self) -> float:
    return self.scale * math.sqrt(6.0 / (self.fan_in + self.fan_out))

  def __call__(self, key: tf.Tensor, spec: WeightSpec) -> tf.Tensor:
    return Uniform(self.limit)(key, spec)


glorot_uniform = Glorot


def scaled_by_fan_in(specs: dict[str, WeightSpec], scale: float) -> dict[str, WeightSpec]:
  """Flat specs whose Glorot values are truncated normals of deviation sqrt(scale / fan_in), as Switch Transformers'."""
  is_matrix = lambda spec: isinstance(spec.init, Glorot)
  scaled = lambda s: dataclasses.replace(s, init=TruncatedNormal(math.sqrt(scale / s.init.fan_in)))
  return {name: scaled(spec) if is_matrix(spec) else spec for name, spec in specs.items()}


@dataclasses.dataclass(frozen=True)
class WeightSpec:
  """Shape, axes and initial values of one logical weight."""

  shape: tuple[int, ...]
  dims: str  # axis letters, one for each size; sharding rules look them up
  init: Callable[[tf.Tensor, WeightSpec], tf.Tensor]  # function of (key, spec) that returns the initial values
  factored: str = ''  # the two axis letters over which Adafactor factors the second moment; '' for none
  dtype: tf.DType = tf.float32  # in which the weight is stored
  float32: bool = False  # whether it is used in float32, as weights of gates and norms are; see `cast`
  slot: bool = False  # whether it is an optimizer slot, which a mesh may split further (Mesh.split_update)
  # u of a bias that balances experts, whose gradient is their load: an update adds u where the load is below the mean,
  # and subtracts u where it is above (arXiv 2408.15664); 0: a weight that an optimizer updates
  balance_rate: float = 0.0

  def __post_init__(self):
    check_letters(self.dims)
    if len(self.shape) != len(self.dims):
      raise ValueError(f'weight of shape {self.shape} needs {len(self.shape)} axis letters, not {self.dims!r}')
    if self.factored and (len(self.factored) != 2 or not set(self.factored) <= set(self.dims)):
      raise ValueError(f'factored={self.factored!r} must be two of the axes {self.dims!r}')

  @property
  def is_matrix(self) -> bool:
    """Whether this is a matrix, an embedding table or an adapter, also of many layers or experts; else norm or bias."""
    return bool(self.factored) or 'R' in self.dims

  @property
  def size(self) -> int:
    """Number of elements, as a Python int: those of the 1T model exceed 32 bits."""
    return math.prod(self.shape)


def flatten(nested: Nested, prefix: str = '') -> dict[str, Any]:
  """Flattens nested dicts, in order: {'a': {'b': x}} -> {'a/b': x}."""
  flat = {}
  for name, value in nested.items():
    flat |= flatten(value, f'{prefix}{name}/') if isinstance(value, Mapping) else {prefix + name: value}
  return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
  """Nests a flat dict, the inverse of `flatten`: {'a/b': x} -> {'a': {'b': x}}."""
  nested: dict[str, Any] = {}
  for path, value in flat.items():
    *parents, leaf = path.split('/')
    at = nested
    for parent in parents:
      at = at.setdefault(parent, {})
    at[leaf] = value
  return nested


def cast(theta: Theta, specs: Specs, dtype: tf.DType) -> Theta:
  """Casts weights of a layer to the type of its activations, except for those whose spec says float32."""
  flat_specs = flatten(specs)
  used = lambda name, weight: weight if flat_specs[name].float32 else tf.cast(weight, dtype)
  return unflatten({name: used(name, weight) for name, weight in flatten(theta).items()})


def below(names: Iterable[str], paths: Sequence[str]) -> list[str]:
  """Names of weights at paths or below them: 'encoder' has 'encoder/layer_00/ffn/wi', which is a path itself.

  Raises:
    UserError: a path has no weight.
  """
  names = list(names)
  is_below = lambda name, path: f'{name}/'.startswith(f'{path}/')
  for path in (path for path in paths if not any(is_below(name, path) for name in names)):
    known = {'/'.join(name.split('/')[:depth]) for name in names for depth in range(1, name.count('/') + 2)}
    parts = ', '.join(dict.fromkeys(name.split('/')[0] for name in names))
    raise UserError(
      f'{path!r} is no part of the weights; {closest(path, known)} (the parts are {parts}, and parts of these)'
    )
  return [name for name in names if any(is_below(name, path) for path in paths)]


def initialize(specs: Nested, seed: int | tf.Tensor) -> dict[str, tf.Tensor]:
  """Initial values by flat name; each element depends only on (seed, name, position)."""
  return {name: spec.init(initial_key(seed, name, spec), spec) for name, spec in flatten(specs).items()}


def initial_key(seed: int | tf.Tensor, name: str, spec: WeightSpec) -> tf.Tensor:
  """Random key for a weight's initial values, from its path, in which 'layer_03' counts as the number 3.

  For a stacked weight, a vector of the keys that its layers have unstacked.
  """
  path = name.split('/')
  for i, step in enumerate(path):
    if match := _LAYER.match(step):
      path[i] = int(match[1])
    elif match := _LAYERS.match(step):
      path[i] = tf.range(spec.shape[0]) * int(match[2]) + int(match[1])
  return prng.key(seed, 'init', *path)


def stack(specs: Nested, count: int) -> Specs:
  """Specs of `count` equal layers stacked on a leading axis L."""
  stacked = lambda s: dataclasses.replace(s, shape=(count, *s.shape), dims='L' + s.dims)
  return unflatten({name: stacked(spec) for name, spec in flatten(specs).items()})


def stack_name(first: int, period: int) -> str:
  """Name of the stacked layers first, first + period, ...: 'layers_1of2'."""
  return f'layers_{first}of{period}'


def layer_name(number: int) -> str:
  """Name of a single, unstacked layer: 'layer_03'."""
  return f'layer_{number:02d}'


def names_by_layer(name: str, count: int) -> list[str] | None:
  """Unstacked names of the first `count` layers of a stacked weight; None if the weight is not stacked.

  'encoder/layers_1of2/moe/wi' -> ['encoder/layer_01/moe/wi', 'encoder/layer_03/moe/wi', ...].
  """
  path = name.split('/')
  for at, step in enumerate(path):
    if match := _LAYERS.match(step):
      layers = (layer_name(int(match[1]) + i * int(match[2])) for i in range(count))
      return ['/'.join([*path[:at], layer, *path[at + 1 :]]) for layer in layers]
  return None


def count(specs: Nested) -> int:
  """Number of elements of all weights together."""
  return sum(spec.size for spec in flatten(specs).values())
