"""Benchmark of a dropless MoE layer under XLA: in rounds, with slots for all tokens, and beside a layer that drops."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from lingvo_moe.bench.clock import Clock
from lingvo_moe.bench.clock import Timing
from lingvo_moe.core import prng
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.layers.gates.gate import expert_capacity
from lingvo_moe.layers.moe import MoE
from lingvo_moe.ops import backend
from lingvo_moe.ops import xla
from lingvo_moe.tasks.mt.config import MtConfig

LOADS = ('balanced', 'skewed')


def measure(config: MtConfig, clock: Clock) -> list[Timing]:
  """Times a MoE layer on the tokens of a batch: training (forward and backward) and inference, compiled by XLA.

  Three ways to serve the choices: 'dropping' at capacity factor 2, 'rounds' of as many slots, and 'room for all', one
  round with S slots of every expert. Two loads, with choices made by hand: 'balanced', every expert as often as any
  other in each group, and 'skewed', the expert of rank r in proportion to 1 / r. The functions are timed in turn.

  A result has, besides the Timing: mode, serving, load, rounds, slots of an expert and group, bytes of the experts'
  input, hidden layer and output in a round, the share of choices dropped, and tokens_per_s.
  """
  steps = {
    (mode, serving, load): _Step(config, mode == 'training', serving, load)
    for mode in ('training', 'inference')
    for load in LOADS
    for serving in ('dropping', 'rounds', 'room for all')
    if mode == 'training' or serving != 'dropping'
  }
  found = clock.time_in_turn({key: step.run for key, step in steps.items()})
  for key, timing in found.items():
    names = dict(zip(('mode', 'serving', 'load'), key, strict=True))
    step = steps[key]
    timing |= {**names, **step.about(), 'tokens_per_s': round(step.num_tokens / timing['median_s'], 1)}
  return list(found.values())


class _Step:
  """One MoE layer, forward, and backward in training, on tokens whose experts are chosen beforehand."""

  def __init__(self, config: MtConfig, training: bool, serving: str, load: str):
    layer = next(layer.ffn for layer in config.model().encoder.layers.values() if layer.is_moe)
    factor = {'dropping': 2.0, 'rounds': None, 'room for all': None}[serving]
    slots = float(layer.num_experts) if serving == 'room for all' else 2.0
    self._layer = dataclasses.replace(
      layer, num_groups=config.num_groups, capacity_factor=factor, round_capacity_factor=slots
    )
    rows, length = config.batcher().rows(config.max_length), config.max_length
    self.num_tokens = rows * length
    self._x_BTM, gate = _routed(self._layer, rows, length, load)
    self._theta = {**weights_lib.initialize(self._layer.weights(), 0), 'gate': gate}
    self._key_B = prng.fold(prng.key(config.seed, 'train'), tf.range(rows)) if training else None
    group_size = self.num_tokens // config.num_groups
    self._slots = expert_capacity(group_size, layer.num_experts, slots)
    self._function = tf.function(self._forward_backward, autograph=False, jit_compile=True)
    self._stats = None

  def run(self) -> None:
    sums, self._stats = self._function(self._theta, self._x_BTM)
    sums.numpy()  # waits for all computation

  def about(self) -> dict[str, float]:
    stats, layer = self._stats, self._layer
    dropped = tf.reduce_sum(stats.dropped_R) / (2 * stats.tokens)
    size = 4 * layer.num_experts * layer.num_groups * self._slots
    return {
      'rounds': float(stats.rounds),
      'slots': self._slots,
      'bytes': size * (2 * layer.model_dim + layer.hidden_dim),
      'dropped': round(float(dropped), 4),
    }

  def _forward_backward(self, theta, x_BTM):
    with backend.use(xla.BACKEND), tf.GradientTape() as tape:
      tape.watch([x_BTM, theta])
      y_BTM, routing = self._layer(theta, x_BTM, tf.zeros(x_BTM.shape[:2]), self._key_B)
      loss = tf.reduce_mean(tf.square(y_BTM - 1.0))
    grads = tape.gradient(loss, [x_BTM, *theta.values()]) if self._key_B is not None else []
    return tf.stack([loss, *(tf.reduce_sum(g) for g in grads if g is not None)]), routing.stats


def _routed(layer: MoE, rows: int, length: int, load: str) -> tuple[tf.Tensor, tf.Tensor]:
  """Tokens x_BTM and a gate [M, E] that sends them where the load says.

  The gate's columns are random directions, nearly orthogonal; a token is the sum of those of its two experts, the first
  one longer.
  """
  rng = np.random.default_rng(0)
  gate = rng.normal(size=[layer.model_dim, layer.num_experts])
  gate /= np.linalg.norm(gate, axis=0)
  tokens, experts = rows * length, layer.num_experts
  if load == 'balanced':
    of_group = lambda: rng.permutation(np.arange(tokens // layer.num_groups) % experts)
    first = np.concatenate([of_group() for _ in range(layer.num_groups)])
    second = (first + experts // 2) % experts
  else:
    share = 1 / np.arange(1, experts + 1)
    two = lambda: rng.choice(experts, 2, replace=False, p=share / share.sum())
    first, second = np.array([two() for _ in range(tokens)]).T
  x = 16 * gate[:, first] + 12 * gate[:, second]
  return tf.constant(x.T.reshape(rows, length, -1), tf.float32), tf.constant(gate, tf.float32)
