"""LoRA: low-rank adapters, which are trained in place of the matrices that they adapt (Hu et al., arXiv 2106.09685)."""

import dataclasses
import fnmatch
import math
import string
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.weights import Constant, Normal, WeightSpec

_PREFIX = 'lora/'  # begins the names of adapters: lora/decoder/layer_00/attention/wq/a, and b


@dataclasses.dataclass(frozen=True)
class Lora:
  """Low-rank adapters: W + A B alpha / rank in place of a matrix W, which stays as it is while A and B are trained.

  A maps the inputs of the matrix to R features, and B those to its outputs. Layers (axis L) and experts (E) have
  adapters of their own: experts [E, M, H] have A [E, M, R] and B [E, R, H]. A begins normal with variance 1 / inputs,
  and B as zeros, so that a model begins as it was.
  """

  rank: int  # R
  alpha: float  # R times the scale
  matrices: tuple[str, ...]  # patterns of the ends of names, such as 'wq' or 'decoder/*/attention/w?'

  def specs(self, weights: Mapping[str, WeightSpec]) -> dict[str, WeightSpec]:
    """Specs of the adapters of a model with these weights; UserError where a pattern or the rank does not fit."""
    adapters, unused = {}, set(self.matrices)
    matrices = {name: spec for name, spec in weights.items() if spec.factored}
    for name, spec in matrices.items():
      layers = weights_lib.names_by_layer(name, spec.shape[0]) or [name]
      layer_patterns = [{p for p in self.matrices if fnmatch.fnmatchcase(f'/{layer}', f'*/{p}')} for layer in layers]
      unused -= set.union(*layer_patterns)
      if all(layer_patterns):
        adapters |= self._adapter(name, spec)
      elif any(layer_patterns):
        raise UserError(f'with scan_layers a pattern names all layers of a block or none; saw some of {name}')
    if unused or not adapters:
      ends = ', '.join(dict.fromkeys(name.rpartition('/')[2] for name in matrices))
      raise UserError(f'{min(unused, default="")!r} is the end of the name of no matrix; names end in {ends}')
    return adapters

  def _adapter(self, name: str, spec: WeightSpec) -> dict[str, WeightSpec]:
    batch = len(spec.dims) - len(spec.dims.lstrip('LE'))
    at = spec.dims.index(spec.factored[0]) + 1  # axes of the inputs end here
    inputs, outputs = math.prod(spec.shape[batch:at]), math.prod(spec.shape[at:])
    if self.rank >= min(inputs, outputs):
      raise UserError(f'adapters are thinner than {name} of {inputs} x {outputs}; saw rank {self.rank}: lower it')
    a, b = (*spec.shape[:at], self.rank), (*spec.shape[:batch], self.rank, *spec.shape[at:])
    return {
      part(name, 'a'): WeightSpec(a, f'{spec.dims[:at]}R', Normal(inputs**-0.5), float32=True),
      part(name, 'b'): WeightSpec(b, f'{spec.dims[:batch]}R{spec.dims[at:]}', Constant(0.0), float32=True),
    }

  def product(self, a: Any, b: Any, rank: int) -> tf.Tensor:
    """Product A B alpha / self.rank, for a matrix of `rank` axes."""
    axes, inputs, batch = string.ascii_lowercase[:rank], len(a.shape) - 1, shared_axes(a, b, rank)
    product = tf.einsum(f'{axes[:inputs]}z,{axes[:batch]}z{axes[inputs:]}->{axes}', a, b)
    return product * (self.alpha / self.rank)

  def merged(self, weights: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Weights of a model with the products of their adapters added."""
    merged = {name: weight for name, weight in weights.items() if not is_adapter(name)}
    for name, weight in merged.items():
      if (a := weights.get(part(name, 'a'))) is not None:
        merged[name] = weight + tf.cast(self.product(a, weights[part(name, 'b')], weight.shape.rank), weight.dtype)
    return merged


def is_adapter(name: str) -> bool:
  """Whether a weight of this name is a part of an adapter."""
  return name.startswith(_PREFIX)


def part(name: str, letter: str) -> str:
  """Name of A ('a') or B ('b') of the adapter of a weight."""
  return f'{_PREFIX}{name}/{letter}'


def shared_axes(a: Any, b: Any, rank: int) -> int:
  """Number of axes, of layers and experts, that A and B share with their matrix, which has `rank` axes."""
  return len(a.shape) + len(b.shape) - 2 - rank
