"""The translation model: its loss, and that a translation depends on its source alone."""

import dataclasses

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st
from random_theta import theta_of

from lingvo_moe.config import configuration, registry
from lingvo_moe.core import prng, weights
from lingvo_moe.core.errors import UserError
from lingvo_moe.layers.attention import Attention, Now
from lingvo_moe.layers.embedding import Embedding
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.layers.moe import MoE
from lingvo_moe.layers.stack import Stack
from lingvo_moe.models.encoder_decoder import EncoderDecoder
from lingvo_moe.tasks import inference
from lingvo_moe.tasks.mt.mt_config import MtConfig

SOURCE_VOCAB, TARGET_VOCAB = 20, 15
ENCODER = Stack(
  2, Attention(8, 2, 4, dropout=0.1), FeedForward(8, 12), MoE(8, 12, 4, num_groups=2), residual_dropout=0.1
)
MODEL = EncoderDecoder(
  encoder=ENCODER,
  decoder=dataclasses.replace(ENCODER, cross_attention=True),
  source_embedding=Embedding(SOURCE_VOCAB, 8),
  target_embedding=Embedding(TARGET_VOCAB, 8),
  input_dropout=0.1,
  label_smoothing=0.1,
  z_loss_weight=1e-3,
)


THETA = theta_of(MODEL, seed=7, scale=0.4)


def make_batch(pairs, src_length=None, tgt_length=None, rows=None):
  """Rows of (source ids, target ids) pairs: a row is a list of pairs, packed."""
  rows = rows or len(pairs)
  src_length = src_length or max(sum(len(s) for s, _ in row) for row in pairs)
  tgt_length = tgt_length or max(sum(len(t) + 1 for _, t in row) for row in pairs)
  batch = {f'src_{k}': np.zeros([rows, src_length], np.int32) for k in ('ids', 'segments', 'positions')}
  batch |= {f'tgt_{k}': np.zeros([rows, tgt_length], np.int32) for k in ('inputs', 'labels', 'segments', 'positions')}
  for b, row in enumerate(pairs):
    i = j = 0
    for number, (source, target) in enumerate(row, start=1):
      src, tgt = slice(i, i + len(source)), slice(j, j + len(target) + 1)
      batch['src_ids'][b, src] = source
      batch['tgt_inputs'][b, tgt], batch['tgt_labels'][b, tgt] = [1, *target], [*target, 2]
      for side, place in (('src', src), ('tgt', tgt)):
        batch[f'{side}_segments'][b, place] = number
        batch[f'{side}_positions'][b, place] = np.arange(place.stop - place.start)
      i, j = src.stop, tgt.stop
  return {name: tf.constant(value) for name, value in batch.items()}


PAIRS = [([5, 6, 7, 2], [4, 5]), ([8, 2], [6, 7, 8, 9]), ([11, 12, 13, 14, 15, 2], [10])]


def test_names_of_the_weights_are_those_of_a_checkpoint():
  names = set(weights.flatten(MODEL.weights()))
  assert {
    'source_embedding/table',
    'target_embedding/table',
    'encoder/layer_00/ffn/wi',
    'decoder/layer_01/moe/wi',
    'decoder/layer_00/cross_attention/wq',
    'encoder/norm/scale',
  } <= names


def test_a_shared_embedding_is_one_table():
  shared = dataclasses.replace(MODEL, source_embedding=None)
  names = set(weights.flatten(shared.weights()))
  assert 'target_embedding/table' in names and 'source_embedding/table' not in names
  assert weights.count(MODEL.weights()) - weights.count(shared.weights()) == SOURCE_VOCAB * 8
  theta = {name: value for name, value in THETA.items() if name != 'source_embedding'}
  batch = make_batch([[PAIRS[0]]])
  twin = {**THETA, 'source_embedding': THETA['target_embedding']}
  np.testing.assert_array_equal(shared.logits(theta, batch)[0], MODEL.logits(twin, batch)[0])


