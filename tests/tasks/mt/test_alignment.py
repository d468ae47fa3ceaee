"""Attention of a decoder layer to the source, of which alignments are made."""

import dataclasses

import numpy as np
import tensorflow as tf

from lingvo_moe.core import weights as weights_lib
from lingvo_moe.tasks.mt.config import MtConfig
from lingvo_moe.tasks.task import task_of

CONFIG = MtConfig(
  model_dim=16,
  ff_dim=32,
  num_heads=2,
  head_dim=8,
  encoder_layers=2,
  decoder_layers=4,
  num_experts=2,
  source_vocab_size=40,
  target_vocab_size=30,
  batch_tokens=64,
  max_length=16,
)


def test_weights_are_those_by_which_the_layer_attends_in_a_scanned_stack_too():
  batch = task_of(CONFIG).random_batch(full=False)
  scanned = dataclasses.replace(CONFIG, scan_layers=True, remat='block').program()
  weights = scanned.init()['weights']
  flat = {}
  for name, weight in weights.items():
    names = weights_lib.names_by_layer(name, weight.shape[0])
    flat |= {own: weight[i] for i, own in enumerate(names)} if names else {name: weight}
  program = CONFIG.program()
  tensors = {name: tf.constant(x) for name, x in batch.items()}
  for layer in range(4):
    attend = lambda p, w, layer=layer: p.model.attention_to_source(p.theta(w), tensors, layer).numpy()
    weights_BTU = attend(program, flat)
    np.testing.assert_allclose(attend(scanned, weights), weights_BTU, atol=1e-6)
    real_BT, is_source_BU = batch['tgt_segments'] > 0, batch['src_segments'] > 0
    np.testing.assert_allclose(weights_BTU.sum(axis=2)[real_BT], 1, atol=1e-5)
    assert not weights_BTU[real_BT][~np.repeat(is_source_BU[:, None], 16, axis=1)[real_BT]].any()
