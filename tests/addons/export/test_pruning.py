"""Experts that are left out: which, and that tokens which did not choose them do not notice."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.addons.export import pruning
from lingvo_moe.core import prng
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.errors import UserError
from lingvo_moe.layers.gates import table
from lingvo_moe.layers.moe import MoE


def test_the_most_used_experts_are_kept_with_every_pair_counted_alike():
  # Shares of the first pair: .4 .3 .2 .1; of the second, a hundred times as long: 0 .1 .5 .4.
  choices = {'encoder/layer_01': np.array([[4, 3, 2, 1], [0, 100, 500, 400]])}
  kept = pruning.choose_experts(choices, 2)['encoder/layer_01']
  assert kept.experts == [2, 3] and kept.share == pytest.approx(0.35 + 0.25)
  assert pruning.choose_experts({'a': np.ones([1, 4])}, 2)['a'].experts == [0, 1]  # of equals the first
  assert pruning.choose_experts({'a': np.zeros([1, 4])}, 3)['a'].share == 0


def test_languages_choose_the_pairs_between_them_or_else_those_that_have_one():
  into = [('de', 'en'), ('fr', 'en'), ('cs', 'en')]
  assert pruning.choose_pairs(into, ['de', 'fr']) == into[:2]
  assert pruning.choose_pairs(into, ['de', 'en']) == into[:1]
  assert pruning.choose_pairs([*into, ('de', 'fr')], ['de', 'fr']) == [('de', 'fr')]
  assert pruning.choose_pairs(into, []) == into
  with pytest.raises(UserError, match="this run has no language 'dd'; closest: de"):
    pruning.choose_pairs(into, ['de', 'dd'])


@pytest.mark.parametrize('gate', ['top2', 'top_k', 'noisy_top_k'])
@pytest.mark.parametrize('expert', ['relu', 'deep'])
def test_tokens_whose_experts_are_kept_get_the_same_outputs(gate, expert):
  layer = lambda experts: MoE(
    4, 8, experts, gate=table.GATES[gate](), capacity_factor=None, expert=expert, shared_experts=1, dispatch='einsum'
  )
  specs = weights_lib.flatten({'encoder': {'layer_01': {'moe': layer(6).weights()}}})
  rng = np.random.default_rng(1)
  weights = {name: rng.normal(size=spec.shape).astype(np.float32) for name, spec in specs.items()}
  kept = {'encoder/layer_01': pruning.KeptExperts([0, 2, 3, 5], 1.0)}
  pruned = pruning.without_others(weights, specs, kept)
  tensors = lambda weights: {name: tf.constant(w) for name, w in weights.items()}
  own = lambda weights: weights_lib.unflatten(tensors(weights))['encoder']['layer_01']['moe']
  x_BTM = prng.normal(prng.key(1, 'x'), [2, 20, 4])

  y_BTM, routing = layer(6)(own(weights), x_BTM, tf.zeros([2, 20]))
  pruned_BTM, _ = layer(4)(own(pruned), x_BTM, tf.zeros([2, 20]))
  same_S = np.isin(routing.expert_GSR.numpy()[0], kept['encoder/layer_01'].experts).all(axis=-1)
  assert 5 < same_S.sum() < 35
  y_SM, pruned_SM = (np.reshape(y, [40, 4]) for y in (y_BTM, pruned_BTM))
  np.testing.assert_allclose(pruned_SM[same_S], y_SM[same_S], atol=1e-5)
  assert np.abs(pruned_SM[~same_S] - y_SM[~same_S]).max() > 0.1
  assert {name: w.shape for name, w in pruned.items()} == {
    name: spec.shape
    for name, spec in weights_lib.flatten({'encoder': {'layer_01': {'moe': layer(4).weights()}}}).items()
  }
