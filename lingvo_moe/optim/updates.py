"""Update of a state by gradients: of tensors, to a new state, or of variables in place where the backend says so."""

import collections
import math
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from lingvo_moe import xla_sharding
from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.ops import backend
from lingvo_moe.optim.cpu.in_place import InPlaceUpdates
from lingvo_moe.optim.optimizer import Optimizer, clip_by_global_norm

Specs = Mapping[str, WeightSpec]  # by flat name

_LARGE = 2**24  # elements of a weight above which another reading of it costs more than kernels of its own


def update(
  optimizer: Optimizer,
  state: dict[str, Any],
  grads: Mapping[str, Any],
  specs: tuple[Specs, Specs, Specs],
  rate: tf.Tensor,
  clip_norm: float = 0.0,
) -> tuple[dict[str, Any], tf.Tensor]:
  """State after an update, and the global norm of the gradients before clipping.

  Args:
    optimizer: rule of the update.
    state: that of a Program; of a backend that updates in place, variables, and maybe 'copies' of some weights in the
      types in which the model uses them. The same state is then returned.
    grads: by name of the weight, stored as for an update; or as an update in place takes them.
    specs: those of all weights, of those that are trained, and of the optimizer slots.
    rate: learning rate.
    clip_norm: largest global norm of the gradients; 0: no limit.
  """
  weight_specs, trained_specs, slot_specs = specs
  step = tf.convert_to_tensor(state['step'])
  balanced = {
    name: _balanced(tf.convert_to_tensor(state['weights'][name]), grads[name], spec.balance_rate)
    for name, spec in trained_specs.items()
    if spec.balance_rate
  }
  grads, trained_specs = ({n: x for n, x in named.items() if n not in balanced} for named in (grads, trained_specs))
  if backend.current().updates_in_place:
    norm = InPlaceUpdates(optimizer).apply(grads, state, trained_specs, step, rate, clip_norm)
    for name, bias in balanced.items():
      state['weights'][name].assign(bias)
    state['step'].assign_add(1)
    return state, norm
  weights = stored(state['weights'], weight_specs)
  old_slots = stored(state['slots'], slot_specs)
  parts = stored({name: weights[name] for name in trained_specs}, weight_specs, update=True)
  norm = None
  if clip_norm:
    grads, norm = clip_by_global_norm(grads, clip_norm)
  updates = {}
  for names in _alike(trained_specs):
    spec = trained_specs[names[0]]
    slots = [{slot: old_slots[f'{name}/{slot}'] for slot in optimizer.slots(spec)} for name in names]
    of_each = [grads[name] for name in names], slots, [parts[name] for name in names]
    updates |= zip(names, optimizer.update_alike(*of_each, spec, step, rate), strict=True)
  if norm is None:
    norm = tf.sqrt(tf.add_n([update.square for update in updates.values()]))
  updated = {name: update.weight for name, update in updates.items()} | balanced
  updated = stored(updated, weight_specs, update=True)  # then gathered, if split further than weights are
  new_weights = stored({**weights, **updated}, weight_specs)
  new_slots = {f'{name}/{slot}': x for name, update in updates.items() for slot, x in update.slots.items()}
  return {'step': step + 1, 'weights': new_weights, 'slots': stored(new_slots, slot_specs)}, norm


def _balanced(bias: tf.Tensor, load: tf.Tensor, rate: float) -> tf.Tensor:
  """Bias of every expert [..., E] after an update, by the load of each expert since the last one."""
  load = tf.cast(load, tf.float32)
  return bias + rate * tf.sign(tf.reduce_mean(load, axis=-1, keepdims=True) - load)


def _alike(specs: Specs) -> list[list[str]]:
  """Groups of names whose weights the backend updates at once, of equal size as far as may be; else each name alone.

  Scanned stacks and weights of experts are few, and large: at once, they take more memory traffic.
  """
  most = backend.current().updates_at_once
  alike = collections.defaultdict(list)
  for name, spec in specs.items():
    large = 'L' in spec.dims or math.prod(spec.shape) > _LARGE
    alike[name if large else (spec.shape, spec.dims, spec.factored, spec.dtype)].append(name)
  counts = ((names, -(-len(names) // most)) for names in alike.values())
  return [names[i::count] for names, count in counts for i in range(count)]


def stored(values: Mapping[str, Any], specs: Specs, update: bool = False) -> dict[str, tf.Tensor]:
  """Converts values to tensors, annotated with the split in which devices store or, with `update`, update them."""
  with tf.name_scope('state'):
    tensors = {name: tf.convert_to_tensor(value) for name, value in values.items()}
    return {name: xla_sharding.store(x, specs[name].dims, update or specs[name].slot) for name, x in tensors.items()}
