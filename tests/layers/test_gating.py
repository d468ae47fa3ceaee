"""Top-2 gating: slots, weights, losses and counts worked out by hand, then against a plain Python loop."""

import math

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from lingvo_moe.config import registry
from lingvo_moe.layers.gates import gate as gate_lib
from lingvo_moe.layers.gates import top2 as gating
from lingvo_moe.ops import backend, xla

GOT_NO_SLOT = 0.0


def gate(probabilities_SE, *, paddings_S=None, noise_S=None, capacity=None):
  """Routing of one group with these gate probabilities."""
  logits_GSE = tf.math.log(tf.constant([probabilities_SE], tf.float32))
  paddings_GS = tf.zeros(logits_GSE.shape[:2]) if paddings_S is None else tf.constant([paddings_S], tf.float32)
  noise_GS = None if noise_S is None else tf.constant([noise_S], tf.float32)
  return gating.top2_gating(logits_GSE, paddings_GS, capacity=capacity, noise_GS=noise_GS)


def algorithm_1(logits_GSE, paddings_GS, capacity, noise_GS):
  """Algorithm 1 token by token; skipped second choices take no slot (see top2.py). Returns numpy values by name."""
  groups, size, num_experts = logits_GSE.shape
  out = {
    'expert': np.zeros([groups, size, 2], int),
    'slot': np.zeros([groups, size, 2], int),
    'weight': np.zeros([groups, size, 2]),
    'tokens_E': np.zeros(num_experts),
    'dropped_R': np.zeros(2),
    'skipped': 0,
    'tokens': 0,
    'rounds': 1,
    'z_loss': 0.0,
  }
  losses, entropies = [], []
  for g in range(groups):
    count_E, first_count_E, mean_gate_E = np.zeros(num_experts, int), np.zeros(num_experts), np.zeros(num_experts)
    real = [s for s in range(size) if not paddings_GS[g, s]]
    gates_SE = np.exp(logits_GSE[g] - logits_GSE[g].max(-1, keepdims=True))
    gates_SE /= gates_SE.sum(-1, keepdims=True)
    ranked_SE = np.argsort(-logits_GSE[g], axis=-1, kind='stable')

    def send(s, r, expert, weight, g=g, count_E=count_E):
      if count_E[expert] < capacity:
        out['expert'][g, s, r], out['slot'][g, s, r], out['weight'][g, s, r] = expert, count_E[expert], weight
        out['tokens_E'][expert] += 1
      else:
        out['dropped_R'][r] += 1
      count_E[expert] += 1

    for s in real:
      e1, e2 = ranked_SE[s, :2]
      first_count_E[e1] += 1
      mean_gate_E += gates_SE[s]
      out['z_loss'] += np.log(np.sum(np.exp(logits_GSE[g, s]))) ** 2
      entropies.append(-np.sum(gates_SE[s] * np.log(gates_SE[s])))
      send(s, 0, e1, gates_SE[s, e1] / (gates_SE[s, e1] + gates_SE[s, e2]))
    for s in real:
      e1, e2 = ranked_SE[s, :2]
      weight = gates_SE[s, e2] / (gates_SE[s, e1] + gates_SE[s, e2])
      if 2 * weight > noise_GS[g, s]:
        send(s, 1, e2, weight)
      else:
        out['skipped'] += 1
    out['tokens'] += len(real)
    if real:
      losses.append(num_experts * np.sum(first_count_E / len(real) * mean_gate_E / len(real)))
  return {**out, 'aux_loss': sum(losses), 'groups': len(losses), 'entropy': sum(entropies)}


