"""Benchmarks of one MoE layer: each dispatcher; and under XLA dropless in rounds, with room for all, or dropping."""

import dataclasses

import numpy as np
import tensorflow as tf

from benchmarks.clock import Clock, Timing
from benchmarks.steps import dropped
from lingvo_moe.addons.analysis import flops
from lingvo_moe.core import prng
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.layers.dispatch import DISPATCHERS
from lingvo_moe.layers.moe import MoE
from lingvo_moe.ops import backend, cpu, xla
from lingvo_moe.tasks.mt.mt_config import MtConfig

LOADS = ('balanced', 'skewed')


def measure(config: MtConfig, clock: Clock, jit: bool = False) -> list[Timing]:
  """Times gate, dispatch, experts and combine, and the gradients of tokens and weights, without an update.

  The dispatchers are timed in turn, on one side of a full batch. A result has, besides the Timing, dispatch,
  num_groups, tokens_per_s (each token counts once), flops, and `dropped`.
  """
  kinds = [kind for kind in DISPATCHERS if not (jit and kind == 'grouped')]
  x_BTM = np.random.default_rng(config.seed).normal(size=_shape(config))
  steps = {kind: Step(config, {'dispatch': kind}, x_BTM, jit=jit) for kind in kinds}
  timings = clock.time_in_turn({kind: step.run for kind, step in steps.items()})
  for kind, timing in timings.items():
    timing |= {
      'tokens_per_s': round(steps[kind].num_tokens / timing['median_s'], 1),
      'flops': sum(flops.moe_layer(config, kind).values()),
      'dispatch': kind,
      'num_groups': config.num_groups,
      **dropped([steps[kind].stats]),
    }
  return list(timings.values())


def measure_rounds(config: MtConfig, clock: Clock) -> list[Timing]:
  """Times a MoE layer compiled by XLA on the tokens of a batch: training (forward and backward) and inference.

  Four ways to serve the choices: 'dropping' at capacity factor 2, 'rounds' of as many slots, 'blocks' of rows of one
  expert, and 'room for all', one round with S slots of every expert. Two loads, with choices made by hand: 'balanced',
  every expert as often as any other in each group, and 'skewed', the expert of rank r in proportion to 1 / r. The
  functions are timed in turn.

  A result has, besides the Timing: mode, serving, load, rounds, slots of an expert and group, bytes of the experts'
  input, hidden layer and output in a round, the share of choices dropped, and tokens_per_s.
  """
  layer = flops.first_moe(config)
  factors = {
    'dropping': {'capacity_factor': 2.0},
    'rounds': {'capacity_factor': None, 'round_capacity_factor': 2.0},
    'blocks': {'capacity_factor': None, 'dispatch': 'grouped'},
    'room for all': {'capacity_factor': None, 'round_capacity_factor': float(layer.num_experts)},
  }
  tokens = {load: routed(layer, config.num_groups, _shape(config), load) for load in LOADS}
  steps = {
    (mode, serving, load): Step(config, factors[serving], *tokens[load], jit=True, training=mode == 'training')
    for mode in ('training', 'inference')
    for load in LOADS
    for serving in factors
    if mode == 'training' or serving != 'dropping'
  }
  timings = clock.time_in_turn({key: step.run for key, step in steps.items()})
  for key, timing in timings.items():
    step = steps[key]
    factor = factors[key[1]].get('round_capacity_factor', 2.0)
    slots = layer.gate.capacity(step.num_tokens // config.num_groups, layer.num_experts, factor)
    size = layer.num_experts * config.num_groups * slots
    bytes_used = 4 * size * (2 * layer.model_dim + layer.hidden_dim)
    if key[1] == 'blocks':
      slots, bytes_used = 0, 4 * (2 * layer.model_dim * (2 * step.num_tokens) + layer.hidden_dim * xla.BLOCK)
    timing |= {
      **dict(zip(('mode', 'serving', 'load'), key, strict=True)),
      'rounds': float(step.stats.rounds),
      'slots': slots,
      'bytes': bytes_used,
      'dropped': round(float(tf.reduce_sum(step.stats.dropped_R) / (2 * step.stats.tokens)), 4),
      'tokens_per_s': round(step.num_tokens / timing['median_s'], 1),
    }
  return list(timings.values())


class Step:
  """Forward pass of a model's first MoE layer on tokens x_BTM, with `changes`; in training also backward."""

  def __init__(self, config: MtConfig, changes: dict, x_BTM, gate=None, *, jit: bool, training: bool = True):
    layer = dataclasses.replace(flops.first_moe(config), num_groups=config.num_groups, **changes)  # of a whole batch
    rows, length, _ = x_BTM.shape
    initial = weights_lib.initialize(layer.weights(), 0) | ({} if gate is None else {'gate': gate})
    theta = {name: tf.Variable(weight) for name, weight in initial.items()}
    key_B = prng.fold(prng.key(config.seed, 'train'), tf.range(rows)) if training else None
    aux_loss_weight = config.aux_loss_weight if gate is None else 0.0

    def step(x_BTM):
      values = {name: variable.value() for name, variable in theta.items()}
      of = [x_BTM, *values.values()]
      with backend.use(xla.BACKEND if jit else cpu.backend(training=True)), tf.GradientTape() as tape:
        tape.watch(of)
        y_BTM, routing = layer(values, x_BTM, tf.zeros(tf.shape(x_BTM)[:2]), key_B)
        loss = tf.reduce_mean(tf.square(y_BTM - 1.0))
        if aux_loss_weight:
          loss += aux_loss_weight * routing.stats.aux_loss / routing.stats.groups
      # Sums of the gradients, so that all are computed and none is copied to the host.
      grads = [tf.convert_to_tensor(g) for g in tape.gradient(loss, of) if g is not None] if training else []
      return tf.stack([loss, *map(tf.reduce_sum, grads)]), routing.stats

    # As runtimes trace a train step: sizes are static for XLA, dynamic for TensorFlow's own kernels.
    specs = None if jit else [tf.TensorSpec([None, None, config.model_dim])]
    self._function = tf.function(step, specs, autograph=False, jit_compile=jit)
    self._x_BTM = tf.constant(x_BTM, tf.float32)
    self.num_tokens = rows * length
    self.stats = self.sums = None  # of the last run; sums: the loss, and the sum of the elements of each gradient

  def run(self) -> None:
    sums, self.stats = self._function(self._x_BTM)
    self.sums = sums.numpy()  # waits for all computation


def routed(layer: MoE, groups: int, shape: tuple[int, int, int], load: str) -> tuple[np.ndarray, np.ndarray]:
  """Tokens x_BTM and a gate [M, E] that sends them where the load says.

  The gate's columns are random directions, nearly orthogonal; a token is the sum of those of its two experts, the first
  one longer.
  """
  rng = np.random.default_rng(0)
  gate = rng.normal(size=[layer.model_dim, layer.num_experts]).astype(np.float32)
  gate /= np.linalg.norm(gate, axis=0)
  tokens, experts = shape[0] * shape[1], layer.num_experts
  if load == 'balanced':
    first = np.concatenate([rng.permutation(np.arange(tokens // groups) % experts) for _ in range(groups)])
    second = (first + experts // 2) % experts
  else:
    share = 1 / np.arange(1, experts + 1)
    two = lambda: rng.choice(experts, 2, replace=False, p=share / share.sum())
    first, second = np.array([two() for _ in range(tokens)]).T
  return (16 * gate[:, first] + 12 * gate[:, second]).T.reshape(shape), gate


def _shape(config: MtConfig) -> tuple[int, int, int]:
  return config.batcher().rows(config.max_length), config.max_length, config.model_dim
