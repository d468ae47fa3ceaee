"""Scalars of a training step's log."""

import types

import numpy as np
import pytest

from lingvo_moe.core.errors import UserError
from lingvo_moe.tasks import metrics


def test_drops_of_every_choice_are_logged():
  stats = types.SimpleNamespace(
    aux_loss=2.0, groups=2.0, tokens=4.0, dropped_R=np.arange(10.0), skipped=1.0, entropy=0.0, z_loss=0.0, rounds=1.0,
    tokens_E=np.ones(3),
  )  # fmt: skip
  step = dict.fromkeys(('objective', 'xent', 'aux_loss', 'grad_norm', 'learning_rate', 'target_tokens'), 1.0)
  found = metrics.scalars({**step, 'routing': {'encoder/layer_01': stats}})
  dropped = {name.rpartition('/')[2]: value for name, value in found.items() if name.endswith('dropped')}
  assert list(dropped.values()) == [r / 4 for r in range(10)]
  assert list(dropped)[7:] == ['eighth_dropped', 'choice_9_dropped', 'choice_10_dropped']


def test_a_model_without_experts_logs_its_loss_a_token():
  found = metrics.scalars({'xent': 6.0, 'target_tokens': 4.0, 'grad_norm': 1.0, 'learning_rate': 0.5})
  assert found == {'loss': 1.5, 'grad_norm': 1.0, 'learning_rate': 0.5, 'target_tokens': 4.0}


def test_metrics_without_a_loss_of_tokens_are_refused_with_the_way_out():
  with pytest.raises(UserError, match=r'saw no target_tokens and no xent: .*override scalars\(\) of the task'):
    metrics.scalars({'loss': 1.0, 'grad_norm': 1.0, 'learning_rate': 0.5})


def test_the_dropped_share_is_of_all_choices_of_all_layers():
  layer = lambda tokens, dropped_R: types.SimpleNamespace(tokens=tokens, dropped_R=np.array(dropped_R))
  two_choices, one_choice = layer(10.0, [1.0, 4.0]), layer(20.0, [3.0])
  assert metrics.dropped_share({'routing': {'a': two_choices}}) == 5 / 20
  assert metrics.dropped_share({'routing': {'a': two_choices, 'b': one_choice}}) == (5 + 3) / (20 + 20)
  assert metrics.dropped_share({'routing': {'a': layer(0.0, [0.0])}}) == metrics.dropped_share({}) == 0
