"""Encoder and one step of decoding, each as a function of static shapes, for a program that searches by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core.weights import Theta
from lingvo_moe.layers.incremental import Now
from lingvo_moe.layers.stack import StackCache
from lingvo_moe.tasks.batch_keys import SOURCE_KEYS
from lingvo_moe.tasks.mt.config import MtConfig
from lingvo_moe.tasks.task import DecodingSteps


def make(config: MtConfig, rows: int) -> DecodingSteps:
  """The functions for `rows` sentences, beam_size hypotheses each, and max_length steps."""
  config = config.for_inference()
  program = config.program()
  model = program.model
  width, steps = config.beam_size, config.max_length

  def encode(weights: Theta, source: Mapping[str, tf.Tensor]) -> StackCache:
    theta = program.theta(weights)
    return model.init_cache(theta, model.encode(theta, source)[0], steps * width)

  def decode_step(weights: Theta, inputs: Mapping[str, tf.Tensor], cache: StackCache) -> tuple[tf.Tensor, StackCache]:
    time = inputs['time']
    now = Now(time, time * width, inputs['mask'])
    return model.decode_step(program.theta(weights), inputs['ids'], now, inputs['src_segments'], cache)

  tokens = np.zeros([rows, config.max_length], np.int32)
  inputs: dict[str, Any] = {
    'ids': np.zeros([rows, width], np.int32),
    'time': np.zeros([], np.int32),
    'mask': np.zeros([rows, width, steps * width], np.float32),
    'src_segments': tokens,
  }
  return DecodingSteps(encode, decode_step, dict.fromkeys(SOURCE_KEYS, tokens), inputs)
