"""Scanned stack: one loop over equal blocks of layers, a program as large as a block.

Weights and caches are stacked on a leading axis L. In training the loop keeps the input of every block, and by policy
more (see remat.py). Its gradient is a second loop, backwards, which runs each block again and differentiates it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_moe import xla_sharding
from lingvo_moe.core import prng
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.shapes import results_of
from lingvo_moe.core.weights import Specs, Theta
from lingvo_moe.layers import remat as remat_lib
from lingvo_moe.layers.pipeline import Pipeline, at_stage, pipelined
from lingvo_moe.layers.stack import Stack
from lingvo_moe.layers.transformer import Layer
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

  def unrolled(self, theta):
    stack = Stack(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Stack)})
    flat = {}
    for name, weight in weights_lib.flatten(theta).items():
      names = weights_lib.names_by_layer(name, self.num_blocks)
      flat |= {name: weight} if names is None else {own: weight[i] for i, own in enumerate(names)}
    return stack, weights_lib.unflatten(flat)

  def _run(self, theta, x_BTM, mask_BTT, paddings_BT, memory_BUM, memory_mask_BTU, key):
    specs = {name: layer.weights() for name, layer in self.traced.items()}
    shared, rows = [memory_BUM] if self.cross_attention else [], (mask_BTT, paddings_BT, memory_mask_BTU, key)
    if key is not None and xla_sharding.stages() > 1:
      x_BTM, by_block = self._pipelined(theta, x_BTM, shared, rows, specs)
    else:
      run_block = lambda number, x_BTM, shared, theta: self._block(number, x_BTM, shared, rows, theta)
      x_BTM, by_block = scan(run_block, x_BTM, shared, theta, specs, 'block' if key is None else self.remat)
    routed = {}
    for name, of_blocks in by_block.items():
      for block, layer_name in enumerate(weights_lib.names_by_layer(name, self.num_blocks)):
        routed[layer_name] = tf.nest.map_structure(lambda t, block=block: t[block], of_blocks)
    return x_BTM, routed

  def _block(self, number, x_BTM, memory, rows, theta):
    """Runs block `number`: (x, Routed by name of its layers with experts)."""
    mask_BTT, paddings_BT, memory_mask_BTU, key = rows
    routed = {}
    for place, (name, layer) in enumerate(self.traced.items()):
      with tf.name_scope(name):
        own = _used(theta[name], layer.weights())
        own_key = prng.fold(key, number * self.period + place)
        of_memory = (*(memory or [None]), memory_mask_BTU)
        x_BTM, routing = layer(own, x_BTM, mask_BTT, paddings_BT, *of_memory, own_key)
      routed |= {name: routing.routed} if layer.is_moe else {}
    return x_BTM, routed

  def _pipelined(self, theta, x_BTM, shared, rows, specs):
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
    of_part, has_rows = dataclasses.replace(self, moe=moe, remat='block'), [x is not None for x in rows]

    def block(number, x_BTM, shared, given, theta):
      given = iter(given)
      return of_part._block(number, x_BTM, shared, [next(given) if has else None for has in has_rows], theta)

    x_BTM, by_block = pipelined(block, x_BTM, shared, [x for x in rows if x is not None], theta, specs, schedule)
    return x_BTM, {name: routed.of_parts() for name, routed in by_block.items()}

  def _memory(self, theta, memory_BUM):
    array = lambda: tf.TensorArray(memory_BUM.dtype, self.num_blocks)

    def fill(number, arrays):
      filled = {}
      for name, layer in self.traced.items():
        with tf.name_scope(name):
          own = {'cross_attention': layer.weights()['cross_attention']}
          cache = layer.memory_cache(_used(theta[name], own, number), memory_BUM)
        filled[name] = {kind: array.write(number, cache[kind]) for kind, array in arrays[name].items()}
      return [filled]

    (arrays,) = counted(self.num_blocks, fill, {name: {'keys': array(), 'values': array()} for name in self.traced})
    return tf.nest.map_structure(lambda array: shard(array.stack(), 'LBNUK'), arrays)

  def _extend(self, theta, x_BWM, now, memory_mask_B1U, paddings_BW, cache):
    """Runs one loop over blocks, each of which writes its positions of the cache in place."""

    def extend_block(number, x_BWM, own_caches):
      written = {}
      for name, layer in self.traced.items():
        with tf.name_scope(name):
          own = _used(theta[name], layer.weights(), number)
          of_layers = {**cache[name], 'self': own_caches[name]}
          x_BWM, of_layers = layer.extend(own, x_BWM, now, memory_mask_B1U, paddings_BW, of_layers, number)
        written[name] = of_layers['self']
      return shard(x_BWM, 'BWM'), written

    own_caches = {name: of_layers['self'] for name, of_layers in cache.items()}
    x_BWM, own_caches = counted(self.num_blocks, extend_block, x_BWM, own_caches)
    return x_BWM, {name: {**cache[name], 'self': own} for name, own in own_caches.items()}


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
    with remat_lib.recording() as made:
      x, auxiliary = run_block(*args)
    marks[:] = [kept for kept in made if kept.x is not x and remat != 'block']
    return x, auxiliary, [kept.x for kept in marks]

  def run_block(number, x, *flat, under=f'{scope}/' if scope else ''):
    # The body of a loop is a graph of its own, whose name scopes begin anew; tools group compiled operations by scope.
    with tf.name_scope(under):
      own = weights_lib.unflatten(dict(zip(names, flat[len(shared) :], strict=True)))
      return block(number, x, flat[: len(shared)], own)

  first_block = lambda: recorded(tf.constant(0), x_BTM, *shared, *_at(weights, specs, 0).values())[1:]
  aux_specs, kept_specs = results_of(first_block)
  arrays_of = lambda specs: [tf.TensorArray(s.dtype, count, element_shape=s.shape) for s in tf.nest.flatten(specs)]
  write = lambda arrays, number, values: [a.write(number, v) for a, v in zip(arrays, values, strict=True)]

  @tf.custom_gradient
  def run(x, *flat):
    stacked = dict(zip(names, flat[len(shared) :], strict=True))

    def forward(number, x, inputs, auxiliary, kept):
      inputs = inputs.write(number, shard(x, 'BTM'))
      x, values, marked = recorded(number, x, *flat[: len(shared)], *_at(stacked, specs, number).values())
      return shard(x, 'BTM'), inputs, write(auxiliary, number, tf.nest.flatten(values)), write(kept, number, marked)

    inputs = tf.TensorArray(x.dtype, count, element_shape=x.shape)
    begin = x, inputs, arrays_of(aux_specs), arrays_of(kept_specs)
    y, inputs, auxiliary, kept = counted(count, forward, *begin, scope='')
    inputs_LBTM = shard(inputs.stack(), 'LBTM')
    kept = [mark.shard(array.stack(), 'L') for mark, array in zip(marks, kept, strict=True)]

    def grad(dy, *daux):
      def backward(done, dx, dshared, dweights):
        number = count - 1 - done
        block_args = [
          shard(inputs_LBTM[number], 'BTM'),
          *flat[: len(shared)],
          *_at(stacked, specs, number).values(),
        ]
        values = [mark.shard(stacked[number]) for mark, stacked in zip(marks, kept, strict=True)]
        with remat_lib.giving(values):
          dx, *grads = pull_back(
            lambda *args: run_block(number, *args, under=remat_lib.again(scope)),
            block_args,
            [dx, *(dvalue[number] for dvalue in daux)],
          )
        # Gradients of shared tensors are sums over many blocks: in float32 whatever type the tensors have.
        dshared = [total + tf.cast(g, total.dtype) for total, g in zip(dshared, grads)]
        stored = [
          xla_sharding.store(g, s.dims, update=True) for g, s in zip(grads[len(shared) :], specs.values(), strict=True)
        ]
        dweights = [array.write(number, g) for array, g in zip(dweights, stored, strict=True)]
        return shard(dx, 'BTM'), dshared, dweights

      dshared = [tf.zeros_like(s, tf.float32) for s in shared]
      dweights = [tf.TensorArray(w.dtype, count, element_shape=w.shape[1:]) for w in stacked.values()]
      dx, dshared, dweights = counted(count, backward, dy, dshared, dweights, scope='gradient_tape')
      dshared = [tf.cast(total, s.dtype) for total, s in zip(dshared, shared, strict=True)]
      whole = [
        xla_sharding.store(a.stack(), 'L' + s.dims, update=True) for a, s in zip(dweights, specs.values(), strict=True)
      ]
      return dx, *dshared, *whole

    return [y, *(array.stack() for array in auxiliary)], grad

  y, *auxiliary = run(x_BTM, *shared, *(weights[name] for name in names))
  return y, tf.nest.pack_sequence_as(aux_specs, auxiliary)


def _used(theta: Theta, specs: Specs, number: tf.Tensor | None = None) -> Theta:
  """Weights that `specs` names, gathered for use: of one block, or of block `number` of stacked ones."""
  with tf.name_scope('weights'):
    weights, specs = weights_lib.flatten(theta), weights_lib.flatten(specs)
    own = weights if number is None else _at(weights, specs, number)
    return weights_lib.unflatten({name: xla_sharding.gather(own[name], spec.dims) for name, spec in specs.items()})


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
