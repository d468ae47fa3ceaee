"""Loss-free balancing, sigmoid scores and choice within groups of experts, by hand and against plain loops."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import tiny_config

from lingvo_moe.config import configuration, registry
from lingvo_moe.core import prng
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.weights import Constant, WeightSpec
from lingvo_moe.layers.gates.top_k import Switch, TopK
from lingvo_moe.optim import updates
from lingvo_moe.optim.adafactor import Adafactor
from lingvo_moe.optim.adam import Adam
from lingvo_moe.runtime.local import LocalRuntime
from lingvo_moe.tasks.mt.random_batch import random_batch
from lingvo_moe.tasks.task import task_of

LOSS_FREE = {'gate': 'top_k', 'router_score': 'sigmoid', 'router_bias_update_rate': 0.01, 'aux_loss_weight': 0.0}

DECODER = {'experts_in': 'decoder'}  # a layer with experts is enough


def logit(p):
  return np.log(p) - np.log1p(-np.asarray(p))


def route(gate, logits, bias=None, paddings=None):
  """Routing of one group whose logits are given, by an identity gate."""
  x_GSM = tf.constant([logits], tf.float32)
  theta = {'gate': tf.eye(x_GSM.shape[-1])} | ({} if bias is None else {'gate_bias': tf.constant(bias, tf.float32)})
  return gate(theta, x_GSM, tf.constant([paddings or [0.0] * len(logits)]))


def test_the_bias_chooses_and_the_scores_weigh():
  gate = TopK(2, router_score='sigmoid', router_bias_update_rate=0.1)
  logits = [logit([0.8, 0.6, 0.5, 0.2]), logit([0.3, 0.9, 0.1, 0.7])]
  routing = route(gate, logits, bias=[0, -0.3, 0, 0.5])  # chosen by 0.8 0.3 0.5 0.7 and 0.3 0.6 0.1 1.2
  np.testing.assert_array_equal(routing.expert_GSR[0], [[0, 3], [3, 1]])
  np.testing.assert_allclose(routing.weight_GSR[0], [[0.8, 0.2], [0.7 / 1.6, 0.9 / 1.6]], rtol=1e-5)
  np.testing.assert_allclose(routing.margin_GS[0], [0.1, 0.3], atol=1e-6)


def test_of_a_switch_gate_the_softmax_is_the_score():
  routing = route(Switch(router_bias_update_rate=0.1), [np.log([0.5, 0.3, 0.2])], bias=[0, 0.25, 0])
  assert int(routing.expert_GSR[0, 0, 0]) == 1
  np.testing.assert_allclose(routing.weight_GSR[0, 0], [0.3], rtol=1e-6)


def test_a_token_chooses_within_its_best_groups():
  gate = TopK(2, router_score='sigmoid', groups_of_experts=3, chosen_groups=1)
  # The best expert is in group 0, whose sum of two is 1.0; that of group 1 is 1.2, of group 2 0.9.
  routing = route(gate, [logit([0.9, 0.1, 0.6, 0.6001, 0.5, 0.4])])
  np.testing.assert_array_equal(routing.expert_GSR[0], [[3, 2]])
  np.testing.assert_allclose(routing.margin_GS[0], [0.0001], atol=1e-5)
  two = route(dataclasses.replace(gate, chosen_groups=2), [logit([0.9, 0.1, 0.6, 0.6001, 0.5, 0.4])])
  np.testing.assert_array_equal(two.expert_GSR[0], [[0, 3]])


def test_the_balance_loss_of_sigmoid_scores_has_shares_that_sum_to_one():
  routing = route(TopK(1, router_score='sigmoid'), [logit([0.8, 0.4]), logit([0.6, 0.2])])
  # Both choose expert 0, whose shares are 2/3 and 3/4: E * (1 * 17/24 + 0 * 7/24).
  np.testing.assert_allclose(routing.stats.aux_loss, 2 * 17 / 24, rtol=1e-5)


@pytest.mark.parametrize('low', [-88.0, -104.0, -120.0, -1000.0])
@pytest.mark.parametrize('biased', [False, True])
@pytest.mark.parametrize('score', ['sigmoid', 'softmax'])
def test_weights_and_shares_are_exact_where_scores_underflow(low, biased, score):
  """Edges of numbers: scores of all experts, or of those that a bias chooses, below the least float32."""
  logits_E = np.array([0, -1, low, low - 3] if biased else [low - 2, low - 1, low, low - 3])
  gate = TopK(2, router_score=score, router_bias_update_rate=0.1 * biased)
  theta = {'gate': tf.eye(4), 'gate_bias': tf.constant([0.0, 0.0, 1.5, 1.75])}
  with tf.GradientTape() as tape:
    x_GSM = tf.constant([[logits_E]], tf.float32)
    tape.watch(x_GSM)
    routing = gate(theta, x_GSM, tf.zeros([1, 1]))
    objective = tf.reduce_sum(routing.weight_GSR[..., 0]) + routing.stats.aux_loss
  chosen = [3, 2] if biased else [2, 1]
  np.testing.assert_array_equal(routing.expert_GSR[0, 0], chosen)
  log_score_E = -np.logaddexp(0, -logits_E) if score == 'sigmoid' else logits_E
  shares = lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum()
  np.testing.assert_allclose(routing.weight_GSR[0, 0], shares(log_score_E[chosen]), rtol=1e-4)
  np.testing.assert_allclose(routing.stats.aux_loss, 4 * shares(log_score_E)[chosen].sum() / 2, rtol=1e-4, atol=1e-30)
  assert np.isfinite(tape.gradient(objective, x_GSM)).all()


@pytest.mark.parametrize('bias', [None, [0.25] * 4])
def test_logits_decide_where_sigmoids_tie(bias):
  """Edges of numbers: sigmoids of 18, 25 and 30 are all 1 in float32."""
  gate = TopK(2, router_score='sigmoid', router_bias_update_rate=0.0 if bias is None else 0.1)
  routing = route(gate, [[18.0, 25.0, 30.0, 20.0], [-110.0, -130.0, -140.0, -105.0]], bias)
  np.testing.assert_array_equal(routing.expert_GSR[0], [[2, 1], [3, 0]])
  grouped = TopK(2, router_score='sigmoid', groups_of_experts=2, router_bias_update_rate=gate.router_bias_update_rate)
  routing = route(grouped, [[18.0, 19.0, 40.0, 20.0]], bias)
  np.testing.assert_array_equal(routing.expert_GSR[0], [[2, 3]])


def test_the_margin_is_that_of_the_groups_where_theirs_is_smaller():
  gate = TopK(1, router_score='sigmoid', groups_of_experts=2, chosen_groups=1)
  routing = route(gate, [logit([0.9, 0.3, 0.8, 0.39])])  # groups by 1.2 and 1.19; then 0.9 before 0.3
  np.testing.assert_allclose(routing.margin_GS[0], [0.01], atol=1e-6)


@pytest.mark.parametrize('seed', range(3))
def test_choices_and_weights_are_those_of_a_plain_loop(seed):
  rng = np.random.default_rng(seed)
  logits_SE, bias_E = rng.normal(size=(40, 12)), 0.3 * rng.normal(size=12)
  gate = TopK(3, router_score='sigmoid', router_bias_update_rate=0.1, groups_of_experts=4, chosen_groups=2)
  routing = route(gate, logits_SE, bias_E)
  for token, logits_E in enumerate(logits_SE):
    score_E = 1 / (1 + np.exp(-logits_E))
    biased_E = score_E + bias_E
    by_group = [sum(sorted(biased_E[3 * g : 3 * g + 3])[-2:]) for g in range(4)]
    groups = sorted(range(4), key=lambda g: -by_group[g])[:2]
    allowed = [e for e in range(12) if e // 3 in groups]
    chosen = sorted(allowed, key=lambda e: -biased_E[e])[:3]
    assert routing.expert_GSR[0, token].numpy().tolist() == chosen
    np.testing.assert_allclose(routing.weight_GSR[0, token], score_E[chosen] / score_E[chosen].sum(), rtol=1e-5)


def test_the_gradient_of_the_bias_is_the_load_and_no_other_gradient_changes():
  rng = np.random.default_rng(0)
  gate = TopK(2, router_score='sigmoid', router_bias_update_rate=0.1)
  x_GSM, weight = tf.constant(rng.normal(size=(2, 5, 4)), tf.float32), tf.constant(rng.normal(size=(4, 6)), tf.float32)
  bias, paddings = tf.zeros([6]), tf.constant([[0.0] * 5, [0.0, 0.0, 1.0, 1.0, 1.0]])
  keys_GS = prng.bits(prng.key(0), [2, 5])
  with tf.GradientTape(persistent=True) as tape:
    tape.watch([weight, bias])
    routing = gate({'gate': weight, 'gate_bias': bias}, x_GSM, paddings, keys_GS)
    loss = 7 * tf.reduce_sum(tf.square(routing.weight_GSR))
    plain = dataclasses.replace(gate, router_bias_update_rate=0.0)({'gate': weight}, x_GSM, paddings, keys_GS)
    plain_loss = 7 * tf.reduce_sum(tf.square(plain.weight_GSR))
  load_E = np.bincount(routing.expert_GSR.numpy()[paddings.numpy() == 0].ravel(), minlength=6)
  np.testing.assert_array_equal(tape.gradient(loss, bias), load_E)
  np.testing.assert_allclose(tape.gradient(loss, weight), tape.gradient(plain_loss, weight), rtol=1e-6)


def test_an_update_moves_a_bias_towards_the_mean_load_and_leaves_norm_and_slots_alone():
  bias = WeightSpec((2, 3), 'LJ', Constant(0.0), balance_rate=0.01)
  matrix = WeightSpec((1,), 'M', Constant(0.0))
  state = {
    'step': tf.constant(0, tf.int64),
    'weights': {'gate_bias': tf.constant([[0.5, 0.0, 0.0], [0.0, 0.0, 0.0]]), 'w': tf.zeros([1])},
    'slots': {'w/mean': tf.zeros([1]), 'w/moment': tf.zeros([1])},
  }
  grads = {'gate_bias': tf.constant([[9.0, 3.0, 3.0], [4.0, 4.0, 4.0]]), 'w': tf.constant([3.0])}
  specs = {'gate_bias': bias, 'w': matrix}
  slots = {f'w/{name}': spec for name, spec in Adam().slots(matrix).items()}
  new, norm = updates.update(Adam(), state, grads, (specs, specs, slots), tf.constant(0.1), clip_norm=100.0)
  np.testing.assert_allclose(new['weights']['gate_bias'], [[0.49, 0.01, 0.01], [0, 0, 0]], atol=1e-7)
  assert float(norm) == 3 and sorted(new['slots']) == ['w/mean', 'w/moment']


@pytest.mark.parametrize(
  ('capacity_factor', 'micro_batches', 'optimizer'),  # all pairs
  [(2.0, 1, 'adam'), (2.0, 2, 'adafactor'), (None, 1, 'adafactor'), (None, 2, 'adam')],
)
def test_runtimes_and_micro_batches_move_the_biases_alike(capacity_factor, micro_batches, optimizer):
  sizes = {'vocab_size': 50, 'num_layers': 1, 'num_experts': 4, 'num_groups': 4, 'batch_tokens': 64}
  values = LOSS_FREE | {'optimizer': optimizer, 'capacity_factor': capacity_factor}
  config = registry.get('lm.shakespeare.Tiny')(**sizes, **values)
  batches = [task_of(config).random_batch(seed) for seed in range(2)]
  program, state = config.program(), config.program().init()
  for batch in batches:
    state, _ = program.train_step(state, {name: tf.constant(x) for name, x in batch.items()})
  runtime = LocalRuntime(dataclasses.replace(config, micro_batches=micro_batches).program())
  runtime.init()
  for batch in batches:
    runtime.train_step(batch)
  biases = [name for name in state['weights'] if name.endswith('gate_bias')]
  assert biases and all(np.any(state['weights'][name] != 0) for name in biases)
  for name in biases:
    np.testing.assert_allclose(runtime.state()['weights'][name], state['weights'][name], atol=1e-6)


def test_training_evens_out_loads():
  config = tiny_config.make(
    **LOSS_FREE | {'router_bias_update_rate': 0.02}, capacity_factor=None, batch_tokens=512, **DECODER
  )
  runtime = LocalRuntime(config.program())
  runtime.init()
  uneven = []
  for step in range(60):
    metrics = runtime.train_step(random_batch(config, step % 4))
    loads = [stats.tokens_E for stats in metrics['routing'].values()]
    uneven.append(max(float(load.max() / load.mean()) for load in loads))
  assert np.mean(uneven[-10:]) < 1.6 < np.mean(uneven[:5])


@pytest.mark.parametrize(
  ('values', 'message'),
  [
    ({'gate': 'top2', 'router_score': 'sigmoid'}, r"router_score must be left out with gate='top2'.* for gate=top_k"),
    ({'gate': 'top2', 'router_bias_update_rate': 0.1}, r"router_bias_update_rate must be left out with gate='top2'"),
    ({'gate': 'top_k', 'router_bias_update_rate': -0.1}, 'router_bias_update_rate must be from 0 to 1'),
    ({'gate': 'top_k', 'groups_of_experts': 3}, 'groups_of_experts must be 0, or a divisor of num_experts=8'),
    ({'gate': 'top_k', 'groups_of_experts': 8}, 'that leaves a group two experts or more'),
    (
      {'gate': 'top_k', 'groups_of_experts': 2, 'chosen_groups': 3},
      'chosen_groups must be at most groups_of_experts=2',
    ),
    ({'gate': 'top_k', 'choices': 5, 'groups_of_experts': 2}, 'so many that they have choices=5 experts'),
  ],
)
def test_options_that_do_not_fit_are_refused(values, message):
  with pytest.raises(UserError, match=message):
    configuration.resolve('mt.cldr.Tiny', settings=[f'{name}={value}' for name, value in values.items()])


def test_adafactor_keeps_no_slots_of_a_bias():
  program = registry.get('mt.cldr.Tiny')(**LOSS_FREE).program()
  assert isinstance(program.optimizer, Adam | Adafactor)
  assert [name for name in program.slot_specs if 'gate_bias' in name] == []
  assert [name for name in program.weight_specs if name.endswith('gate_bias')]
