"""Pipeline of stages: blocks of a scanned stack on the devices of mesh axis `stage`, a micro-batch after the other.

As in GPipe (Huang et al., arXiv 1811.06965), and written for one partitioner as in section 3.3 of GSPMD (Xu et al.,
arXiv 2105.04663): tensors have a leading axis of stages, which the mesh splits. In a tick every stage computes its
blocks for the micro-batch that it holds; then all pass their outputs to the next stage, a CollectivePermute. In a
circular pipeline (`repeats`) micro-batches pass all stages several times, through other blocks each time.

Axis Z has the stages, and in each the parts of a micro-batch along mesh axis `data`: so each device sums gradients of
its own, which are added up once a step.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from lingvo_moe import xla_sharding
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.shapes import collected, dealt, results_of
from lingvo_moe.core.weights import Specs, Theta, WeightSpec
from lingvo_moe.ops.custom_gradient import pull_back
from lingvo_moe.ops.loops import counted
from lingvo_moe.ops.remat import again
from lingvo_moe.xla_sharding import shard

# (number of the block, x, shared, its weights, rows) -> (x, auxiliary outputs, a nest of tensors)
Block = Callable[[tf.Tensor, tf.Tensor, Sequence[tf.Tensor], Theta, Any], tuple[tf.Tensor, Any]]


class _Place(NamedTuple):
  """Work of every place on axis Z in a tick."""

  micro_batch_A: tf.Tensor  # int32, its number, of each stage
  repeat_Z: tf.Tensor  # int32, the repeat that its blocks belong to
  repeat_JZ: tf.Tensor  # 1 at this repeat, and 0 everywhere in the bubble
  valid_Z: tf.Tensor  # whether it has a micro-batch; the others are the bubble
  first_Z: tf.Tensor  # whether its blocks are the first of the stack
  last_Z: tf.Tensor  # whether they are the last

  def in_repeat(self, x_Z: tf.Tensor) -> tf.Tensor:
    """Values [Z, ...] as [J, Z, ...], 0 at other repeats and in the bubble."""
    return self._one_JZ(x_Z, x_Z.shape.rank - 1) * x_Z

  def of_repeat(self, x_JZ: tf.Tensor) -> tf.Tensor:
    """Values [Z, ...] of [J, Z, ...] at the repeat; 0 in the bubble."""
    return tf.reduce_sum(self._one_JZ(x_JZ, x_JZ.shape.rank - 2) * x_JZ, axis=0)

  def _one_JZ(self, x, dims):
    return tf.cast(tf.reshape(self.repeat_JZ, [*self.repeat_JZ.shape, *[1] * dims]), x.dtype)


@dataclasses.dataclass(frozen=True)
class Pipeline:
  """Schedule of a pipeline: `micro_batches` pass `stages` stages several times.

  Micro-batches enter in sets of as many as there are stages, and a set makes all its passes before the next one enters;
  so what leaves the last stage is what the first stage needs next.

  Attributes:
    stages, parts: devices along mesh axes `stage` and `data`.
    micro_batches: number of micro-batches.
    num_groups: groups of rows of the batch, which are dealt to micro-batches.
    repeats: times that a micro-batch passes all stages.
    blocks: number of blocks of the stack.
  """

  stages: int
  parts: int
  micro_batches: int
  num_groups: int
  repeats: int
  blocks: int

  def __post_init__(self):
    if self.blocks % (self.stages * self.repeats):
      raise UserError(
        f'the {self.stages} stages of a mesh have equal numbers of blocks in each of pipeline_repeats={self.repeats}; '
        f'saw a stack of {self.blocks} blocks: use fewer repeats, or another --mesh'
      )
    if self.repeats > 1 and self.micro_batches % self.stages:
      raise UserError(
        f'with pipeline_repeats={self.repeats}, the number of stages divides micro_batches; saw micro_batches='
        f'{self.micro_batches} and {self.stages} stages: use a multiple of {self.stages}, or pipeline_repeats = 1'
      )
    if self.num_groups % (self.micro_batches * self.parts):
      raise UserError(
        f'micro-batches of a pipeline are divided over mesh axis data by groups; saw num_groups={self.num_groups} for '
        f'{self.micro_batches} micro-batches and data:{self.parts}: use a multiple of {self.micro_batches * self.parts}'
      )

  @property
  def ticks(self) -> int:
    return self.repeats * self.micro_batches + self.stages - 1

  @property
  def places(self) -> int:
    """Size of axis Z."""
    return self.stages * self.parts

  @property
  def blocks_at_once(self) -> int:
    """Blocks that a stage runs in a tick."""
    return self.blocks // (self.stages * self.repeats)

  def entries(self, repeat: int) -> list[int]:
    """Tick at which each micro-batch enters the first stage in a repeat."""
    sets = [divmod(number, self.stages) for number in range(self.micro_batches)]
    return [(which * self.repeats + repeat) * self.stages + place for which, place in sets]

  def at(self, tick: tf.Tensor) -> _Place:
    """Work of every place on axis Z in a tick, which may be a loop's counter."""
    age_A = tick - tf.range(self.stages)  # micro-batches that have entered the stage before, counted in every repeat
    stage_Z, age_Z = self.by_place(tf.range(self.stages)), self.by_place(age_A)
    repeat_Z = age_Z // self.stages % self.repeats
    valid_Z = (age_Z >= 0) & (age_Z < self.repeats * self.micro_batches)
    number_A = age_A // (self.stages * self.repeats) * self.stages + age_A % self.stages
    return _Place(
      micro_batch_A=tf.clip_by_value(number_A, 0, self.micro_batches - 1),
      repeat_Z=repeat_Z,
      repeat_JZ=tf.one_hot(tf.where(valid_Z, repeat_Z, -1), self.repeats, axis=0),
      valid_Z=valid_Z,
      first_Z=(stage_Z == 0) & (repeat_Z == 0),
      last_Z=(stage_Z == self.stages - 1) & (repeat_Z == self.repeats - 1),
    )

  def numbers(self, place: _Place, within: tf.Tensor) -> tf.Tensor:
    """Number in the stack of block `within` of every place on axis Z."""
    stage_Z = self.by_place(tf.range(self.stages))
    return (place.repeat_Z * self.stages + stage_Z) * self.blocks_at_once + within

  def divide(self, x_B: tf.Tensor) -> tf.Tensor:
    """Rows [B, ...] as micro-batches and their parts [O, D, I, ...], which every stage has."""
    ones = '1' * (x_B.shape.rank - 1)
    x_OI = shard(dealt(shard(x_B, 'I' + ones), self.num_groups, self.micro_batches), '1I' + ones)
    return shard(tf.reshape(x_OI, [self.micro_batches, self.parts, -1, *x_B.shape[1:]]), '1DI' + ones)

  def take(self, x_ODI: tf.Tensor, place: _Place) -> tf.Tensor:
    """Parts [Z, I, ...] of the micro-batches at every place, of `divide`'s result."""
    x_ADI = tf.gather(x_ODI, place.micro_batch_A)
    return shard(tf.reshape(x_ADI, [-1, *x_ODI.shape[2:]]), 'ZI' + '1' * (x_ODI.shape.rank - 3))

  def nothing(self, x_ODI: tf.Tensor) -> tf.Tensor:
    """Zeros [Z, I, ...]."""
    return self.take(x_ODI, self.at(tf.constant(0))) * 0

  def sums(self, shape: Sequence[int], dtype: tf.DType) -> tf.TensorArray:
    """Array of sums [J, Z, ...] for each of the blocks at once; they are zeros at first."""
    return tf.TensorArray(dtype, self.blocks_at_once, element_shape=[self.repeats, self.places, *shape])

  def passed(self, x_ZI: tf.Tensor, by: int) -> tf.Tensor:
    """Values [Z, I, ...] passed to the next stage (by 1), or to the one before (by -1), in a circle."""
    letters = 'ADI'.ljust(x_ZI.shape.rank + 1, '1')
    x_ADI = shard(tf.reshape(x_ZI, [self.stages, self.parts, *x_ZI.shape[1:]]), letters)
    # XLA makes a CollectivePermute of two slices of one tensor, joined along the axis that is split.
    passed_ADI = shard(tf.concat([x_ADI[-by:], x_ADI[:-by]], axis=0), letters)
    return _rows(tf.reshape(passed_ADI, x_ZI.shape))

  def collect(self, x_TZI: tf.Tensor, ticks: Sequence[int], stage: int) -> tf.Tensor:
    """Rows [B, ...] of all micro-batches, of which x holds one at each of these ticks and at this stage."""
    rest = x_TZI.shape[2:]
    x_OAD = tf.reshape(tf.gather(x_TZI, ticks), [self.micro_batches, self.stages, self.parts, *rest])
    x_ODI = at_stage(x_OAD, stage, axis=1)
    x_B = collected(tf.reshape(x_ODI, [self.micro_batches, self.parts * rest[0], *rest[1:]]), self.num_groups)
    return shard(x_B, 'B' + '1' * len(rest[1:]))

  def by_place(self, x_A: tf.Tensor, axis: int = 0) -> tf.Tensor:
    """Values of stages, along this axis, for each place on axis Z."""
    return x_A if self.parts == 1 else tf.repeat(x_A, self.parts, axis=axis)

  def of_blocks(self, x_LD: tf.Tensor) -> tf.Tensor:
    """Values [L, D, ...] of blocks as [blocks at once, J, Z, ...], of each place."""
    x = tf.reshape(x_LD, [self.repeats, self.stages, self.blocks_at_once, self.parts, *x_LD.shape[2:]])
    return tf.reshape(
      tf.einsum('jand...->njad...', x), [self.blocks_at_once, self.repeats, self.places, *x_LD.shape[2:]]
    )

  def by_block(self, x_JZ: tf.Tensor) -> tf.Tensor:
    """Values [L, D, ...] of blocks, from those of each place, [blocks at once, J, Z, ...]; inverse of `of_blocks`."""
    x = tf.reshape(x_JZ, [self.blocks_at_once, self.repeats, self.stages, self.parts, *x_JZ.shape[3:]])
    return tf.reshape(tf.einsum('njad...->jand...', x), [self.blocks, self.parts, *x_JZ.shape[3:]])


