"""Rematerialisation: what a function made on the way is dropped, and made again when its gradient is taken.

Chen et al. (2016), 'Training deep nets with sublinear memory cost': time is paid for memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_moe import xla_sharding

# 'none': all is kept; 'block': of a layer, or of a block of a scanned stack, its input alone; 'attention': all but what
# attention made inside.
POLICIES = ('none', 'block', 'attention')


def rematerialised(function: Callable[..., Any], *args: Any) -> Any:
  """function(*args), of which nothing but the arguments is kept for the gradient.

  Args:
    function: of nested tensors, giving nested tensors; other values that it closes over get no gradient.
    *args: nested tensors.
  """
  flat_args = tf.nest.flatten(args)
  call = lambda *flat: function(*tf.nest.pack_sequence_as(args, flat))
  structure = []

  @tf.custom_gradient
  def run(*flat):
    results = call(*flat)
    structure[:] = [results]

    def grad(*dresults):
      # The second run waits for the gradient; else the first one's results would serve, and be kept. What it runs on is
      # new, and knows no parts of rows that the first one made.
      later = xla_sharding.barrier([*flat, *dresults])
      return pull_back(call, later[: len(flat)], later[len(flat) :])

    return tf.nest.flatten(results), grad

  flat_results = run(*flat_args)
  return tf.nest.pack_sequence_as(structure[0], flat_results)


def pull_back(
  function: Callable[..., Any], args: Sequence[tf.Tensor], dresults: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
  """Runs a function and carries the gradients of its results, in nest order, back to its arguments, which are tensors."""
  with tf.GradientTape() as tape:
    tape.watch(args)
    results = tf.nest.flatten(function(*args))
  real = [(r, dr) for r, dr in zip(results, dresults, strict=True) if r.dtype.is_floating]
  grads = tape.gradient([r for r, _ in real], args, output_gradients=[dr for _, dr in real])
  return [tf.zeros_like(a) if g is None else tf.convert_to_tensor(g) for a, g in zip(args, grads, strict=True)]
