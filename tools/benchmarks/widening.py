"""Widening: a trained translation model with more features, heads and layers that computes the same function.

Real text can then be timed at any size without training it: translations end where those of a trained model end.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np

from lingvo_moe.core.errors import UserError

if TYPE_CHECKING:
  from lingvo_moe.tasks.mt.mt_config import MtConfig

SIZES = ('model_dim', 'ff_dim', 'num_heads', 'head_dim', 'encoder_layers', 'decoder_layers')
_NOISE = 1e-6  # in place of zeros, which could cost less than other numbers


def check(config: 'MtConfig', wide: 'MtConfig') -> None:
  """Raises UserError unless a dense model can be widened to another, which has at least its sizes."""
  if config.num_experts or wide.num_experts:
    raise UserError(f'a dense model is widened; saw num_experts={max(config.num_experts, wide.num_experts)}')
  if others := [f for f in _differing(config, wide) if f not in SIZES]:
    raise UserError(f'a model is widened by {", ".join(SIZES)}; saw a change of {others[0]}')
  for field in SIZES:
    if getattr(wide, field) < getattr(config, field):
      raise UserError(f'{field} of a wider model is at least {getattr(config, field)}; saw {getattr(wide, field)}')
  if wide.model_dim % config.model_dim:
    raise UserError(f'model_dim of a wider model is a multiple of {config.model_dim}; saw {wide.model_dim}')


def _differing(config: 'MtConfig', wide: 'MtConfig') -> list[str]:
  names = [field.name for field in dataclasses.fields(config)]
  return [name for name in names if getattr(config, name) != getattr(wide, name)]


def widened(config: 'MtConfig', weights: Mapping[str, np.ndarray], wide: 'MtConfig') -> dict[str, np.ndarray]:
  """Weights by name of the wider model, under `positions`, which has each feature of the smaller one several times.

  The features M are repeated r times; what reads them is divided by r. Further heads and features H are zeros, and
  further layers add nothing to their input. Layers normalise their input, so that these need no other change.
  """
  times, rng = wide.model_dim // config.model_dim, np.random.default_rng(0)
  noise = lambda shape: rng.normal(0, _NOISE, shape)
  result = {}
  for name, spec in wide.program().weight_specs.items():
    leaf, is_added = name.rpartition('/')[2], name not in weights
    array = weights[re.sub(r'/layer_\d+/', '/layer_00/', name) if is_added else name]
    for axis, letter in enumerate(spec.dims):
      if letter == 'M':
        array = np.concatenate([array] * times, axis)
      else:
        array = np.pad(array, [(0, spec.shape[axis] - size if a == axis else 0) for a, size in enumerate(array.shape)])
    if leaf in ('wq', 'wk', 'wv', 'wi'):
      array = np.where(array == 0, noise(array.shape), array / times)
    if leaf in ('wq', 'bq'):
      array = array * math.sqrt(wide.head_dim / config.head_dim)
    if leaf == 'table' or name.startswith('decoder/norm/'):  # sqrt(M) of the lookup; features of the output softmax
      array = array / math.sqrt(times)
    if is_added and leaf in ('wo', 'bo'):
      array = noise(array.shape)
    result[name] = array.astype(np.float32)
  return result


@contextlib.contextmanager
def positions(model_dim: int) -> Iterator[None]:
  """Sinusoidal positions of so many features, repeated for a model that has more, in what is traced or exported."""
  import tensorflow as tf

  from lingvo_moe.addons.export import ctranslate2_model
  from lingvo_moe.layers import embedding

  of_fewer = embedding.sinusoidal_positions

  def repeated(positions_BT, wide_dim, endpoint=True):
    return tf.concat([of_fewer(positions_BT, model_dim, endpoint)] * (wide_dim // model_dim), axis=-1)

  with mock.patch.object(embedding, 'sinusoidal_positions', repeated):
    with mock.patch.object(ctranslate2_model, 'sinusoidal_positions', repeated):
      yield