@dataclasses.dataclass(frozen=True)
class _Run:
  """A stack's blocks, what they compute with, and their schedule."""

  block: Block
  specs: dict[str, WeightSpec]  # of a block, by flat name
  schedule: Pipeline
  scope: str  # name scope of the stack
  shared_ODI: Sequence[tf.Tensor]
  rows_ODI: Any
  weights: Sequence[tf.Tensor]  # [J, A, blocks at once, ...]

  def run_block(self, number, x, shared, rows, weights, recomputed=False):
    scope = again(self.scope) if recomputed else f'{self.scope}/' if self.scope else ''
    with tf.name_scope(scope):  # the body of a loop is a graph of its own, whose name scopes begin anew
      return self.block(number, x, shared, weights_lib.unflatten(dict(zip(self.specs, weights, strict=True))), rows)

  def pull_back(self, number, x, shared, rows, weights, dresults):
    """Vjp of `run_block`: gradients of (x, *shared, *weights), given those of its results."""
    split = len(shared)
    call = lambda x, *flat: self.run_block(number, x, flat[:split], rows, flat[split:], recomputed=True)
    return pull_back(call, [x, *shared, *weights], dresults)

  def inputs_at(self, place: _Place, within: tf.Tensor) -> tuple[Any, ...]:
    """Arguments of `run_block` for block `within` of every place: its number, and those after x."""
    place_rows = tf.nest.map_structure(lambda x: self.schedule.take(x, place), (self.shared_ODI, self.rows_ODI))
    return self.schedule.numbers(place, within), *place_rows, self._weights_at(place, within)

  def _weights_at(self, place, within):
    weights = []
    for w, spec in zip(self.weights, self.specs.values(), strict=True):
      w_JZ = xla_sharding.store(self.schedule.by_place(w[:, :, within], axis=1), f'JZ{spec.dims}')
      w_Z = w_JZ[0] if w_JZ.shape[0] == 1 else place.of_repeat(w_JZ)
      weights.append(xla_sharding.store(w_Z, f'Z{spec.dims}'))
    return weights

  def forward(self, x_ODI: tf.Tensor, aux_specs: Sequence[tf.TensorSpec]) -> tuple[tf.Tensor, tf.Tensor, list]:
    """Runs the pipeline: (inputs of blocks [ticks * blocks at once, Z, I, ...], outputs of stages [ticks, Z, I, ...],
    auxiliary outputs as TensorArrays of [J, Z, ...], summed over micro-batches)."""
    p = self.schedule

    def tick(number, x, inputs, outputs, sums):
      place = p.at(number)
      x = _where(place.first_Z, p.take(x_ODI, place), p.passed(x, 1))

      def blocks(within, x, inputs, sums):
        inputs = inputs.write(number * p.blocks_at_once + within, x)
        block, *others = self.inputs_at(place, within)
        x, values = xla_sharding.over_stages(self.run_block, block, x, *others)
        values = [place.in_repeat(value) for value in tf.nest.flatten(values)]
        return _rows(x), inputs, [_add(a, within, value) for a, value in zip(sums, values, strict=True)]

      x, inputs, sums = counted(p.blocks_at_once, blocks, x, inputs, sums, scope='')
      return x, inputs, outputs.write(number, x), sums

    x_ZI = p.nothing(x_ODI)
    sums = [p.sums(s.shape, s.dtype) for s in aux_specs]
    inputs, outputs = (
      tf.TensorArray(x_ZI.dtype, size, element_shape=x_ZI.shape) for size in (p.ticks * p.blocks_at_once, p.ticks)
    )
    _, inputs, outputs, sums = counted(p.ticks, tick, x_ZI, inputs, outputs, sums, scope='')
    return _rows(inputs.stack(), '1'), _rows(outputs.stack(), '1'), sums

  def backward(self, inputs: tf.Tensor, dy_ODI: tf.Tensor, daux: Sequence[tf.Tensor]) -> tuple[list, list]:
    """Runs the pipeline backwards: gradients of what enters the first stage in each tick, x and shared, [ticks, Z, I,
    ...]; and of weights, TensorArrays of [J, Z, ...]."""
    p = self.schedule

    def tick(done, dstate, entered, dweights):
      number = p.ticks - 1 - done
      place = p.at(number)
      leaving = [_where(place.valid_Z, p.take(dy_ODI, place), tf.zeros_like(dstate[0]))]
      leaving += [tf.zeros_like(d) for d in dstate[1:]]
      dstate = [_where(place.last_Z, d, p.passed(before, -1)) for d, before in zip(leaving, dstate, strict=True)]

      def blocks(done, dstate, dweights):
        within = p.blocks_at_once - 1 - done
        block, *others = self.inputs_at(place, within)
        x = _rows(inputs[number * p.blocks_at_once + within])
        dvalues = [place.of_repeat(d[within]) for d in daux]
        dx, *grads = xla_sharding.over_stages(self.pull_back, block, x, *others, [dstate[0], *dvalues])
        # Gradients of shared tensors are sums over many blocks: in float32 whatever type the tensors have.
        dshared = [total + tf.cast(g, total.dtype) for total, g in zip(dstate[1:], grads)]
        added = []
        for array, g, spec in zip(dweights, grads[len(dshared) :], self.specs.values(), strict=True):
          g = place.in_repeat(tf.cast(xla_sharding.store(g, f'Z{spec.dims}'), tf.float32))
          added.append(_add(array, within, g, f'JZ{spec.dims}'))
        return [_rows(d) for d in (dx, *dshared)], added

      dstate, dweights = counted(p.blocks_at_once, blocks, dstate, dweights, scope='')
      return dstate, [a.write(number, d) for a, d in zip(entered, dstate, strict=True)], dweights

    dstate = [p.nothing(dy_ODI), *(tf.cast(p.nothing(s), tf.float32) for s in self.shared_ODI)]
    entered = [tf.TensorArray(d.dtype, p.ticks, element_shape=d.shape) for d in dstate]
    dweights = [p.sums(spec.shape, tf.float32) for spec in self.specs.values()]
    _, entered, dweights = counted(p.ticks, tick, dstate, entered, dweights, scope='gradient_tape')
    return [_rows(a.stack(), '1') for a in entered], dweights


