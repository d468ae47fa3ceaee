"""Whether two configurations are one function at inference: models are compared, which hold layers of one's own."""

import dataclasses
from typing import Any

from lingvo_moe.config import fields
from lingvo_moe.core.errors import UserError, shown

# Fields that change how a model is trained or computed, not the function that it is.
_OF_TRAINING = (
  'activation_dtype aux_loss_weight batch_tokens capacity_factor eval_batch_tokens expert_output_masking '
  'gate_init_scale label_smoothing num_groups router_z_loss_weight second_choice window z_loss_weight'
).split()
_OF_TEXT = ('begin', 'tag_sides', 'tag_target')  # of a translation model: symbols around a text


def free_fields(config: Any) -> set[str]:
  """Fields that do not change the function that a model is."""
  names = [field.name for field in dataclasses.fields(config)]
  return {*fields.may_change(type(config)), *_OF_TRAINING, *(name for name in names if name.endswith('dropout'))}


def is_same(config: Any, other: Any) -> bool:
  """Whether models of two configurations compute the same from the same weights at inference."""
  free = {name: getattr(other, name) for name in free_fields(config) if hasattr(other, name)}
  text = [[getattr(c, name, None) or None for name in _OF_TEXT] for c in (config, other)]
  alike = dataclasses.replace(config, **free)
  return text[0] == text[1] and alike.model() == other.model()


def differing(config: Any, other: Any) -> str:
  """Fields by which two configurations are other functions, for a message: 'norm=rms'; 'layers of its own' of none."""
  names = [field.name for field in dataclasses.fields(other) if hasattr(config, field.name)]
  values = {name: getattr(config, name) for name in names if name not in free_fields(other)}
  odd = [
    f'{name}={shown(value)}'
    for name, value in values.items()
    if value != getattr(other, name) and _matters(other, name, value)
  ]
  return ', '.join(odd[:4]) + ', ...' * (len(odd) > 4) or 'layers of its own'


def _matters(config: Any, name: str, value: object) -> bool:
  try:
    return not is_same(dataclasses.replace(config, **{name: value}), config)
  except UserError:  # not without another field
    return True
