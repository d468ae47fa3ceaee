"""Rematerialisation: intermediate values of a function are dropped, and recomputed for its gradient.

Chen et al. (2016), 'Training deep nets with sublinear memory cost': more time, less memory.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lingvo_moe import xla_sharding
from lingvo_moe.ops.custom_gradient import pull_back

# 'none': all values are kept; 'block': only the input of each layer, or of each block of a scanned stack; 'attention':
# all values but those inside attention.
POLICIES = ('none', 'block', 'attention')


def rematerialised(function: Callable[..., Any], *args: Any) -> Any:
  """Calls function(*args), of nested tensors and with nested results, and keeps only the arguments for the gradient.

  Values that the function closes over get no gradient.
  """
  flat_args = tf.nest.flatten(args)
  call = lambda *flat: function(*tf.nest.pack_sequence_as(args, flat))
  structure = []
  scope = tf.get_current_name_scope()

  @tf.custom_gradient
  def run(*flat):
    results = call(*flat)
    structure[:] = [results]

    def grad(*dresults):
      # The second run waits for the incoming gradient; otherwise common subexpression elimination would keep the values
      # of the first run instead.
      later = xla_sharding.barrier([*flat, *dresults])
      return pull_back(recompute, later[: len(flat)], later[len(flat) :])

    return tf.nest.flatten(results), grad

  def recompute(*flat):
    with tf.name_scope(again(scope)):
      return call(*flat)

  flat_results = run(*flat_args)
  return tf.nest.pack_sequence_as(structure[0], flat_results)


def again(scope: str) -> str:
  """Name scope of operations that are computed again, from their own; analysis/parts.py reads it."""
  return f'rematerialised/{scope}/' if scope else 'rematerialised/'
