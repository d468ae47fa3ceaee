"""Benchmark of one MoE layer, forward and backward, with each dispatcher, on one side of a model's full batch."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from lingvo_moe.analysis import flops
from lingvo_moe.bench.clock import Clock
from lingvo_moe.bench.clock import Timing
from lingvo_moe.core import prng
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.layers.dispatch import DISPATCHERS
from lingvo_moe.ops import backend
from lingvo_moe.ops import cpu
from lingvo_moe.ops import xla
from lingvo_moe.tasks.mt.config import MtConfig


def measure(config: MtConfig, clock: Clock, jit: bool = False) -> list[Timing]:
  """Times gate, dispatch, experts and combine, and the gradients of tokens and weights, without an update.

  The dispatchers are timed in turn. A result has, besides the Timing, dispatch, num_groups, tokens_per_s (each token
  counts once), flops, and the shares of tokens whose first choice was dropped, whose second choice was dropped, and
  whose second choice was skipped at random.
  """
  kinds = [kind for kind in DISPATCHERS if not (jit and kind == 'grouped')]
  steps = {kind: Step(config, kind, jit) for kind in kinds}
  found = clock.time_in_turn({kind: step.run for kind, step in steps.items()})
  for kind, timing in found.items():
    timing |= {
      'tokens_per_s': round(steps[kind].num_tokens / timing['median_s'], 1),
      'flops': sum(flops.moe_layer(config, kind).values()),
      'dispatch': kind,
      'num_groups': config.num_groups,
      **steps[kind].choices(),
    }
  return list(found.values())


class Step:
  """Forward and backward pass of a MoE layer with one dispatcher, on random tokens."""

  def __init__(self, config: MtConfig, kind: str, jit: bool):
    layer = flops.first_moe(config)
    self._layer = dataclasses.replace(layer, dispatch=kind, num_groups=config.num_groups)  # of the whole batch at once
    self._aux_loss_weight = config.aux_loss_weight
    rows = config.batcher().rows(config.max_length)
    x_BTM = np.random.default_rng(config.seed).normal(size=[rows, config.max_length, config.model_dim])
    self._x_BTM = tf.constant(x_BTM, tf.float32)
    self._theta = {name: tf.Variable(w) for name, w in weights_lib.initialize(self._layer.weights(), 0).items()}
    self._key_B = prng.fold(prng.key(config.seed, 'train'), tf.range(rows))
    # As runtimes trace a train step: sizes are static for XLA, dynamic for TensorFlow's own kernels.
    specs = None if jit else [tf.TensorSpec([None, None, config.model_dim])]
    self._backend = xla.BACKEND if jit else cpu.backend(training=True)
    self._function = tf.function(self._forward_backward, specs, autograph=False, jit_compile=jit)
    self._stats = None
    self.sums = None  # of the last run: the loss, and the sum of the elements of each gradient
    self.num_tokens = rows * config.max_length

  def run(self) -> None:
    sums, self._stats = self._function(self._x_BTM)
    self.sums = sums.numpy()  # waits for all computation

  def choices(self) -> dict[str, float]:
    stats = self._stats
    counts = {
      'first_dropped': stats.dropped_R[0],
      'second_dropped': tf.reduce_sum(stats.dropped_R[1:]),
      'second_skipped': stats.skipped,
    }
    return {name: round(float(count / stats.tokens), 4) for name, count in counts.items()}

  def _forward_backward(self, x_BTM):
    theta = {name: v.value() for name, v in self._theta.items()}
    of = [x_BTM, *theta.values()]
    with backend.use(self._backend), tf.GradientTape() as tape:
      tape.watch(of)
      y_BTM, routing = self._layer(theta, x_BTM, tf.zeros(tf.shape(x_BTM)[:2]), self._key_B)
      aux_loss = routing.stats.aux_loss / routing.stats.groups
      loss = tf.reduce_mean(tf.square(y_BTM - 1.0)) + self._aux_loss_weight * aux_loss
    # Sums of the gradients, so that all are computed and none is copied to the host.
    grads = map(tf.convert_to_tensor, tape.gradient(loss, of))
    return tf.stack([loss, *map(tf.reduce_sum, grads)]), routing.stats
