"""A stack of equal blocks as one loop over weights stacked on a leading axis L: a program's size is that of one block.

The loop keeps the input of every block, and its gradient is a second loop that goes back, runs each block again and
differentiates it there (see remat.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_moe import xla_sharding
from lingvo_moe.core.shapes import results_of
from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.layers.remat import pull_back
from lingvo_moe.xla_sharding import shard

# (the block's number, x, shared, its weights by flat name) -> (x, nested tensors that it tells)
Block = Callable[[tf.Tensor, tf.Tensor, Sequence[tf.Tensor], Mapping[str, tf.Tensor]], tuple[tf.Tensor, Any]]


def scan(
  block: Block,
  x_BTM: tf.Tensor,
  shared: Sequence[tf.Tensor],
  weights: Mapping[str, tf.Tensor],
  specs: Mapping[str, WeightSpec],
) -> tuple[tf.Tensor, Any]:
  """Runs x through block 0, 1, ... L - 1.

  Args:
    block: it may also close over tensors, such as masks and random keys, which get no gradient.
    x_BTM: the input of block 0; a block's output has its shape and type.
    shared: tensors [B, ...] that every block sees and that get a gradient.
    weights: by name, of all blocks, [L, ...].
    specs: by name, of one block.

  Returns:
    (the output of the last block, what the blocks tell, stacked on a leading axis L).
  """
  names = list(specs)
  count = weights[names[0]].shape[0]
  scope = tf.get_current_name_scope()
  told_specs = results_of(lambda: block(tf.constant(0), x_BTM, shared, _at(weights, specs, 0))[1])

  def run_block(number, x, *flat):
    # A loop's body is a graph of its own, whose names begin anew: what XLA makes of it is to be told by layer.
    with tf.name_scope(f'{scope}/' if scope else ''):
      return block(number, x, flat[: len(shared)], dict(zip(names, flat[len(shared) :], strict=True)))

  @tf.custom_gradient
  def run(x, *flat):
    stacked = dict(zip(names, flat[len(shared) :], strict=True))

    def forward(number, x, inputs, told):
      inputs = inputs.write(number, shard(x, 'BTM'))
      x, values = run_block(number, x, *flat[: len(shared)], *_at(stacked, specs, number).values())
      told = [array.write(number, value) for array, value in zip(told, tf.nest.flatten(values), strict=True)]
      return number + 1, shard(x, 'BTM'), inputs, told

    inputs = tf.TensorArray(x.dtype, count, element_shape=x.shape)
    told = [tf.TensorArray(s.dtype, count, element_shape=s.shape) for s in tf.nest.flatten(told_specs)]
    y, inputs, told = _loop(count, forward, x, inputs, told)
    inputs_LBTM = shard(inputs.stack(), 'LBTM')

    def grad(dy, *dtold):
      def backward(done, dx, dshared, dweights):
        number = count - 1 - done
        of_block = [shard(inputs_LBTM[number], 'BTM'), *flat[: len(shared)], *_at(stacked, specs, number).values()]
        dx, *grads = pull_back(
          lambda *args: run_block(number, *args), of_block, [dx, *(dvalue[number] for dvalue in dtold)]
        )
        # Many blocks add to what they share: in float32 whatever type that has.
        dshared = [total + tf.cast(g, total.dtype) for total, g in zip(dshared, grads)]
        stored = [xla_sharding.store(g, s.dims) for g, s in zip(grads[len(shared) :], specs.values(), strict=True)]
        dweights = [array.write(number, g) for array, g in zip(dweights, stored, strict=True)]
        return done + 1, shard(dx, 'BTM'), dshared, dweights

      dshared = [tf.zeros_like(s, tf.float32) for s in shared]
      dweights = [tf.TensorArray(w.dtype, count, element_shape=w.shape[1:]) for w in stacked.values()]
      dx, dshared, dweights = _loop(count, backward, dy, dshared, dweights)
      dshared = [tf.cast(total, s.dtype) for total, s in zip(dshared, shared, strict=True)]
      whole = [xla_sharding.store(a.stack(), 'L' + s.dims) for a, s in zip(dweights, specs.values(), strict=True)]
      return dx, *dshared, *whole

    return [y, *(array.stack() for array in told)], grad

  y, *told = run(x_BTM, *shared, *(weights[name] for name in names))
  return y, tf.nest.pack_sequence_as(told_specs, told)


def _at(weights, specs, number):
  """The weights of one block, still stored in the parts that devices hold."""
  return {name: xla_sharding.store(weights[name][number], spec.dims) for name, spec in specs.items()}


def _loop(count, body, *values):
  """tf.while_loop from 0 up to a count; returns the values after it. From its condition XLA sees how often it runs."""
  return tf.while_loop(lambda i, *_: i < count, body, (tf.constant(0), *values), parallel_iterations=1)[1:]