def test_four_tokens_by_hand():
  routing = gate(
    [
      [0.6, 0.3, 0.1],  # experts 0, 1
      [0.5, 0.1, 0.4],  # experts 0, 2
      [0.2, 0.7, 0.1],  # experts 1, 0
      [0.8, 0.1, 0.1],
    ],
    capacity=2,
  )
  np.testing.assert_array_equal(routing.expert_GSR[0], [[0, 1], [0, 2], [1, 0], [0, 1]])
  # First choices in order: expert 0 gets tokens 0, 1 and has no room for 3; expert 1 gets 2.
  # Second choices behind them: token 0 is the second of expert 1; token 1 the first of expert 2; token 2 finds three
  # first choices before it at expert 0; token 3 finds two at expert 1.
  kept = np.array([[1, 1], [1, 1], [1, 0], [0, 0]])
  np.testing.assert_array_equal(routing.weight_GSR[0] > 0, kept)
  np.testing.assert_array_equal(routing.slot_GSR[0] * kept, [[0, 1], [1, 0], [0, 0], [0, 0]])
  weights = np.array([[0.6 / 0.9, 0.3 / 0.9], [0.5 / 0.9, 0.4 / 0.9], [0.7 / 0.9, 0.2 / 0.9], [0.8 / 0.9, 0.1 / 0.9]])
  np.testing.assert_allclose(routing.weight_GSR[0], weights * kept, rtol=1e-6)
  stats = routing.stats
  assert (float(stats.tokens), float(stats.dropped_R[0]), float(stats.dropped_R[1])) == (4, 1, 2)
  assert float(stats.skipped) == 0
  np.testing.assert_array_equal(stats.tokens_E, [2, 2, 1])
  # 3 * sum_e (c_e / 4) * mean gate: c = 3, 1, 0.
  np.testing.assert_allclose(stats.aux_loss, 3 * (3 / 4 * 2.1 / 4 + 1 / 4 * 1.2 / 4), rtol=1e-6)


def test_second_choice_queues_behind_every_first_choice():
  # The second choice of the first token meets the first choices of later tokens.
  routing = gate([[0.1, 0.3, 0.6], [0.1, 0.6, 0.3], [0.1, 0.6, 0.3]], capacity=3)
  np.testing.assert_array_equal(routing.slot_GSR[0, :, 0], [0, 0, 1])  # of experts 2, 1, 1
  np.testing.assert_array_equal(routing.slot_GSR[0, :, 1], [2, 1, 2])  # of experts 1, 2, 2
  np.testing.assert_array_equal(routing.weight_GSR[0] > 0, np.ones([3, 2]))


def test_a_dropped_first_choice_still_counts_before_second_choices():
  # Expert 0 has two slots for three first choices; the second choice of token 3 comes fourth there, not third.
  routing = gate([[0.7, 0.2, 0.1]] * 3 + [[0.3, 0.1, 0.6]], capacity=2)
  np.testing.assert_array_equal(routing.slot_GSR[0, :3, 0], [0, 1, 2])
  assert int(routing.slot_GSR[0, 3, 1]) == 3
  assert float(routing.weight_GSR[0, 3, 1]) == GOT_NO_SLOT


def test_gates_are_normalised_before_drops_and_not_rescaled_after():
  routing = gate([[0.6, 0.2, 0.2], [0.6, 0.1, 0.3]], capacity=1)
  # Token 1 loses its first choice; its second keeps 0.3 / 0.9 and does not grow to 1.
  np.testing.assert_allclose(routing.weight_GSR[0, 1], [0, 0.3 / 0.9], rtol=1e-6)


def test_weights_sum_to_one_where_nothing_is_dropped():
  routing = gate([[0.6, 0.2, 0.2], [0.1, 0.1, 0.8]])
  np.testing.assert_allclose(tf.reduce_sum(routing.weight_GSR, axis=-1), [[1, 1]], rtol=1e-6)


@pytest.mark.parametrize('threshold, kept', [(0.5, [1, 1, 0, 0]), (1.0, [1, 0, 0, 0]), (0.3, [1, 1, 1, 1])])
def test_a_second_choice_is_kept_with_probability_gate_over_threshold(threshold, kept):
  logits = tf.math.log(tf.constant([[[0.7, 0.3]] * 4]))
  noise = tf.constant([[0.29, 0.59, 0.61, 0.99]])
  routing = gating.top2_gating(logits, tf.zeros([1, 4]), noise_GS=noise, threshold=threshold)
  np.testing.assert_array_equal(routing.weight_GSR[0, :, 1] > 0, np.array(kept) > 0)
  nearest = np.minimum(0.7 - 0.3, np.abs(0.3 / threshold - noise[0]))
  np.testing.assert_allclose(routing.margin_GS[0], nearest, atol=1e-6)


def test_the_threshold_of_second_choices_is_a_field():
  config = registry.get('mt.cldr.Tiny')(second_choice_threshold=1.0)
  assert config.moe_gate == gating.Top2(second_choice_threshold=1.0) and config.moe().gate == config.moe_gate


