"""Optimizers and schedules by name: their arguments are fields, and one's own are taken as those of the package."""

import dataclasses
from unittest import mock

import pytest
import tensorflow as tf

from lingvo_moe.config import fields, registry
from lingvo_moe.core.errors import UserError
from lingvo_moe.layers import ffn, norm
from lingvo_moe.optim import adam, schedule, tables

TINY = registry.get('mt.cldr.Tiny')


def test_arguments_have_the_values_of_fields_and_none_leaves_the_default():
  config = TINY(optimizer='adamw', weight_decay=0.3, schedule='wsd', learning_rate=0.5, warmup_steps=7, max_steps=90)
  assert tables.OPTIMIZERS['adamw'].of(config) == adam.AdamW(weight_decay=0.3)
  assert config.program().optimizer == adam.AdamW(weight_decay=0.3)
  assert config.program().schedule == schedule.WarmupStableDecay(0.5, 7, 90, config.final_rate, config.decay_share)
  assert tables.SCHEDULES['constant'].of(config, learning_rate=2.0) == schedule.ConstantRate(2.0)


@dataclasses.dataclass(frozen=True)
class Decayed(adam.Adam):
  """Stands for an optimizer of a user's own."""

  weight_decay: float = 0.0


def test_an_optimizer_and_a_schedule_of_ones_own_are_taken_with_the_fields_that_they_read():
  values = {'optimizer': 'own', 'weight_decay': 0.2, 'schedule': 'own', 'final_rate': 0.25}
  with pytest.raises(UserError, match='optimizer must be one of adafactor, adam, adamw; saw .own.'):
    TINY(**values)
  own = {'own': tables.Entry(Decayed, {'weight_decay': 'weight_decay'})}
  with (
    mock.patch.dict(tables.OPTIMIZERS, own),
    mock.patch.dict(tables.SCHEDULES, own=tables.Entry(schedule.ConstantRate, {'rate': 'final_rate'})),
  ):
    config = TINY(**values)
    fields.check_effects(config, ['weight_decay', 'final_rate'])
    assert config.program().optimizer == Decayed(weight_decay=0.2)
    assert float(config.program().schedule(tf.constant(3))) == 0.25
    assert [*tables.ThatRead(tables.OPTIMIZERS, 'weight_decay')] == ['adamw', 'own']
    with pytest.raises(UserError, match='it is for optimizer=adam or adamw'):
      fields.check_effects(config, ['adam_beta2'])
    with pytest.raises(UserError, match='one of adafactor, adam, adamw, own; saw .sgd.'):
      TINY(optimizer='sgd')
  assert len(tables.ThatRead(tables.OPTIMIZERS, 'weight_decay')) == 1
  assert 'own' not in tables.ThatRead(tables.SCHEDULES, 'final_rate')


def test_an_activation_and_a_norm_of_ones_own_are_taken():
  own = {'own': ffn.Activation(tf.square, gated=False)}
  with mock.patch.dict(ffn.ACTIVATIONS, own), mock.patch.dict(norm.NORMS, own=norm.RMSNorm):
    model = TINY(activation='own', norm='own').model()
    assert isinstance(model.encoder.norm, norm.RMSNorm)
    layer = ffn.FeedForward(1, 1, activation='own', bias=False)
    one = tf.ones([1, 1])
    assert layer({'wi': 3 * one, 'wo': one}, one[tf.newaxis]).numpy().item() == 9