def test_programs_at_inference_score_by_the_method_of_the_model():
  @dataclasses.dataclass(frozen=True)
  class Halved(EncoderDecoder):
    def score(self, theta, batch):
      return super().score(theta, batch) / 2

  batch = make_batch([[PAIRS[0]]])
  score = inference.programs(batch, batch, MtConfig())['score'].function
  halved = Halved(**{field.name: getattr(MODEL, field.name) for field in dataclasses.fields(MODEL)})
  np.testing.assert_allclose(score(halved, THETA, batch), MODEL.score(THETA, batch) / 2)


def test_a_packed_row_gives_each_sentence_what_a_row_of_its_own_does():
  packed = MODEL.logits(THETA, make_batch([PAIRS], src_length=14, tgt_length=12))[0][0]
  start = 0
  for pair in PAIRS:
    own = MODEL.logits(THETA, make_batch([[pair]]))[0][0]
    np.testing.assert_allclose(packed[start : start + len(own)], own, atol=1e-5)
    start += len(own)


@hypothesis.settings(max_examples=5)
@hypothesis.given(
  st.lists(
    st.tuples(
      st.lists(st.integers(3, SOURCE_VOCAB - 1), min_size=1, max_size=6),
      st.lists(st.integers(3, TARGET_VOCAB - 1), max_size=5),
    ),
    min_size=1,
    max_size=4,
  ),
  st.integers(0, 3),
  st.integers(0, 3),
)
def test_logits_depend_on_their_own_pair_and_on_no_neighbour_or_padding(pairs, more_padding, more_rows):
  src_length = max(len(s) for s, _ in pairs) + more_padding
  tgt_length = max(len(t) for _, t in pairs) + 1 + more_padding
  batch = make_batch([[p] for p in pairs], src_length, tgt_length, rows=len(pairs) + more_rows)
  together = MODEL.logits(THETA, batch)[0]
  for b, pair in enumerate(pairs):
    own = MODEL.logits(THETA, make_batch([[pair]]))[0][0]
    np.testing.assert_allclose(together[b, : len(own)], own, atol=1e-5)


@pytest.mark.parametrize('width', [1, 3])
def test_decoding_step_by_step_over_a_flat_cache_equals_teacher_forcing(width):
  batch = make_batch([[pair] for pair in PAIRS])
  rows, steps = batch['tgt_inputs'].shape
  expected = MODEL.logits(THETA, batch)[0].numpy()
  memory, _ = MODEL.encode(THETA, batch)
  cache = MODEL.init_cache(THETA, memory, steps * width)
  mask_BWU = np.zeros([rows, width, steps * width], np.float32)
  for time in range(steps):
    for w in range(width):
      mask_BWU[:, w, time * width + w] = 1
    # Hypothesis 0 follows the target; the others say something else and must not be heard.
    ids_BW = tf.stack([batch['tgt_inputs'][:, time], *[tf.fill([rows], 3 + w) for w in range(1, width)]], axis=1)
    now = Now(tf.constant(time), tf.constant(time * width), tf.constant(mask_BWU))
    logits, cache = MODEL.decode_step(THETA, ids_BW, now, batch['src_segments'], cache)
    real = batch['tgt_segments'][:, time] > 0
    np.testing.assert_allclose(logits[:, 0][real], expected[:, time][real], atol=1e-5)


def test_factors_scale_the_loss_of_tokens_and_nothing_else():
  batch = make_batch([PAIRS[:2], PAIRS[2:]])
  factors = lambda count: {'tgt_loss_factors': tf.fill(tf.shape(batch['tgt_labels']), count)}
  whole, metrics = MODEL.loss(THETA, batch)
  (half, of_half), (none, _) = (MODEL.loss(THETA, batch | factors(count)) for count in (500, 0))
  np.testing.assert_allclose(half, (whole + none) / 2, rtol=1e-6)
  np.testing.assert_allclose(MODEL.loss(THETA, batch | factors(1000))[0], whole, rtol=1e-6)  # in thousandths
  np.testing.assert_allclose(none, MODEL.aux_loss_weight * metrics['aux_loss'], rtol=1e-6)
  for name in ('xent', 'target_tokens', 'aux_loss'):
    np.testing.assert_allclose(of_half[name], metrics[name])


