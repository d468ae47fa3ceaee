"""Attention by cuDNN, without a GPU: which attention it is for, its custom calls, and all else as the reference."""

import json
import re

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import prng
from lingvo_moe.core.mesh import Mesh
from lingvo_moe.ops import cudnn, softmax_attention

Q, KEYS = (tf.cast(tf.random.stateless_normal(s, [1, 2]), tf.bfloat16) for s in ([2, 3, 4, 8], [2, 3, 6, 8]))
MASK = tf.constant(np.arange(48).reshape(2, 4, 6) % 3 > 0)
RELATIVE = tf.ones([1, 3, 4, 6])


def test_cudnn_takes_16_bits_and_any_mask_but_no_dropout_positions_caps_or_weights():
  assert cudnn.supported(Q, KEYS, None, None)
  assert cudnn.supported(Q, KEYS, None, None, dropout=0.1)  # at inference
  assert cudnn.supported(Q, KEYS, None, prng.key(1))  # no dropout in training
  refused = [
    cudnn.supported(Q, KEYS, None, prng.key(1), dropout=0.1),
    cudnn.supported(Q, KEYS, RELATIVE, None),
    cudnn.supported(Q, KEYS, None, None, logit_cap=30.0),
    cudnn.supported(Q, KEYS, None, None, with_weights=True),
    cudnn.supported(tf.cast(Q, tf.float32), KEYS, None, None),
    cudnn.supported(Q[..., :4], KEYS[..., :4], None, None),
    cudnn.supported(tf.tile(Q, [1, 1, 1, 17]), tf.tile(KEYS, [1, 1, 1, 17]), None, None),
    cudnn.supported(Q[:, :, :3], KEYS, None, None),
    cudnn.supported(Q, KEYS[:, :, :5], None, None),
  ]
  assert not any(refused)


@pytest.mark.parametrize('settings', [{'logit_cap': 2.0}, {'dropout': 0.5}, {'with_weights': True}])
def test_what_cudnn_has_not_is_computed_as_ever(settings):
  args = Q, KEYS, KEYS, MASK, None, prng.key(3)
  with pytest.warns(UserWarning, match="some attention is computed without cuDNN's kernels"):
    results = cudnn.attention(*args, **settings)
  for got, want in zip(results, softmax_attention.attention(*args, **settings)):
    assert got is want is None or np.array_equal(got, want)


@pytest.mark.parametrize('shared', [(), (2,)])
def test_the_forward_and_backward_calls_have_cudnns_operands(shared):
  jax = pytest.importorskip('jax')
  from lingvo_moe.runtime import lowering

  def step(q, keys, values, mask):
    with tf.GradientTape() as tape:
      tape.watch([q, keys, values])
      y = cudnn.attention(q, keys, values, mask)[0]
    return y, tape.gradient(y, [q, keys, values])

  bf16 = jax.numpy.bfloat16
  shapes = [(2, 3, *shared, 4, 8), (2, 3, 6, 8), (2, 3, 6, 8)]
  arguments = [jax.ShapeDtypeStruct(shape, bf16) for shape in shapes] + [jax.ShapeDtypeStruct((1, 4, 6), bool)]
  exported = lowering.exported(step, Mesh.parse('data:1'), *arguments, in_force=cudnn.BACKEND)
  y, grads = exported.out_avals[0], exported.out_avals[1:]
  assert y.shape == (2, 4, 3, *shared, 8) and [g.shape for g in grads] == shapes
  text = str(exported.mlir_module())
  calls = re.findall(r'custom_call @__cudnn\$(\w+)\(([^)]*)\).*?backend_config = "(.*?)"[,}].*? : \((.*?)\) ->', text)
  n = 3 * np.prod(shared, dtype=int)
  q, kv, sums, bias = f'2x{n}x4x8xbf16', '2x3x6x8xbf16', f'2x{n}x4xf32', '2x1x4x6xbf16'
  operands = {name: re.findall(r'tensor<(.*?)>', types) for name, _, _, types in calls}
  assert operands == {
    'fmhaScaleBiasSoftmax': [q, kv, kv, bias],
    'fmhaScaleBiasSoftmaxBackward': [q, kv, kv, sums, q, bias, q],
  }
  configs = [json.loads(config.replace('\\22', '"').replace('\\"', '"')) for _, _, config, _ in calls]
  scores = [config['cudnn_fmha_backend_config']['intermediate_tensor_shape']['dimensions'] for config in configs]
  assert scores == [['2', str(n), '4', '6']] * 2
