"""Initial values, jitter and type of the router, as Switch Transformers (arXiv 2101.03961, section 2.4) have them."""

import dataclasses
import math

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.config import registry
from lingvo_moe.core import prng, weights
from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.layers.gates.top_k import Switch
from lingvo_moe.layers.moe import MoE

LAYER = MoE(model_dim=8, hidden_dim=16, num_experts=4, gate=Switch(), capacity_factor=4.0, dispatch='einsum')
X = prng.normal(prng.key(1, 'x'), [2, 40, 8])


def run(layer, key=None, x_BTM=X):
  theta = weights.initialize(layer.weights(), seed=1)
  return layer(theta, x_BTM, tf.zeros(x_BTM.shape[:2]), key)


def test_a_truncated_normal_has_its_deviation_and_no_value_beyond_two_of_the_whole():
  spec = WeightSpec((200, 200), 'MH', weights.TruncatedNormal(0.5))
  drawn = weights.initialize({'w': spec}, 1)['w'].numpy()
  assert abs(np.std(drawn) - 0.5) < 0.01 and abs(np.mean(drawn)) < 0.01
  # A normal that is cut at 2 has deviation 0.8796.
  limit = 2 * 0.5 / 0.8796
  assert 0.98 * limit < np.max(np.abs(drawn)) <= 1.0001 * limit


def test_every_matrix_of_switch_base_has_sigma_sqrt_s_over_its_inputs():
  specs = registry.get('switch.c4.Base')().program().weight_specs
  sigma = {name: s.init.stddev for name, s in specs.items() if isinstance(s.init, weights.TruncatedNormal)}
  inputs = {'wi': 768, 'wg': 768, 'wq': 768, 'wk': 768, 'wv': 768, 'gate': 768, 'wo': 2048}
  for name, stddev in sigma.items():
    is_attention = 'attention' in name
    fan_in = 768 if is_attention else inputs[name.split('/')[-1]]  # 12 heads of 64 too
    assert math.isclose(stddev, math.sqrt(0.1 / fan_in)), name
  assert {name for name in specs if name not in sigma and name.split('/')[-1] != 'scale'} == {
    'target_embedding/table',
    *(name for name in specs if name.endswith('/relative')),
  }
  assert math.isclose(sigma['encoder/layers_1of2/moe/wi'], 0.0114, rel_tol=2e-3)


def test_models_that_are_not_switchs_begin_as_before():
  config = registry.get('mt.cldr.Tiny')()
  assert config.init_scale == 0 and config.router_jitter == 0
  specs = config.program().weight_specs
  wi = specs['encoder/layer_01/moe/wi']
  assert wi.init == weights.Glorot(*wi.shape[1:])
  drawn = wi.init(prng.key(3), wi)
  limit = math.sqrt(6 / sum(wi.shape[1:]))
  np.testing.assert_array_equal(drawn, (2 * prng.uniform(prng.key(3), wi.shape) - 1) * limit)


def test_jitter_multiplies_what_the_router_reads_in_training_alone():
  jittered = dataclasses.replace(LAYER, router_jitter=0.5)
  key = prng.key(2, 'jitter')
  factor = 1 + 0.5 * (2 * prng.uniform(prng.bits(prng.fold(key, 'jitter'), [2, 40]), [2, 40, 8]) - 1)
  _, seen = run(LAYER, key, X * factor)
  y, routing = run(jittered, key)
  np.testing.assert_allclose(tf.reshape(routing.weight_GSR, [-1]), tf.reshape(seen.weight_GSR, [-1]), rtol=1e-6)
  assert not np.allclose(y, run(LAYER, key, X * factor)[0])  # experts read the tokens themselves
  np.testing.assert_array_equal(run(jittered)[0], run(LAYER)[0])


@pytest.mark.parametrize('gate', ['switch', 'top2', 'noisy_top_k', 'hierarchical', 'expert_choice', 'soft'])
def test_a_bfloat16_router_rounds_logits_and_no_more(gate):
  config = registry.get('mt.cldr_gates.Tiny')(
    gate=gate, groups_of_experts=4 * (gate == 'hierarchical'), experts_in='encoder'
  )
  layer = dataclasses.replace(config.moe(), num_groups=1)
  x_BTM = prng.normal(prng.key(1, 'x'), [2, 64, layer.model_dim])
  theta = {name: prng.normal(prng.key(1, name), spec.shape) * 0.1 for name, spec in layer.weights().items()}
  of = lambda dtype: dataclasses.replace(layer, router_dtype=dtype)(theta, x_BTM, tf.zeros([2, 64]), prng.key(4))[1]
  whole, rounded = of('float32'), of('bfloat16')
  assert rounded.weight_GSR.dtype == tf.float32
  assert not np.array_equal(whole.weight_GSR, rounded.weight_GSR)
  same = np.all(whole.expert_GSR == rounded.expert_GSR, axis=-1) & np.all(
    (whole.weight_GSR > 0) == (rounded.weight_GSR > 0), axis=-1
  )
  assert np.mean(same) > 0.5
  np.testing.assert_allclose(whole.weight_GSR[same], rounded.weight_GSR[same], atol=0.03)


def test_logits_tie_in_bfloat16():
  # 1 + 2^-9 is 1 in bfloat16: the second expert is a little better, and the first is chosen.
  theta = {'gate': tf.constant([[1.0, 1.0 + 2**-9]])}
  chosen = lambda dtype: Switch()(theta, tf.ones([1, 1, 1], dtype), tf.zeros([1, 1])).expert_GSR.numpy().item()
  assert (chosen(tf.float32), chosen(tf.bfloat16)) == (1, 0)
