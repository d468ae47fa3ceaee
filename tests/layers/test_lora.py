"""LoRA: shapes of adapters, their product, and what cannot be adapted."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core.errors import UserError
from lingvo_moe.core.weights import Constant, WeightSpec
from lingvo_moe.layers.lora import Lora

INIT = Constant(0.0)
WEIGHTS = {
  'encoder/layers_0of1/attention/wq': WeightSpec((3, 8, 2, 5), 'LMNK', INIT, factored='MK'),
  'encoder/layers_0of1/attention/wo': WeightSpec((3, 2, 5, 8), 'LNKM', INIT, factored='KM'),
  'decoder/layer_01/moe/wi': WeightSpec((4, 8, 6), 'EMH', INIT, factored='MH'),
  'decoder/layer_01/moe/bi': WeightSpec((4, 6), 'EH', INIT),
  'decoder/layer_01/attention/bq': WeightSpec((2, 5), 'NK', INIT),
}


def of(*matrices, rank=3):
  return Lora(rank, 6.0, matrices).specs(WEIGHTS)


def test_layers_and_experts_have_adapters_of_their_own():
  found = {name: (spec.shape, spec.dims) for name, spec in of('*').items()}
  assert found == {
    'lora/encoder/layers_0of1/attention/wq/a': ((3, 8, 3), 'LMR'),
    'lora/encoder/layers_0of1/attention/wq/b': ((3, 3, 2, 5), 'LRNK'),
    'lora/encoder/layers_0of1/attention/wo/a': ((3, 2, 5, 3), 'LNKR'),
    'lora/encoder/layers_0of1/attention/wo/b': ((3, 3, 8), 'LRM'),
    'lora/decoder/layer_01/moe/wi/a': ((4, 8, 3), 'EMR'),
    'lora/decoder/layer_01/moe/wi/b': ((4, 3, 6), 'ERH'),
  }


@pytest.mark.parametrize('name', [name for name, spec in WEIGHTS.items() if spec.factored])
def test_a_weight_gets_the_product_of_its_adapters(name):
  spec, random = WEIGHTS[name], np.random.default_rng(1)
  weight = random.normal(size=spec.shape).astype(np.float32)
  adapters = {n: random.normal(size=s.shape).astype(np.float32) for n, s in of(name.rpartition('/')[2]).items()}
  merged = Lora(3, 6.0, (name,)).merged({name: tf.constant(weight), **adapters})
  assert list(merged) == [name]
  a, b = adapters.values()
  matrix = lambda x, inputs: x.reshape(spec.shape[0], inputs, -1)  # of each layer or expert
  inputs = 8 if name.endswith(('wq', 'wi')) else 10
  for i in range(spec.shape[0]):
    product = sum(np.outer(matrix(a, inputs)[i, :, r], matrix(b, 3)[i, r]) for r in range(3))
    expected = weight[i].reshape(inputs, -1) + 2 * product
    np.testing.assert_allclose(merged[name][i], expected.reshape(spec.shape[1:]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  'matrices, found',
  [(('wq',), 1), (('encoder/*',), 2), (('attention/w?', 'wi'), 3), (('layer_01/*/wi',), 1), (('layer_0?/*/wq',), 1)],
)
def test_patterns_name_the_ends_of_names(matrices, found):
  assert len(of(*matrices)) == 2 * found


@pytest.mark.parametrize(
  'matrices, rank, message',
  [
    (('wq', 'wx'), 3, "'wx' is the end of the name of no matrix; names end in wq, wo, wi"),
    (('bi',), 3, "'bi' is the end of the name of no matrix"),
    ((), 3, 'the end of the name of no matrix'),
    (('wi',), 6, 'adapters are thinner than decoder/layer_01/moe/wi of 8 x 6; saw rank 6: lower it'),
    (('layer_01/attention/wq',), 3, 'names all layers of a block or none; saw some of encoder/layers_0of1/attention'),
  ],
)
def test_what_cannot_be_adapted_is_refused(matrices, rank, message):
  with pytest.raises(UserError, match=message):
    of(*matrices, rank=rank)
