"""Gates by task: experts of a language or pair, whatever the tokens; in training, in search, and as a dense layer."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import tiny_config
from random_theta import theta_of

from lingvo_moe.addons.export import pruning
from lingvo_moe.core import prng
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.errors import UserError
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.layers.gates.by_task import ByTarget, tasks_of, with_tasks
from lingvo_moe.layers.moe import MoE
from lingvo_moe.models.batches import FIRST
from lingvo_moe.tasks import inference
from lingvo_moe.tasks.lm.lm_config import LmConfig

TASKS = (('de', (10,)), ('fr', (11,)), ('it', (13,)))
PAIRS = (('de-fr', (10, 11)), ('fr-de', (11, 10)), ('en-de', (12, 10)), ('en-fr', (12, 11)))
GATE = ByTarget(gate_tasks=TASKS)
LAYER = MoE(6, 10, 8, gate=GATE, capacity_factor=None, dispatch='einsum')
X_BTM = tf.random.stateless_normal([4, 5, 6], [0, 1])
PADDINGS_BT = tf.constant([[0.0] * 5] * 3 + [[0.0] * 3 + [1.0] * 2])
TASKS_BT = tf.constant([[0] * 5, [2] * 5, [1, 1, 2, 2, 2], [0, 0, 1, 0, 0]])
MODEL = tiny_config.make(
  gate='by_target', num_experts=8, gate_tasks=TASKS, tag_target=True, tied_output=True, num_groups=1
)
OF_PAIRS = dataclasses.replace(
  MODEL, gate='by_pair', gate_tasks=PAIRS, tag_sides='both', shared_vocab=True, source_vocab_size=50
)


def top_two(logits_E):
  """(experts, weights) of the two largest logits, the largest first."""
  experts = np.argsort(-logits_E)[:2]
  p = np.exp(logits_E[experts] - logits_E.max())
  return experts, p / p.sum()


def test_a_token_gets_the_experts_of_its_task_and_padding_none():
  theta = theta_of(LAYER, seed=1, scale=1.0)
  w = {name: weight.numpy() for name, weight in theta.items()}
  assert w['gate'].shape == (3, 8)
  expected = np.zeros(X_BTM.shape)
  for b, t in zip(*np.nonzero(PADDINGS_BT.numpy() == 0)):
    for e, share in zip(*top_two(w['gate'][TASKS_BT[b, t]])):
      expected[b, t] += share * np.maximum(X_BTM[b, t].numpy() @ w['wi'][e], 0) @ w['wo'][e]
  for dispatch in ('einsum', 'gather', 'auto'):
    layer = dataclasses.replace(LAYER, dispatch=dispatch)
    y_BTM, routing = layer(theta, X_BTM, PADDINGS_BT, None, TASKS_BT)
    np.testing.assert_allclose(y_BTM, expected, atol=1e-5)
  # Nothing is dropped in training either, though most tokens are of one task.
  trained_BTM, routing = LAYER(theta, X_BTM, PADDINGS_BT, prng.key(1), TASKS_BT)
  np.testing.assert_allclose(trained_BTM, expected, atol=1e-5)
  assert float(tf.reduce_sum(routing.stats.dropped_R)) == 0 and float(routing.stats.tokens) == 18


def test_the_balance_loss_counts_the_tokens_of_each_task():
  theta = theta_of(LAYER, seed=1, scale=1.0)
  _, routing = LAYER(theta, X_BTM, PADDINGS_BT, prng.key(1), TASKS_BT)
  share, gates = np.zeros(8), np.zeros(8)
  for task, tokens in ((0, 7), (1, 2), (2, 8), (1, 1)):  # of the 18 real ones
    logits_E = theta['gate'][task].numpy()
    gates += tokens * np.exp(logits_E) / np.exp(logits_E).sum() / 18
    share[top_two(logits_E)[0]] += tokens / 36
  np.testing.assert_allclose(routing.stats.aux_loss, 8 * share @ gates, rtol=1e-5)


def test_segments_hold_the_tasks_and_equal_ones_stay_equal():
  segments_BT = tf.constant([[1, 1, 2, 0]])
  coded_BT = with_tasks(segments_BT, tf.constant([[2, 2, 0, 1]])).numpy()
  assert coded_BT[0, 0] == coded_BT[0, 1] != coded_BT[0, 2] and coded_BT[0, 3] == 0
  assert tasks_of(coded_BT).tolist() == [[2, 2, 0, 0]]


def side_arrays(rows, length):
  """Segments, positions and ids of packed rows of sentences."""
  arrays = np.zeros([3, len(rows), length], np.int32)
  for row, sentences in enumerate(rows):
    at = 0
    for number, ids in enumerate(sentences, start=1):
      place = slice(at, at := at + len(ids))
      arrays[:, row, place] = ids, [number] * len(ids), range(len(ids))
  return arrays


def batch_of(sources, targets, length=16):
  source, target = side_arrays(sources, length), side_arrays(targets, length)
  before = np.where(target[2] > 0, np.roll(target[0], 1, axis=1), 1) * (target[1] > 0)
  names = 'src_ids', 'src_segments', 'src_positions', 'tgt_inputs', 'tgt_labels', 'tgt_segments', 'tgt_positions'
  return {name: tf.constant(x) for name, x in zip(names, (*source, before, *target), strict=True)}


def test_one_task_needs_no_tags_to_be_known():
  assert OF_PAIRS.task_tags.tags == ((10, 11), (11, 10), (12, 10), (12, 11))
  assert dataclasses.replace(OF_PAIRS, gate_tasks=PAIRS[:1]).task_tags is None


def weights_of(config):
  return theta_of(config.program().model, seed=3, scale=0.5)


@pytest.mark.parametrize(
  ('config', 'sources', 'targets', 'tasks'),
  [
    (MODEL, [[[13, 20, 2], [10, 21, 22, 2]], [[11, 30, 2]]], [[[33, 2], [34, 35, 2]], [[36, 2]]], [[2, 0], [1]]),
    # The source has the tag of its language, and the target that of its own.
    (OF_PAIRS, [[[11, 20, 2], [10, 21, 2]], [[12, 30, 2]]], [[[10, 33, 2], [11, 35, 2]], [[11, 2]]], [[1, 0], [3]]),
  ],
  ids=['targets', 'pairs'],
)
def test_each_sentence_of_a_packed_row_has_the_experts_of_its_own_tags(config, sources, targets, tasks):
  model, theta = config.program().model, weights_of(config)
  batch = batch_of(sources, targets)
  for layer, (expert_BTR, weight_BTR) in model.decisions(theta, batch).items():
    stack, name = layer.split('/')
    segments_BT = batch['src_segments' if stack == 'encoder' else 'tgt_segments'].numpy()
    for b, t in zip(*np.nonzero(segments_BT)):
      experts, weights = top_two(theta[stack][name]['moe']['gate'][tasks[b][segments_BT[b, t] - 1]].numpy())
      assert expert_BTR[b, t].numpy().tolist() == experts.tolist()
      np.testing.assert_allclose(weight_BTR[b, t], weights, rtol=1e-5)


@pytest.mark.parametrize('config', [MODEL, OF_PAIRS], ids=['targets', 'pairs'])
def test_a_search_gives_the_log_probabilities_of_its_results_read_at_once(config):
  config = dataclasses.replace(config.for_inference(), beam_size=3)
  model, theta = config.program().model, weights_of(config)
  tags = (12, 11, 12) if config.tags_both else (13, 10, 11)
  sources = [[[tag, *ids, 2]] for tag, ids in zip(tags, ([20, 25], [21], [30, 31, 32]), strict=True)]
  batch = {name: x for name, x in batch_of(sources, [[], [], []]).items() if name.startswith('src')}
  batch |= {FIRST: tf.constant([[10]] * 3)} if config.tags_both else {}
  hypotheses = inference.search(model, theta, batch, config, n_best=3)
  for rank in range(3):
    targets = [[[*map(int, ids[ids != 0])]] for ids in hypotheses.ids_BWT[:, rank].numpy()]
    score_B = model.score(theta, batch_of(sources, targets, config.max_length))
    np.testing.assert_allclose(score_B, hypotheses.log_probs_BW[:, rank], rtol=1e-4)
  # The experts are those of the tags: with the rows of the gates exchanged other texts come out.
  exchange = lambda n, w: w[::-1] if n.endswith('moe/gate') else w
  other = weights_lib.unflatten({n: exchange(n, w) for n, w in weights_lib.flatten(theta).items()})
  exchanged = inference.search(model, other, batch, config)
  assert np.abs(exchanged.log_probs_BW - hypotheses.log_probs_BW[:, :1]).max() > 1e-3


EXPERTS = {
  'relu': {},
  'swiglu': {'expert': 'swiglu'},
  'biases': {'expert_bias': True, 'shared_experts': 1},
  'shared and scaled': {'expert': 'geglu', 'shared_experts': 2, 'expert_output_scale': 0.5},
}


@pytest.mark.parametrize('changes', EXPERTS.values(), ids=EXPERTS)
def test_experts_of_one_task_are_one_dense_layer(changes):
  layer = dataclasses.replace(LAYER, **changes)
  weights = {'decoder/layer_01/moe/' + name: w for name, w in weights_lib.flatten(theta_of(layer, 4, 1.0)).items()}
  weights = {name: w.numpy() for name, w in weights.items()}
  choices = pruning.choices_of_tasks(weights, GATE, [2])
  dense = pruning.joined(weights, choices, layer.expert_output_scale)
  ffn = FeedForward(6, (2 + layer.shared_experts) * 10, activation=layer.expert, bias=layer.expert_bias)
  theta = {name.removeprefix('decoder/layer_01/ffn/'): tf.constant(w) for name, w in dense.items()}
  assert {name: w.shape for name, w in theta.items()} == {name: spec.shape for name, spec in ffn.weights().items()}
  flat = {name.removeprefix('decoder/layer_01/moe/'): tf.constant(w) for name, w in weights.items()}
  theta_of_layer = weights_lib.unflatten(flat)
  expected, _ = layer(theta_of_layer, X_BTM, tf.zeros([4, 5]), None, tf.fill([4, 5], 2))
  np.testing.assert_allclose(ffn(theta, X_BTM), expected, atol=1e-4)
  other, _ = layer(theta_of_layer, X_BTM, tf.zeros([4, 5]), None, tf.fill([4, 5], 0))
  assert np.abs(other - expected).max() > 0.1


def test_experts_of_several_tasks_are_kept_and_as_many_in_each_layer():
  choices = {
    'a': pruning.OfTasks(np.array([[1, 6], [6, 2]]), np.ones([2, 2])),
    'b': pruning.OfTasks(np.array([[0, 5], [5, 0]]), np.ones([2, 2])),
  }
  kept = pruning.experts_of_tasks(choices, 8)
  assert {layer: of_layer.experts for layer, of_layer in kept.items()} == {'a': [1, 2, 6], 'b': [0, 1, 5]}


def test_languages_choose_tasks():
  assert pruning.choose_tasks(['de', 'fr', 'it'], False, ['it', 'de']) == [0, 2]
  pairs = [name for name, _ in PAIRS]
  assert pruning.choose_tasks(pairs, True, ['de', 'fr']) == [0, 1]
  assert pruning.choose_tasks(pairs, True, ['en']) == [2, 3]
  with pytest.raises(UserError, match="this run has no language 'ceb'; known: de, fr"):
    pruning.choose_tasks(['de', 'fr'], False, ['ceb'])


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'capacity_factor': 2.0}, "capacity_factor must be 'auto' or None with gate='by_target'; saw 2.0"),
    ({'choices': 1}, 'choices must be 2 or more with a gate by task; saw 1'),
    ({'gate': 'by_pair'}, "gate must be another with tag_sides='source'; saw 'by_pair': by_target reads"),
    ({'tag_sides': 'both', 'shared_vocab': True}, "gate must be another with tag_sides='both'; saw 'by_target'"),
  ],
)
def test_what_does_not_go_with_a_gate_by_task_is_refused(changes, message):
  with pytest.raises(UserError, match=message):
    dataclasses.replace(MODEL, **changes)


def test_a_model_without_languages_has_no_gate_by_task():
  with pytest.raises(UserError, match="gate must be one that reads tokens; saw 'by_target': .* models of translation"):
    LmConfig(num_experts=4, gate='by_target')


def test_scanned_stacks_and_micro_batches_have_the_tasks_too():
  batch = batch_of([[[13, 20, 2], [10, 21, 2]], [[11, 30, 2]]] * 2, [[[33, 2], [34, 35, 2]], [[36, 2]]] * 2)
  config = dataclasses.replace(MODEL, encoder_layers=2, decoder_layers=2, num_groups=2)

  def gradients(config):
    program = config.program()
    return program.gradients(tf.constant(1, tf.int64), program.init()['weights'], batch)

  grads, metrics = gradients(config)
  of_scanned, scanned_metrics = gradients(dataclasses.replace(config, scan_layers=True, micro_batches=2))
  np.testing.assert_allclose(scanned_metrics['loss'], metrics['loss'], rtol=1e-5)
  gates_LPE = np.stack([grads[f'encoder/layer_0{i}/moe/gate'] for i in range(2)])
  np.testing.assert_allclose(of_scanned['encoder/layers_0of1/moe/gate'], gates_LPE, atol=1e-6)
  assert (np.abs(gates_LPE).max(axis=(0, 2)) > 1e-6).all()  # each task of the batch learns