def test_cross_entropy_is_a_sum_over_target_tokens_and_the_loss_their_mean():
  batch = make_batch([PAIRS[:2], PAIRS[2:]])
  loss, metrics = MODEL.loss(THETA, batch)
  logits, routing = MODEL.logits(THETA, batch)
  log_p, log_z = tf.nn.log_softmax(logits).numpy(), tf.reduce_logsumexp(logits, -1).numpy()
  xent = z_loss = 0.0
  for b, t in np.argwhere(batch['tgt_segments'] > 0):
    xent -= log_p[b, t, batch['tgt_labels'][b, t]]
    z_loss += 1e-3 * log_z[b, t] ** 2
  assert float(metrics['target_tokens']) == 3 + 5 + 2
  assert float(metrics['source_tokens']) == 4 + 2 + 6
  np.testing.assert_allclose(metrics['xent'], xent, rtol=1e-5)
  np.testing.assert_allclose(metrics['loss'], xent / 10, rtol=1e-5)
  stats = [routing[f'{stack}/layer_01'].stats for stack in ('encoder', 'decoder')]
  aux = sum(float(s.aux_loss / s.groups) for s in stats)
  np.testing.assert_allclose(metrics['aux_loss'], aux, rtol=1e-6)
  np.testing.assert_allclose(loss, (xent + z_loss) / 10 + 0.01 * aux, rtol=1e-5)  # not smoothed at inference


def test_losses_and_choices_by_pair_are_those_of_the_rows_of_a_pair():
  batch = make_batch([[pair] for pair in PAIRS], rows=4)
  metrics = MODEL.loss(THETA, {**batch, 'pairs': tf.constant([[1, 0], [0, 1], [1, 0], [0, 0]])})[1]
  alone = [MODEL.loss(THETA, make_batch(rows, rows=4))[1] for rows in ([[PAIRS[0]], [PAIRS[2]]], [[PAIRS[1]]])]
  np.testing.assert_allclose(metrics['xent_by_pair'], [float(m['xent']) for m in alone], rtol=1e-5)
  np.testing.assert_array_equal(metrics['target_tokens_by_pair'], [5, 5])
  for layer, choices_PE in metrics['choices_by_pair'].items():
    np.testing.assert_array_equal(choices_PE, [m['routing'][layer].tokens_E for m in alone], err_msg=layer)
  assert np.sum(metrics['choices_by_pair']['decoder/layer_01']) == 2 * 10  # two experts a token, none without room


def test_training_smooths_the_labels_of_the_objective_and_not_of_the_loss():
  plain = dataclasses.replace(ENCODER, moe=None, residual_dropout=0.0, attention=Attention(8, 2, 4))
  model = dataclasses.replace(
    MODEL, encoder=plain, decoder=dataclasses.replace(plain, cross_attention=True), input_dropout=0.0, z_loss_weight=0.0
  )
  theta, batch = theta_of(model, seed=7, scale=0.4), make_batch([[PAIRS[0]]])
  objective, metrics = model.loss(theta, batch, prng.key(0))
  log_p = tf.nn.log_softmax(model.logits(theta, batch)[0])[0].numpy()
  smoothed = [-0.9 * log_p[t, label] - 0.1 * log_p[t].mean() for t, label in enumerate([4, 5, 2])]
  np.testing.assert_allclose(objective, np.mean(smoothed), rtol=1e-5)
  np.testing.assert_allclose(
    metrics['loss'], -np.mean([log_p[t, label] for t, label in enumerate([4, 5, 2])]), rtol=1e-5
  )


def test_the_objective_is_the_sum_of_its_parts():
  model = dataclasses.replace(MODEL, router_z_loss_weight=0.5)
  objective, metrics = model.loss(THETA, make_batch([PAIRS[:2], PAIRS[2:]]), prng.key(0))
  parts = metrics['objective_parts']
  assert [*parts] == ['smoothed_cross_entropy', 'balance', 'router_z'] and all(float(x) > 0 for x in parts.values())
  np.testing.assert_allclose(objective, sum(map(float, parts.values())), rtol=1e-6)
  np.testing.assert_allclose(parts['balance'], MODEL.aux_loss_weight * metrics['aux_loss'], rtol=1e-6)