def pipelined(
  block: Block,
  x_BTM: tf.Tensor,
  shared: Sequence[tf.Tensor],
  rows: Any,
  theta: Theta,
  specs: Specs,
  schedule: Pipeline,
) -> tuple[tf.Tensor, Any]:
  """Runs a stack's blocks as a pipeline; scanned_stack.scan runs them in one stage.

  Args:
    block: function of one part of a micro-batch.
    x_BTM: input of block 0; a block's output has its shape and type.
    shared: tensors [B, ...] that are inputs of every block and get a gradient.
    rows: nested tensors [B, ...] that are inputs of every block and get none, such as masks and keys.
    theta: weights [L, ...] of all blocks, and possibly others.
    specs: specifications of one block's weights.
    schedule: the pipeline's.

  Returns:
    (output of the last block, auxiliary outputs [L, D, ...] of the blocks and of the parts of micro-batches, which are
    sums over micro-batches).
  """
  weights, specs = weights_lib.flatten(theta), weights_lib.flatten(specs)
  scope, p, structure = tf.get_current_name_scope(), schedule, []
  rows_ODI = tf.nest.map_structure(p.divide, rows)

  @tf.custom_gradient
  def run(x_BTM, *flat):
    x_ODI, *shared_ODI = (p.divide(x) for x in (x_BTM, *flat[: len(shared)]))
    stacked = []
    for w, spec in zip(flat[len(shared) :], specs.values(), strict=True):
      w_JA1 = tf.reshape(w, [p.repeats, p.stages, p.blocks_at_once, *spec.shape])
      stacked.append(xla_sharding.store(w_JA1, f'JA1{spec.dims}'))
    stack_run = _Run(block, specs, p, scope, shared_ODI, rows_ODI, stacked)
    with xla_sharding.use(None):  # for the shapes alone
      one_part = tf.nest.map_structure(lambda x: x[0, 0], (x_ODI, shared_ODI, rows_ODI))
      first_block = lambda: stack_run.run_block(tf.constant(0), *one_part, [w[0, 0, 0] for w in stacked])[1]
      structure[:] = [results_of(first_block)]
    inputs, outputs, sums = stack_run.forward(x_ODI, tf.nest.flatten(structure[0]))

    def grad(dy_BTM, *daux):
      entered, dweights = stack_run.backward(inputs, p.divide(dy_BTM), [p.of_blocks(d) for d in daux])
      dx = [p.collect(d, p.entries(0), 0) for d in entered]
      dtheta = [tf.reduce_sum(p.by_block(a.stack()), axis=1) for a in dweights]
      dtheta = [xla_sharding.store(dw, f'L{spec.dims}') for dw, spec in zip(dtheta, specs.values(), strict=True)]
      return [tf.cast(d, x.dtype) for d, x in zip([*dx, *dtheta], (x_BTM, *flat), strict=True)]

    leaving = [tick + p.stages - 1 for tick in p.entries(p.repeats - 1)]
    return [p.collect(outputs, leaving, p.stages - 1), *(p.by_block(a.stack()) for a in sums)], grad

  y_BTM, *auxiliary = run(x_BTM, *shared, *(weights[name] for name in specs))
  return y_BTM, tf.nest.pack_sequence_as(structure[0], auxiliary)


