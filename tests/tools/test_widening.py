"""Models that are widened for timing: the same function, with more features, heads and layers."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import widening
from lingvo_moe.config import registry
from lingvo_moe.core.errors import UserError
from lingvo_moe.tasks.task import task_of

TINY = registry.get('mt.bench_s.Tiny')()
DENSE = dataclasses.replace(TINY, num_experts=0, scan_layers=False)


def logits(config, weights, batch):
  program = config.for_inference().program()
  theta = program.theta({name: tf.constant(value) for name, value in weights.items()})
  return program.model.logits(theta, batch)[0].numpy()


@pytest.mark.parametrize(
  'changes',
  [
    {'model_dim': 2 * DENSE.model_dim, 'ff_dim': DENSE.ff_dim + 8},
    {'model_dim': 3 * DENSE.model_dim, 'num_heads': DENSE.num_heads + 1, 'head_dim': 2 * DENSE.head_dim},
    {'encoder_layers': DENSE.encoder_layers + 2, 'decoder_layers': DENSE.decoder_layers + 1},
  ],
)
def test_a_wider_model_has_the_logits_of_the_one_it_was_made_of(changes):
  rng, program = np.random.default_rng(1), DENSE.program()
  # Not as they are initialised: zero biases and norms of one would hide what they do.
  weights = {name: w.numpy() + rng.normal(0, 0.05, w.shape) for name, w in program.init()['weights'].items()}
  weights = {name: w.astype(np.float32) for name, w in weights.items()}
  wide = dataclasses.replace(DENSE, **changes)
  batch = {key: tf.constant(value[:2]) for key, value in task_of(DENSE).random_batch().items()}
  with widening.positions(DENSE.model_dim):
    found = logits(wide, widening.widened(DENSE, weights, wide), batch)
  expected = logits(DENSE, weights, batch)
  assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()
  assert np.abs(expected).max() > 0.1


def test_what_is_no_wider_model_is_refused():
  for changes, message in (
    ({'model_dim': DENSE.model_dim // 2}, f'model_dim of a wider model is at least {DENSE.model_dim}; saw'),
    ({'model_dim': DENSE.model_dim * 3 // 2}, f'model_dim of a wider model is a multiple of {DENSE.model_dim}; saw'),
    ({'shared_vocab': not DENSE.shared_vocab}, 'a model is widened by model_dim, .*; saw a change of shared_vocab'),
  ):
    with pytest.raises(UserError, match=message):
      widening.check(DENSE, dataclasses.replace(DENSE, **changes))
  with pytest.raises(UserError, match='a dense model is widened; saw num_experts='):
    widening.check(dataclasses.replace(TINY, num_experts=4), TINY)
