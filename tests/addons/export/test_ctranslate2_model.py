"""Models that go out for CTranslate2, and those that do not; tests/test_exported_models.py compares the values."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.addons.export import ctranslate2_model
from lingvo_moe.config import same_function
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.weights import Constant, WeightSpec
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.tasks.mt.mt_config import MtConfig

VALUES = dict(
  source_vocab_size=12, target_vocab_size=12, model_dim=8, ff_dim=8, num_heads=2, head_dim=4, batch_tokens=64
)
VALUES |= dict(encoder_layers=1, decoder_layers=1, max_length=16)


@dataclasses.dataclass(frozen=True)
class Gated(FeedForward):
  """(relu(x wi + bi) * (x wg)) wo + bo: the weights of a ReLU layer by name, and one more."""

  def weights(self):
    return {**FeedForward.weights(self), 'wg': WeightSpec((8, 8), 'MH', Constant(1.0))}

  def __call__(self, theta, x_BTM, key=None):
    h_BTH = tf.nn.relu(x_BTM @ theta['wi'] + theta['bi']) * (x_BTM @ theta['wg'])
    return h_BTH @ theta['wo'] + theta['bo']


@dataclasses.dataclass(frozen=True)
class Squared(FeedForward):
  """A layer of the same weights and another function."""

  def __call__(self, theta, x_BTM, key=None):
    return tf.square(tf.nn.relu(x_BTM @ theta['wi'] + theta['bi'])) @ theta['wo'] + theta['bo']


def own_config(layer, in_decoder=True):
  """A configuration, as a user's file has it, whose fields are the defaults and whose layers are of another kind."""

  @dataclasses.dataclass(frozen=True)
  class Own(MtConfig):
    def model(self):
      model, ffn = MtConfig.model(self), layer(self.model_dim, self.ff_dim)
      stack = 'decoder' if in_decoder else 'encoder'
      return dataclasses.replace(model, **{stack: dataclasses.replace(getattr(model, stack), ffn=ffn)})

  return Own(**VALUES)


@pytest.mark.parametrize('layer', [Gated, Squared])
@pytest.mark.parametrize('in_decoder', [False, True])
def test_a_model_whose_layers_are_another_function_is_refused_though_its_fields_are_the_defaults(layer, in_decoder):
  """Of the kind: an export compares functions, and not the fields of a configuration."""
  with pytest.raises(UserError, match='saw layers of its own: use --format=litert'):
    ctranslate2_model.require(own_config(layer, in_decoder))


@pytest.mark.parametrize(
  ('values', 'seen'),
  [
    (dict(activation='swish'), "activation='swish'"),
    (dict(masked_symbols=(5,)), r'masked_symbols=\(5,\)'),
    (dict(norm='rms', post_norm=True), "norm='rms', post_norm=True"),
    (dict(positions='relative', relative_buckets=16), "positions='relative'"),
    (dict(begin='eos'), "begin='eos'"),
    (dict(joined_experts=2), 'joined_experts=2'),
  ],
)
def test_fields_that_make_another_function_are_named(values, seen):
  with pytest.raises(UserError, match=f'defaults of a translation model; saw {seen}: use --format=litert'):
    ctranslate2_model.require(MtConfig(**VALUES, **values))


@pytest.mark.parametrize(
  'values',
  [
    {},
    dict(scan_layers=True),
    dict(tag_target=True),
    dict(residual_dropout=0.3),
    dict(shared_vocab=True),
    dict(lora_rank=2),
  ],
)
def test_fields_that_make_no_other_function_are_taken(values):
  pytest.importorskip('ctranslate2')
  ctranslate2_model.require(MtConfig(**VALUES, **values))


def test_every_weight_is_read_or_the_export_refuses(monkeypatch):
  """Of the kind: a weight that no part of a written model holds is a part of the function that is lost."""
  pytest.importorskip('ctranslate2')

  class Vocab:
    size = 12

    def pieces(self, ids):
      return [f'p{i}' for i in ids]

  config = MtConfig(**VALUES)
  specs = config.program().model_specs
  weights = {name: np.ones(spec.shape, np.float32) for name, spec in specs.items()}
  assert ctranslate2_model._spec(config, (Vocab(), Vocab()), weights_lib.unflatten(weights))
  weights['decoder/layer_00/ffn/wg'] = np.ones([8, 8], np.float32)
  with pytest.raises(UserError, match=r'no place for all weights of this model \(decoder/layer_00/ffn/wg\)'):
    ctranslate2_model._spec(config, (Vocab(), Vocab()), weights_lib.unflatten(weights))


def test_functions_are_the_same_whatever_changes_training_alone():
  config = MtConfig(**VALUES)
  assert same_function.is_same(dataclasses.replace(config, label_smoothing=0.2, ffn_dropout=0.1), config)
  assert not same_function.is_same(dataclasses.replace(config, norm_epsilon=1e-3), config)
  assert (
    same_function.differing(dataclasses.replace(config, norm_epsilon=1e-3, ffn_dropout=0.1), config)
    == 'norm_epsilon=0.001'
  )


def test_relative_biases_that_are_not_there_are_not_shared():
  """Of the kind: fields that need each other do not end in a trace of a layer. What sets such a field is refused."""
  assert MtConfig(**VALUES, shared_relative=True).model() == MtConfig(**VALUES).model()
