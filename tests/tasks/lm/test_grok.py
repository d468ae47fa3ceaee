"""Grok-1 against a plain NumPy reading of the model.py and run.py of its release (github.com/xai-org/grok-1)."""

import dataclasses

import numpy as np
import tensorflow as tf

from lingvo_moe.config import registry
from lingvo_moe.core import weights


def grok_1(config, theta, ids_T):
  """Logits [T, V] of a row without padding, in float64, one head, one token and one expert at a time."""
  size, table = config.head_dim, theta['target_embedding/table']
  per_key = config.num_heads // config.num_kv_heads

  def norm(x_TM, name, layer=...):  # RMSNorm of model.py, whose eps is 1e-5
    return theta[name][layer] * x_TM / np.sqrt(np.mean(x_TM**2, axis=-1, keepdims=True) + 1e-5)

  def rotary(x_TK):  # RotaryEmbedding, base_exponent 1e4
    phase = np.arange(len(x_TK))[:, None] / 1e4 ** (np.arange(0, size, 2) / size)
    phase, half = np.tile(phase, 2), size // 2
    return x_TK * np.cos(phase) + np.concatenate([-x_TK[:, half:], x_TK[:, :half]], axis=1) * np.sin(phase)

  def attention(x_TM, at):  # MultiHeadAttention
    heads = []
    for head in range(config.num_heads):
      own = lambda name, *index: theta[f'decoder/layers_0of1/attention/{name}'][(at, slice(None), *index)]
      query = rotary(x_TM @ own('wq', head // per_key, head % per_key))
      scores = query @ rotary(x_TM @ own('wk', head // per_key)).T * size**-0.5  # attn_output_multiplier, 128^-0.5
      scores = np.where(np.tri(len(x_TM)), 30 * np.tanh(scores / 30), -1e30)
      probs = np.exp(scores - scores.max(axis=1, keepdims=True))
      heads.append(probs / probs.sum(axis=1, keepdims=True) @ x_TM @ own('wv', head // per_key))
    return np.concatenate(heads, axis=1) @ theta['decoder/layers_0of1/attention/wo'][at].reshape(-1, config.model_dim)

  def gelu(x):  # jax.nn.gelu, which approximates
    return x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))

  def experts(x_TM, at):  # MoELayer: the two likeliest experts, weights not rescaled
    wg, wi, wo, gate = (theta[f'decoder/layers_0of1/moe/{name}'][at] for name in ('wg', 'wi', 'wo', 'gate'))
    y_TM = np.zeros_like(x_TM)
    for t, x_M in enumerate(x_TM):
      prob_E = np.exp(x_M @ gate) / np.exp(x_M @ gate).sum()
      for e in np.argsort(prob_E)[-2:]:
        y_TM[t] += prob_E[e] * (gelu(x_M @ wg[e]) * (x_M @ wi[e])) @ wo[e]
    return y_TM

  x_TM = table[ids_T] * config.model_dim**0.5  # embedding_multiplier_scale, 78.38 = 6144^0.5
  for at in range(config.num_layers):
    for name, branch in (('attention', attention), ('moe', experts)):
      path = f'decoder/layers_0of1/{name}'
      x_TM = x_TM + norm(branch(norm(x_TM, f'{path}/norm/scale', at), at), f'{path}/post_norm/scale', at)
  return norm(x_TM, 'decoder/norm/scale') @ table.T * 0.5773502691896257  # output_multiplier_scale


def test_logits_are_those_of_the_published_model():
  config = dataclasses.replace(registry.get('lm.grok.Grok1Tiny')(), activation_dtype='float32')
  model, rng = config.model(), np.random.default_rng(0)
  specs = weights.flatten(model.weights())
  theta = {n: rng.normal(0.3 if n.endswith('scale') else 0, 0.3, spec.shape) for n, spec in specs.items()}
  for name in theta:
    if name.endswith('/wo'):
      theta[name] *= 0.01  # small enough that the epsilon of the second norms shows
  ids = rng.integers(1, config.vocab_size, (2, 17))
  batch = {'inputs': tf.constant(ids, tf.int32), 'segments': tf.ones(ids.shape, tf.int32)}
  nested = weights.unflatten({n: tf.constant(w, tf.float32) for n, w in theta.items()})
  expected = np.stack([grok_1(config, theta, row) for row in ids])
  logits, _ = model.logits(nested, batch)
  assert np.abs(expected).max() > 1
  np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_sizes_multiply_as_the_released_configuration_says():
  config = registry.get('lm.grok.Grok1')()
  np.testing.assert_allclose(config.model_dim**0.5, 78.38367176906169, rtol=1e-12)
  np.testing.assert_allclose(config.head_dim**-0.5, 0.08838834764831845, rtol=1e-12)
  np.testing.assert_allclose(config.logit_scale, 0.5773502691896257, rtol=1e-12)
  assert config.ff_dim == config.model_dim * 8 * 2 // 3 and config.embedding_scale == config.attention_scale == 0
