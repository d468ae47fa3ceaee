"""Scanned stack: one loop over equal blocks of layers, a program as large as a block.

Weights and caches are stacked on a leading axis L. In training the loop keeps the input of every block, and by policy
more (see ops/remat.py). Its gradient is a second loop, backwards, which runs each block again and differentiates it.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_moe import xla_sharding
from lingvo_moe.core import prng
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.shapes import results_of
from lingvo_moe.core.weights import Specs, Theta
from lingvo_moe.layers.pipeline import Pipeline, at_stage, pipelined
from lingvo_moe.layers.stack import Stack, StackOutput
from lingvo_moe.layers.transformer import Layer, Rows
from lingvo_moe.ops import remat as remat_lib
from lingvo_moe.ops.custom_gradient import pull_back
from lingvo_moe.ops.loops import counted
from lingvo_moe.xla_sharding import shard

# (number of the block, x, shared, its weights) -> (x, auxiliary outputs, a nest of tensors)
Block = Callable[[tf.Tensor, tf.Tensor, Sequence[tf.Tensor], Theta], tuple[tf.Tensor, Any]]


@dataclasses.dataclass(frozen=True)
class ScannedStack(Stack):
  """Stack whose program has the size of one block of `moe_every` layers; see Stack.

  Trained on a mesh with an axis `stage`, it is a pipeline of `micro_batches`; see pipeline.py.
  """

  num_groups: int = 1
  micro_batches: int = 1
  pipeline_repeats: int = 1

  def __post_init__(self):
    super().__post_init__()
    if self.num_layers % self.period:
      raise ValueError(
        f'a scanned stack is made of blocks of moe_every={self.period} layers; saw {self.num_layers} layers: '
        'use a multiple, or scan_layers=False'
      )

  @property
  def period(self) -> int:
    return self.moe_every if self.moe is not None and self.moe_every else 1

  @property
  def num_blocks(self) -> int:
    return self.num_layers // self.period

  @property
  def traced(self) -> dict[str, Layer]:
    return {weights_lib.stack_name(i, self.period): self._layer(i) for i in range(self.period)}

  @property
  def _specs(self) -> Specs:
    """Specs of the weights of a block."""
    return {name: layer.weights() for name, layer in self.traced.items()}

  def _run_layers(self, theta, x_BTM, memory_BUM, rows, cache, aligned_layer):
    if cache is not None:
      return self._extend_blocks(theta, x_BTM, rows, cache)
    aligned = None if aligned_layer is None else aligned_layer % self.period
    shared, training = [memory_BUM] if self.cross_attention else [], rows.key is not None
    of_stages = training and xla_sharding.stages() > 1
    # A pipeline returns sums over rows alone, and no attention weights.
    if of_stages and aligned is None:
      x_BTM, (by_block, weights) = self._pipelined(theta, x_BTM, shared, rows)
    else:
      stack = self._of_whole_batch() if of_stages else self
      block = functools.partial(stack._block, rows=rows._asdict(), aligned=aligned)
      remat = self.remat if training else 'block'
      x_BTM, (by_block, weights) = scan(block, x_BTM, shared, theta, self._specs, remat)
    routed = {}
    for name, of_blocks in by_block.items():
      for block, layer_name in enumerate(weights_lib.names_by_layer(name, self.num_blocks)):
        routed[layer_name] = tf.nest.map_structure(operator.itemgetter(block), of_blocks)
    return StackOutput(x_BTM, routed, None, weights[0][aligned_layer // self.period] if weights else None)

  def _block(self, number, x_BTM, shared, theta, rows, aligned=None):
    """Runs block `number`: (x, (Routed by name of its layers with experts, attention weights of layer `aligned`))."""
    output = self._run_block(number, x_BTM, shared, Rows(**rows), theta, aligned=aligned)
    return output.x_BTM, (output.routed, [] if aligned is None else [output.memory_weights_BnTU])

  def _run_block(self, number, x_BTM, shared, rows, theta, cache=None, aligned=None) -> StackOutput:
    """Runs the layers of block `number` in order; with a cache of all blocks, for a step of decoding."""
    memory_BUM, routed, written, weights_BnTU = shared[0] if shared else None, {}, {}, None
    for place, (name, layer) in enumerate(self.traced.items()):
      with tf.name_scope(name):
        layer_theta = _used(theta[name], layer.weights())
        layer_rows = rows._replace(key=prng.fold(rows.key, number * self.period + place))
        layer_cache, is_aligned = cache and cache[name], place == aligned
        output = layer(layer_theta, x_BTM, memory_BUM, layer_rows, layer_cache, number, with_weights=is_aligned)
      x_BTM, written[name] = output.x_BTM, output.cache
      routed |= {name: output.routed} if layer.is_moe else {}
      weights_BnTU = output.memory_weights_BnTU if is_aligned else weights_BnTU
    return StackOutput(x_BTM, routed, cache and written, weights_BnTU)

  def _of_whole_batch(self):
    """The stack for a batch that is not divided in micro-batches: `moe` has the groups of one."""
    return dataclasses.replace(self, moe=self.moe and dataclasses.replace(self.moe, num_groups=self.num_groups))

  def _pipelined(self, theta, x_BTM, shared, rows):
    """Runs all blocks as a pipeline; results as those of `scan`."""
    parts = xla_sharding.current().size(['data'])
    schedule = Pipeline(
      xla_sharding.stages(), parts, self.micro_batches, self.num_groups, self.pipeline_repeats, self.num_blocks
    )
    if self.moe and self.moe.capacity_factor is None:
      raise UserError(
        'a pipeline drops tokens that find no room, as rounds of experts would differ between its stages; saw '
        'capacity_factor=None: set it, or use a mesh without stage'
      )
    if self.moe and self.moe.gate.joint_loss and parts > 1:
      raise UserError(
        'the balance loss of this gate is of all groups together, which a pipeline divides over mesh axis data; saw '
        f'data:{parts}: use another gate, or a mesh of stage and expert alone'
      )
    moe = self.moe and dataclasses.replace(self.moe, num_groups=self.moe.num_groups // parts)
    of_part = dataclasses.replace(self, moe=moe, remat='block')
    row_tensors = {name: x for name, x in rows._asdict().items() if x is not None}
    x_BTM, (by_block, _) = pipelined(of_part._block, x_BTM, shared, row_tensors, theta, self._specs, schedule)
    return x_BTM, ({name: routed.of_parts() for name, routed in by_block.items()}, [])

  def _extend_blocks(self, theta, x_BWM, rows, cache):
    """Runs one loop over blocks, each of which writes its positions of the cache in place."""
    weights, specs = weights_lib.flatten(theta), weights_lib.flatten(self._specs)

    def extend(number, x_BWM, written):
      block_theta = weights_lib.unflatten(_at(weights, specs, number))
      block_cache = {name: {**cache[name], 'self': of_layers} for name, of_layers in written.items()}
      output = self._run_block(number, x_BWM, [], rows, block_theta, block_cache)
      return shard(output.x_BTM, 'BWM'), {name: of_layers['self'] for name, of_layers in output.cache.items()}

    written = {name: of_layers['self'] for name, of_layers in cache.items()}
    x_BWM, written = counted(self.num_blocks, extend, x_BWM, written)
    cache = {name: {**cache[name], 'self': of_layers} for name, of_layers in written.items()}
    return StackOutput(x_BWM, {}, cache, None)

  def _memory(self, theta, memory_BUM):
    weights = weights_lib.flatten(theta)
    specs = {name: {'cross_attention': of_layer['cross_attention']} for name, of_layer in self._specs.items()}

    def fill(number, arrays):
      block_theta, filled = weights_lib.unflatten(_at(weights, weights_lib.flatten(specs), number)), {}
      for name, layer in self.traced.items():
        with tf.name_scope(name):
          cache = layer.memory_cache(_used(block_theta[name], specs[name]), memory_BUM)
        filled[name] = {kind: array.write(number, cache[kind]) for kind, array in arrays[name].items()}
      return [filled]

    array = functools.partial(tf.TensorArray, memory_BUM.dtype, self.num_blocks)
    (arrays,) = counted(self.num_blocks, fill, {name: {'keys': array(), 'values': array()} for name in specs})
    return tf.nest.map_structure(lambda array: shard(array.stack(), f'L{self.attention.cache_dims}'), arrays)


def scan(
  block: Block, x_BTM: tf.Tensor, shared: Sequence[tf.Tensor], theta: Theta, specs: Specs, remat: str = 'block'
) -> tuple[tf.Tensor, Any]:
  """Scan: runs blocks 0, 1, ... L - 1 in a loop.

  Args:
    block: function; it may also close over tensors, such as masks and random keys, which get no gradient.
    x_BTM: input of block 0; a block's output has its shape and type.
    shared: tensors [B, ...] that are inputs of every block and get a gradient.
    theta: weights [L, ...] of all blocks, and possibly others.
    specs: specifications of one block's weights.
    remat: policy of remat.POLICIES.

  Returns:
    (output of the last block, auxiliary outputs of the blocks stacked on a leading axis L).
  """
  weights, specs = weights_lib.flatten(theta), weights_lib.flatten(specs)
  names = list(specs)
  count = weights[names[0]].shape[0]
  scope = tf.get_current_name_scope()
  marks: list[remat_lib.Kept] = []

  def recorded(*args):
    """Results of the block, and what it marks but for its output, which the next block keeps as its input."""
    with remat_lib.recording() as records:
      x, auxiliary = run_block(*args)
    marks[:] = [kept for kept in records if kept.x is not x and remat != 'block']
    return x, auxiliary, [kept.x for kept in marks]

  def run_block(number, x, *flat, under=f'{scope}/' if scope else ''):
    # The body of a loop is a graph of its own, whose name scopes begin anew; tools group compiled operations by scope.
    with tf.name_scope(under):
      block_theta = weights_lib.unflatten(dict(zip(names, flat[len(shared) :], strict=True)))
      return block(number, x, flat[: len(shared)], block_theta)

  first_block = lambda: recorded(tf.constant(0), x_BTM, *shared, *_at(weights, specs, 0).values())[1:]
  aux_specs, kept_specs = results_of(first_block)

  @tf.custom_gradient
  def run(x, *flat):
    stacked = dict(zip(names, flat[len(shared) :], strict=True))

    def forward(number, x, inputs, auxiliary, kept):
      inputs = inputs.write(number, shard(x, 'BTM'))
      x, values, marked = recorded(number, x, *flat[: len(shared)], *_at(stacked, specs, number).values())
      auxiliary = _write(auxiliary, number, tf.nest.flatten(values))
      return shard(x, 'BTM'), inputs, auxiliary, _write(kept, number, marked)

    (inputs,), auxiliary, kept = (_arrays(values, count) for values in (x, aux_specs, kept_specs))
    y, inputs, auxiliary, kept = counted(count, forward, x, inputs, auxiliary, kept, scope='')
    inputs_LBTM = shard(inputs.stack(), 'LBTM')
    kept = [mark.shard(array.stack(), 'L') for mark, array in zip(marks, kept, strict=True)]

    def grad(dy, *daux):
      def backward(done, dx, dshared, dweights):
        number = count - 1 - done
        block_args = [shard(inputs_LBTM[number], 'BTM'), *flat[: len(shared)], *_at(stacked, specs, number).values()]
        values = [mark.shard(kept_L[number]) for mark, kept_L in zip(marks, kept, strict=True)]
        with remat_lib.giving(values):
          again = functools.partial(run_block, number, under=remat_lib.again(scope))
          dx, *grads = pull_back(again, block_args, [dx, *(dvalue[number] for dvalue in daux)])
        # Gradients of shared tensors are sums over many blocks: in float32 whatever type the tensors have.
        dshared = [total + tf.cast(g, total.dtype) for total, g in zip(dshared, grads)]
        stored = [
          xla_sharding.store(g, s.dims, update=True) for g, s in zip(grads[len(shared) :], specs.values(), strict=True)
        ]
        return shard(dx, 'BTM'), dshared, _write(dweights, number, stored)

      dshared = [tf.zeros_like(s, tf.float32) for s in shared]
      dweights = [tf.TensorArray(w.dtype, count, element_shape=w.shape[1:]) for w in stacked.values()]
      dx, dshared, dweights = counted(count, backward, dy, dshared, dweights, scope='gradient_tape')
      dshared = [tf.cast(total, s.dtype) for total, s in zip(dshared, shared, strict=True)]
      weight_grads = [
        xla_sharding.store(a.stack(), 'L' + s.dims, update=True) for a, s in zip(dweights, specs.values(), strict=True)
      ]
      return dx, *dshared, *weight_grads

    return [y, *(array.stack() for array in auxiliary)], grad

  y, *auxiliary = run(x_BTM, *shared, *(weights[name] for name in names))
  return y, tf.nest.pack_sequence_as(aux_specs, auxiliary)


def _arrays(values: Any, count: int) -> list[tf.TensorArray]:
  """Arrays of `count` values like these tensors or specs of a nest."""
  return [tf.TensorArray(s.dtype, count, element_shape=s.shape) for s in tf.nest.flatten(values)]


def _write(arrays: Sequence[tf.TensorArray], number: tf.Tensor, values: Sequence[tf.Tensor]) -> list[tf.TensorArray]:
  """Arrays after writing the values of one block."""
  return [array.write(number, value) for array, value in zip(arrays, values, strict=True)]


def _used(theta: Theta, specs: Specs) -> Theta:
  """Weights of one block that `specs` names, gathered for use."""
  with tf.name_scope('weights'):
    weights, specs = weights_lib.flatten(theta), weights_lib.flatten(specs)
    return weights_lib.unflatten({name: xla_sharding.gather(weights[name], spec.dims) for name, spec in specs.items()})


def _at(weights, specs, number):
  """Weights of one block, still split as devices store them."""
  return {name: xla_sharding.store(_layer_of(weights[name], number), spec.dims) for name, spec in specs.items()}


def _layer_of(weight, number):
  """Weight of one block of those stacked; on a mesh of stages, from the stage that has it."""
  stages = xla_sharding.stages()
  if stages == 1:
    return weight[number]
  count = weight.shape[0] // stages
  return at_stage(tf.reshape(weight, [stages, count, *weight.shape[1:]])[:, number % count], number // count)