def test_second_choice_is_kept_where_twice_its_gate_exceeds_the_noise():
  routing = gate([[0.7, 0.3]] * 3, noise_S=[0.0, 0.59, 0.61])
  np.testing.assert_allclose(routing.weight_GSR[0], [[0.7, 0.3], [0.7, 0.3], [0.7, 0]], rtol=1e-6)
  assert float(routing.stats.skipped) == 1


def test_randomly_skipped_second_choice_takes_no_slot():
  # Departure from line 22 of Algorithm 1.
  routing = gate([[0.7, 0.2, 0.1]] * 3, noise_S=[0, 0.9, 0], capacity=2)
  np.testing.assert_array_equal(routing.weight_GSR[0, :, 1] > 0, [True, False, True])
  np.testing.assert_array_equal(tf.gather(routing.slot_GSR[0, :, 1], [0, 2]), [0, 1])
  assert float(routing.stats.dropped_R[1]) == 0


def test_padding_takes_no_slot_and_counts_in_no_statistic():
  real = [[0.6, 0.3, 0.1], [0.5, 0.1, 0.4], [0.2, 0.7, 0.1]]
  alone = gate(real, capacity=2, noise_S=[0.1, 0.9, 0.5])
  padded = gate(
    [real[0], [0.9, 0.05, 0.05], real[1], [0.9, 0.05, 0.05], real[2]],
    paddings_S=[0, 1, 0, 1, 0],
    capacity=2,
    noise_S=[0.1, 0, 0.9, 0, 0.5],
  )
  np.testing.assert_array_equal(padded.weight_GSR[0, 1::2], np.zeros([2, 2]))
  for field in ('expert_GSR', 'slot_GSR', 'weight_GSR'):
    np.testing.assert_array_equal(getattr(padded, field)[0, ::2], getattr(alone, field)[0])
  for field, value in alone.stats._asdict().items():
    np.testing.assert_allclose(getattr(padded.stats, field), value, rtol=1e-6, err_msg=field)


def test_auxiliary_loss_is_one_at_perfect_balance():
  routing = gate(np.full([4, 4], 0.2) + 0.2 * np.eye(4))
  np.testing.assert_allclose(routing.stats.aux_loss, 1, rtol=1e-6)


def test_auxiliary_loss_is_the_number_of_experts_at_total_collapse():
  logits = tf.one_hot(tf.zeros([1, 5], tf.int32), 4) * 50
  np.testing.assert_allclose(gating.top2_gating(logits, tf.zeros([1, 5])).stats.aux_loss, 4, rtol=1e-6)


def test_auxiliary_loss_of_an_undecided_gate_is_one_whoever_is_first():
  np.testing.assert_allclose(gating.top2_gating(tf.zeros([1, 5, 4]), tf.zeros([1, 5])).stats.aux_loss, 1, rtol=1e-6)


def test_a_group_of_padding_only_counts_nowhere():
  logits = tf.random.normal([2, 5, 4])
  with_empty = gating.top2_gating(logits, tf.constant([[0.0] * 5, [1.0] * 5]), capacity=2)
  alone = gating.top2_gating(logits[:1], tf.zeros([1, 5]), capacity=2)
  for field, value in alone.stats._asdict().items():
    np.testing.assert_allclose(getattr(with_empty.stats, field), value, rtol=1e-6, err_msg=field)


def test_a_batch_of_padding_only_is_finite():
  routing = gating.top2_gating(tf.random.normal([2, 3, 4]), tf.ones([2, 3]))
  for value in tf.nest.flatten(routing.stats._replace(rounds=0.0)):
    np.testing.assert_array_equal(value, tf.zeros_like(value))
  np.testing.assert_array_equal(routing.weight_GSR, tf.zeros([2, 3, 2]))


def test_entropy_is_log_e_a_token_where_the_gate_is_undecided():
  np.testing.assert_allclose(
    gating.top2_gating(tf.zeros([1, 2, 8]), tf.zeros([1, 2])).stats.entropy, 2 * math.log(8), rtol=1e-6
  )


