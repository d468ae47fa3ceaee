"""Random keys of a training step: each draw, such as the mask of a branch of a layer, has keys of its own."""

import numpy as np
import pytest
import tensorflow as tf
import tiny_config

from lingvo_moe.core import prng, weights
from lingvo_moe.tasks.lm.lm_config import LmConfig, RecurrentConfig
from lingvo_moe.tasks.mt.mt_task import TranslationTask
from lingvo_moe.tasks.task import task_of

RATES = {'input_dropout': 0.5, 'residual_dropout': 0.5, 'expert_dropout': 0.5, 'expert_output_masking': 0.5}
OF_ATTENTION = {'attention_dropout': 0.5, 'ffn_dropout': 0.5, 'moe_every': 2}
SIZES = {'model_dim': 8, 'ff_dim': 8, 'num_experts': 9, 'num_groups': 2, 'batch_tokens': 32}
HEADS = {'num_heads': 2, 'head_dim': 4}
OF_GATE = {
  'top2': 1,
  'noisy_top_k': 2,
  'hierarchical': 6,
}  # a normal number is made of two; each rank draws some of its own


def translation(gate):
  groups = {'groups_of_experts': 3} if gate == 'hierarchical' else {}
  stacks = {'encoder_layers': 2, 'decoder_layers': 2, 'max_length': 8, 'shared_experts': 1}
  config = tiny_config.make(**RATES, **OF_ATTENTION, **SIZES, **HEADS, **stacks, **groups, gate=gate)
  # Input; attention and its residual; a dense layer and its; of experts: tokens' keys twice, gate, experts, mask,
  # shared ones, residual.
  encoder = 1 + 2 * 2 + 2 + OF_GATE[gate] + 6
  return config, TranslationTask(config).random_batch(), 2 * encoder + 2 * 2


def language(kind):
  config = kind(vocab_size=20, window=8, **SIZES, **RATES, **(OF_ATTENTION | HEADS if kind is LmConfig else {}))
  return config, task_of(config).random_batch(), None


CASES = [
  *(lambda gate=gate: translation(gate) for gate in OF_GATE),
  lambda: language(LmConfig),
  lambda: language(RecurrentConfig),
]


@pytest.mark.parametrize('case', CASES, ids=[*OF_GATE, 'lm', 'recurrent'])
def test_every_draw_of_a_step_has_keys_of_its_own(case, monkeypatch):
  config, batch, count = case()
  drawn, bits = [], prng.bits

  def noted(key, shape):
    drawn.append(np.unique(key))
    return bits(key, shape)

  monkeypatch.setattr(prng, 'bits', noted)
  task = config.model()
  theta = weights.unflatten({n: tf.zeros(s.shape) for n, s in weights.flatten(task.weights()).items()})
  rows = len(next(iter(batch.values())))
  task.loss(theta, batch, prng.fold(prng.key(1), tf.range(rows)))
  assert count in (None, len(drawn))
  empty = prng.fold(tf.constant(0, tf.uint32), tf.range(SIZES['num_experts']))  # keys of slots without a token
  keys = np.concatenate([np.setdiff1d(of_draw, empty) for of_draw in drawn])
  assert len(keys) > 50 and len(np.unique(keys)) == len(keys)