def test_padding_rows_do_not_change_the_loss():
  few, many = make_batch([[p] for p in PAIRS]), make_batch([[p] for p in PAIRS], 9, 9, rows=6)
  for name in ('loss', 'xent', 'target_tokens', 'aux_loss'):
    np.testing.assert_allclose(MODEL.loss(THETA, few)[1][name], MODEL.loss(THETA, many)[1][name], rtol=1e-5)


def test_a_batch_of_padding_only_has_a_finite_loss():
  empty = {name: tf.zeros_like(value) for name, value in make_batch([[PAIRS[0]], [PAIRS[1]]]).items()}
  loss, metrics = MODEL.loss(THETA, empty, prng.key(0))
  assert np.isfinite(loss) and float(metrics['target_tokens']) == 0


def test_dropout_and_skips_are_on_in_training_and_off_at_inference():
  batch = make_batch([[p] for p in PAIRS[:2]])
  run = lambda key: MODEL.logits(THETA, batch, key)[0].numpy()
  np.testing.assert_array_equal(run(None), run(None))
  np.testing.assert_array_equal(run(prng.key(1)), run(prng.key(1)))
  assert np.any(np.abs(run(None) - run(prng.key(1))) > 1e-3)
  assert np.any(np.abs(run(prng.key(1)) - run(prng.key(2))) > 1e-3)


def test_a_score_is_the_sum_of_the_targets_log_probabilities():
  batch = make_batch([[p] for p in PAIRS])
  scores = MODEL.score(THETA, batch)
  np.testing.assert_allclose(-tf.reduce_sum(scores), MODEL.loss(THETA, batch)[1]['xent'], rtol=1e-5)
  alone = [MODEL.score(THETA, make_batch([[p]]))[0] for p in PAIRS]
  np.testing.assert_allclose(scores, alone, rtol=1e-5)


def test_bfloat16_activations_keep_float32_scores_and_gradients():
  low = dataclasses.replace(MODEL, activation_dtype='bfloat16')
  batch = make_batch([[p] for p in PAIRS[:2]])
  logits, _ = low.logits(THETA, batch)
  assert logits.dtype == tf.float32
  rounded = tf.cast(tf.cast(logits, tf.bfloat16), tf.float32)
  assert np.mean(logits != rounded) > 0.9  # not bfloat16's in the clothes of float32
  np.testing.assert_allclose(low.loss(THETA, batch)[0], MODEL.loss(THETA, batch)[0], rtol=0.02)
  with tf.GradientTape() as tape:
    tape.watch(THETA)
    loss, _ = low.loss(THETA, batch, prng.key(0))
  for name, grad in weights.flatten(tape.gradient(loss, THETA)).items():
    grad = tf.convert_to_tensor(grad)
    assert grad.dtype == tf.float32 and np.all(np.isfinite(grad)), name
  memory, _ = low.encode(THETA, batch)
  cache = low.init_cache(THETA, memory, 1)
  now = Now(tf.constant(0), tf.constant(0), tf.ones([2, 1, 1]))
  first, _ = low.decode_step(THETA, batch['tgt_inputs'][:, :1], now, batch['src_segments'], cache)
  np.testing.assert_allclose(first[:, 0], logits[:, 0], atol=0.1)