def test_without_a_capacity_nothing_is_dropped():
  logits = tf.random.normal([3, 16, 4])
  with backend.use(xla.BACKEND):
    static = gating.top2_gating(logits, tf.zeros([3, 16]))
  any_shape = [tf.TensorSpec([None, None, 4]), tf.TensorSpec([None, None])]
  route = tf.function(lambda l, p: tf.nest.map_structure(tf.convert_to_tensor, gating.top2_gating(l, p)), any_shape)
  dynamic = route(logits, tf.zeros([3, 16]))
  for routing in static, dynamic:
    assert float(routing.stats.dropped_R[0]) == float(routing.stats.dropped_R[1]) == 0
    assert np.all(routing.weight_GSR > 0)
  busiest = max(np.bincount(np.ravel(e), minlength=4).max() for e in dynamic.expert_GSR.numpy())
  assert int(dynamic.capacity) == busiest < 16  # the longest queue
  assert int(static.capacity) == busiest


def test_a_gate_that_underflows_keeps_its_slot_and_carries_no_token():
  # exp(-200) is 0 in float32; the next token has expert 1 for its first choice.
  routing = gating.top2_gating(tf.constant([[[200.0, 0.0, -200.0], [0.0, 9.0, 8.0]]]), tf.zeros([1, 2]))
  np.testing.assert_array_equal(routing.expert_GSR[0], [[0, 1], [1, 2]])
  np.testing.assert_array_equal(routing.slot_GSR[0], [[0, 1], [0, 0]])  # behind the first choice
  np.testing.assert_array_equal(routing.stats.tokens_E, [1, 2, 1])
  np.testing.assert_array_equal(routing.weight_GSR[0, 0], [1, 0])


def test_the_margin_is_that_of_the_closest_decision_on_a_token():
  gates = [[0.6, 0.3, 0.1], [0.5, 0.45, 0.05], [0.4, 0.4, 0.2]]
  # Between first and second choice .3, .05 and 0; between the second and the rest .2, .4 and .2.
  np.testing.assert_allclose(gate(gates).margin_GS[0], [0.2, 0.05, 0], atol=1e-6)
  # The second choice is kept where twice its share of the two exceeds the noise: 2 * .3 / .9 = .667, 2 * .45 / .95 =
  # .947.
  noisy = gate(gates, noise_S=[0.6, 0.1, 0.1])
  np.testing.assert_allclose(noisy.margin_GS[0], [2 / 3 - 0.6, 0.05, 0], atol=1e-6)
  skipped = gate(gates, noise_S=[0.7, 0.95, 0.1])  # the first two second choices are
  np.testing.assert_allclose(skipped.margin_GS[0], [0.7 - 2 / 3, 0.95 - 0.9 / 0.95, 0], atol=1e-6)


def test_groups_do_not_interact():
  logits, paddings = tf.random.normal([3, 8, 4]), tf.cast(tf.random.uniform([3, 8]) < 0.2, tf.float32)
  together = gating.top2_gating(logits, paddings, capacity=2)
  for g in range(3):
    alone = gating.top2_gating(logits[g : g + 1], paddings[g : g + 1], capacity=2)
    np.testing.assert_array_equal(together.slot_GSR[g], alone.slot_GSR[0])
    np.testing.assert_allclose(together.weight_GSR[g], alone.weight_GSR[0], rtol=1e-6)


@hypothesis.settings(max_examples=30)
@hypothesis.given(st.integers(1, 3), st.integers(1, 12), st.integers(2, 6), st.integers(1, 5), st.integers(0, 10**6))
def test_agrees_with_algorithm_1_token_by_token(groups, size, num_experts, capacity, seed):
  rng = np.random.default_rng(seed)
  logits = rng.normal(size=[groups, size, num_experts]).astype(np.float32) * 2
  paddings = (rng.random([groups, size]) < 0.3).astype(np.float32)
  noise = rng.random([groups, size]).astype(np.float32)
  routing = gating.top2_gating(tf.constant(logits), paddings, capacity=capacity, noise_GS=noise)
  plain = algorithm_1(logits, paddings, capacity, noise)
  kept = plain['weight'] > 0
  np.testing.assert_allclose(routing.weight_GSR, plain['weight'], atol=1e-6)
  np.testing.assert_array_equal(routing.expert_GSR.numpy()[kept], plain['expert'][kept])
  np.testing.assert_array_equal(routing.slot_GSR.numpy()[kept], plain['slot'][kept])
  for field, value in routing.stats._asdict().items():
    np.testing.assert_allclose(value, plain[field], rtol=1e-5, atol=1e-5, err_msg=field)
  # A slot holds one token.
  seats = [
    (g, *seat)
    for g, s, r in np.argwhere(kept)
    for seat in [(int(routing.expert_GSR[g, s, r]), int(routing.slot_GSR[g, s, r]))]
  ]
  assert len(set(seats)) == len(seats)