def at_stage(x: tf.Tensor, stage: int | tf.Tensor, axis: int = 0) -> tf.Tensor:
  """Values of one stage, of a tensor that is split over stages along an axis: sent to all of them, and not rounded."""
  shape = [size if i == axis else 1 for i, size in enumerate(x.shape)]
  return tf.reduce_sum(x * tf.reshape(tf.one_hot(stage, x.shape[axis], dtype=x.dtype), shape), axis=axis)


def _where(cond_Z: tf.Tensor, x_Z: tf.Tensor, y_Z: tf.Tensor) -> tf.Tensor:
  return tf.where(tf.reshape(cond_Z, [-1] + [1] * (x_Z.shape.rank - 1)), x_Z, y_Z)


def _rows(x_ZI: tf.Tensor, before: str = '') -> tf.Tensor:
  """Shards rows of every place; axes `before` Z are not split."""
  return shard(x_ZI, f'{before}ZI'.ljust(x_ZI.shape.rank, '1'))


def _add(array: tf.TensorArray, at: tf.Tensor, value: tf.Tensor, dims: str = '') -> tf.TensorArray:
  """Adds to an element of an array, which holds zeros until it is written; `dims` of a weight."""
  total = array.read(at) + value
  return array.write(at, xla_sharding.store(total, dims) if dims else total)