def test_losses_of_parts_of_a_batch_add_up_to_its_own():
  batch = make_batch([[p] for p in PAIRS], 9, 9, rows=4)  # the last row is padding
  parts = [{name: x[rows] for name, x in batch.items()} for rows in (slice(0, 2), slice(2, 4))]
  halves = dataclasses.replace(MODEL, encoder=of_groups(1), decoder=of_groups(1, cross_attention=True))
  whole = dataclasses.replace(MODEL, encoder=of_groups(2), decoder=of_groups(2, cross_attention=True))
  key_B = prng.fold(prng.key(0), tf.range(4))
  totals = [halves.totals(part) for part in parts]
  assert [float(t['encoder_groups']) for t in totals] == [1, 1] and [float(t['target_tokens']) for t in totals] == [
    8,
    2,
  ]
  totals = {name: sum(t[name] for t in totals) for name in totals[0]}
  got = [halves.loss(THETA, part, key, totals) for part, key in zip(parts, (key_B[:2], key_B[2:]), strict=True)]
  loss, metrics = whole.loss(THETA, batch, key_B)
  np.testing.assert_allclose(sum(part_loss for part_loss, _ in got), loss, rtol=1e-6)
  assert all(sum(float(m['routing'][name].rounds) for _, m in got) == 2 for name in metrics['routing'])  # one a part
  for m in (metrics, *(m for _, m in got)):
    m['routing'] = {name: stats._replace(rounds=0.0) for name, stats in m['routing'].items()}
  for values in zip(tf.nest.flatten(metrics), *(tf.nest.flatten(m) for _, m in got), strict=True):
    np.testing.assert_allclose(sum(values[1:]), values[0], rtol=1e-5, atol=1e-5)


def of_groups(num_groups, **changes):
  moe = dataclasses.replace(ENCODER.moe, num_groups=num_groups)
  return dataclasses.replace(ENCODER, moe=moe, **changes)


def test_the_router_z_loss_is_a_mean_over_the_tokens_of_each_stack_summed_over_layers():
  batch = make_batch([[([5, 6, 7], [4, 5])], [([8], [6, 7, 8, 9])]])
  loss, metrics = MODEL.loss(THETA, batch)
  with_z_loss, _ = dataclasses.replace(MODEL, router_z_loss_weight=0.5).loss(THETA, batch)
  tokens = {'encoder': 3 + 1, 'decoder': 3 + 5}
  expected = sum(float(s.z_loss) / tokens[name.split('/')[0]] for name, s in metrics['routing'].items())
  assert len(metrics['routing']) == 2 and expected > 0
  np.testing.assert_allclose(with_z_loss - loss, 0.5 * expected, rtol=1e-4)


@pytest.mark.parametrize('stack', ['encoder', 'decoder'])
def test_experts_may_be_in_one_stack_alone(stack):
  config = MtConfig(num_experts=4, model_dim=8, num_heads=2, head_dim=4, ff_dim=12, experts_in=stack, num_groups=2)
  model = config.model()
  assert {name.split('/')[0] for name in weights.flatten(model.weights()) if '/moe/' in name} == {stack}
  totals = model.totals(make_batch([[([5, 6, 7], [4, 5])], [([8], [6, 7, 8, 9])]]))
  groups = {name: int(totals[f'{name}_groups']) for name in ('encoder', 'decoder')}
  assert groups == {'encoder': 1, 'decoder': 1} | {stack: 2}


def test_the_cap_of_beta2_is_a_setting_of_adafactor():
  tiny = registry.get('mt.bench_s.Tiny')
  assert tiny(optimizer='adafactor').program().optimizer.beta2_cap == 0.99
  assert tiny(optimizer='adafactor', beta2_cap=1).program().optimizer.beta2_cap == 1
  with pytest.raises(
    UserError, match="beta2_cap must be left out with optimizer='adam'.*saw 0.9: .*optimizer=adafactor"
  ):
    configuration.resolve('mt.bench_s.Tiny', settings=['optimizer=adam', 'beta2_cap=0.9'])
  with pytest.raises(UserError, match='beta2_cap must be above 0 and at most 1; saw 1.5'):
    tiny(optimizer='adafactor', beta2_cap=1.5)


def test_a_params_class_that_calls_its_model_task_goes_on_working_with_a_warning():
  with pytest.warns(FutureWarning, match=r'Older.task\(\) is now called model\(\): rename it'):

    class Older(MtConfig):
      def task(self):
        return dataclasses.replace(MtConfig.task(self), input_dropout=0.5)

  sizes = {'source_vocab_size': 20, 'target_vocab_size': 15}
  model = Older(**sizes).model()
  assert model == Older(**sizes).task() == dataclasses.replace(MtConfig(**sizes).model(), input_dropout=0.5)