def test_gradients_of_weights_and_auxiliary_loss_reach_the_gate():
  logits = tf.random.normal([2, 6, 4])
  paddings = tf.constant([[0.0] * 6, [0.0] * 4 + [1.0] * 2])
  noise, pull = tf.random.uniform([2, 6]), tf.random.normal([2, 6, 2])
  route = lambda logits: gating.top2_gating(logits, paddings, capacity=3, noise_GS=noise)
  routing = route(logits)
  first_GSE = tf.one_hot(routing.expert_GSR[..., 0], 4) * (1 - paddings)[..., tf.newaxis]

  def plain(logits):
    """Gates of the chosen two, and the auxiliary loss, with the choices held fixed."""
    gates = tf.nn.softmax(logits)
    two = tf.gather(gates, routing.expert_GSR, batch_dims=2)
    weights = two / tf.reduce_sum(two, -1, keepdims=True) * tf.cast(routing.weight_GSR > 0, tf.float32)
    losses = []
    for g, tokens in enumerate((6, 4)):
      c = tf.reduce_sum(first_GSE[g], 0) / tokens
      losses.append(4 * tf.reduce_sum(c * tf.reduce_mean(gates[g, :tokens], 0)))
    return tf.reduce_sum(weights * pull) + 3 * sum(losses)

  def ours(logits):
    routing = route(logits)
    return tf.reduce_sum(routing.weight_GSR * pull) + 3 * routing.stats.aux_loss

  gradients = []
  for f in (ours, plain):
    with tf.GradientTape() as tape:
      tape.watch(logits)
      value = f(logits)
    gradients.append(tape.gradient(value, logits).numpy())
  np.testing.assert_allclose(gradients[0], gradients[1], atol=1e-6)
  assert np.all(gradients[0][1, 4:] == 0)  # padding
  direction = tf.random.normal([2, 6, 4])  # choices do not change within a step this small
  difference = (ours(logits + 1e-3 * direction) - ours(logits - 1e-3 * direction)) / 2e-3
  np.testing.assert_allclose(np.sum(gradients[0] * direction), difference, rtol=2e-2, atol=2e-3)


def test_one_expert_is_refused():
  with pytest.raises(ValueError, match=r'needs 2 experts and 1 slot or more; saw num_experts=1, capacity=4: add exp'):
    gating.top2_gating(tf.zeros([1, 2, 1]), tf.zeros([1, 2]), capacity=4)


def test_no_slot_is_refused():
  with pytest.raises(ValueError, match=r'saw num_experts=4, capacity=0: .*raise capacity_factor'):
    gating.top2_gating(tf.zeros([1, 2, 4]), tf.zeros([1, 2]), capacity=0)


@pytest.mark.parametrize(
  'size, experts, factor, slots',
  [
    (8, 4, 2.0, 4),
    (9, 4, 2.0, 5),
    (1, 64, 2.0, 1),
    (10, 3, 1.25, 5),
    (100, 2, 1.1, 55),
    (1000, 10, 1.23, 123),
    (10_000, 2, 1.2346, 6173),  # a factor counts to its fourth decimal
    (10, 2, 4.0, 10),  # of one expert a token takes one slot
    (4096, 8, 4.5e6, 4096),
  ],
)
def test_capacity_rounds_up_and_is_from_one_to_all_tokens(size, experts, factor, slots):
  assert gate_lib.expert_capacity(size, experts, factor) == slots
  assert int(gate_lib.expert_capacity(tf.constant(size), experts, factor)) == slots


@pytest.mark.parametrize('factor', [1.0, 1.1, 1.25, 1.3, 1.5, 1.7, 2.0, 2.2])
def test_capacity_is_the_same_whether_the_size_is_known_at_trace_time(factor):
  sizes = np.arange(1, 3000)
  for experts in (2, 3, 7, 8, 11, 16, 30):
    known = [gate_lib.expert_capacity(int(s), experts, factor) for s in sizes]
    np.testing.assert_array_equal(gate_lib.expert_capacity(tf.constant(sizes), experts, factor), known)
