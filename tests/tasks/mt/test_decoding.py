"""Translating batches and sentences: a translation depends on its source alone, and its log-probability is true."""

import dataclasses
import functools
import types

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import parallel
from lingvo_moe.ops import backend, cpu, xla
from lingvo_moe.runtime.local import LocalRuntime
from lingvo_moe.search import beam_search
from lingvo_moe.tasks import inference
from lingvo_moe.tasks.mt import decoding
from lingvo_moe.tasks.mt.mt_config import MtConfig
from lingvo_moe.tasks.task import Hypothesis, task_of
from lingvo_moe.vocab.sentencepiece_vocab import TaggedVocab
from lingvo_moe.vocab.vocab_training import train_vocab

pytestmark = pytest.mark.usefixtures('one_trace')

# The large alpha asks for long translations, which models that were not trained do not give of their own accord.
CONFIG = MtConfig(
  model_dim=16,
  ff_dim=32,
  num_heads=2,
  head_dim=8,
  encoder_layers=2,
  decoder_layers=2,
  num_experts=4,
  num_groups=4,
  source_vocab_size=40,
  target_vocab_size=30,
  batch_tokens=256,
  max_length=24,
  decode_ratio=1.0,
  decode_extra=3,
  length_norm_alpha=2.0,
)


def variables(config, seed, scale=2.0):
  """Initial weights, made larger so that translations differ and no two score the same."""
  initial = weights_lib.initialize(config.model().weights(), seed)
  return {
    name: tf.Variable(scale * w if name.endswith(('table', 'wi', 'wo', 'wq', 'wk', 'wv')) else w)
    for name, w in initial.items()
  }


TRACED = []


class Traces(LocalRuntime):
  """Notes what is traced."""

  def function(self, f):
    def noted(weights, batch):
      TRACED.append('score' if 'tgt_labels' in batch else 'search')
      return f(weights, batch)

    return super().function(noted)


def runtime_of(config, seed):
  runtime = Traces(config.program())
  runtime.load({'step': np.int64(0), 'weights': variables(config, seed)})
  TRACED.clear()
  return runtime


def source_batch(sentences, length, empty_rows=0):
  shape = len(sentences) + empty_rows, length
  batch = {key: np.zeros(shape, np.int32) for key in ('src_ids', 'src_segments', 'src_positions')}
  for row, ids in enumerate(sentences):
    batch['src_ids'][row, : len(ids)] = ids
    batch['src_segments'][row, : len(ids)] = 1
    batch['src_positions'][row, : len(ids)] = range(len(ids))
  return {key: tf.constant(value) for key, value in batch.items()}


def random_sentences(rng, lengths):
  return [[*rng.integers(4, 40, n - 1).tolist(), 2] for n in lengths]


class Search:
  """inference.search of one model, with weights by a seed."""

  def __init__(self, config, seed, n_best, parallel_calls=None):
    self.model, self.config = config.model(), config
    self.theta = weights_lib.unflatten({k: v.read_value() for k, v in variables(config, seed).items()})
    self._run = self._traced(config, n_best, parallel_calls)

  @staticmethod
  @functools.cache
  def _traced(config, n_best, parallel_calls):
    """Function of weights and batch, traced once for all weights and shapes."""
    in_force = cpu.backend(training=False)
    if parallel_calls:
      in_force = dataclasses.replace(in_force, parallel_calls=parallel_calls)

    def run(theta, batch):
      with backend.use(in_force):
        return inference.search(config.model(), theta, batch, config, n_best)

    specs = {k: tf.TensorSpec(v.shape, v.dtype) for k, v in variables(config, 0).items()}
    shapes = {k: tf.TensorSpec([None, None], tf.int32) for k in ('src_ids', 'src_segments', 'src_positions')}
    return tf.function(run, autograph=False, input_signature=[weights_lib.unflatten(specs), shapes])

  def __call__(self, sentences, length, empty_rows=0):
    """For each row the list of (ids, log_prob, score) of its hypotheses."""
    return self.read(self._run(self.theta, source_batch(sentences, length, empty_rows)))

  @staticmethod
  def read(hypotheses):
    h = tf.nest.map_structure(lambda t: t.numpy(), hypotheses)
    rows, width = h.lengths_BW.shape
    return [
      [
        (h.ids_BWT[b, w, : h.lengths_BW[b, w]].tolist(), h.log_probs_BW[b, w], h.scores_BW[b, w])
        for w in range(width)
        if h.lengths_BW[b, w]
      ]
      for b in range(rows)
    ]

  def teacher_forced(self, source, *targets):
    """log p of each target as training sees it: whole rows, no cache."""
    batch = source_batch([source] * len(targets), len(source))
    rows = lambda ids: tf.ragged.constant(ids, dtype=tf.int32).to_tensor()
    batch |= {
      'tgt_inputs': rows([[1, *target[:-1]] for target in targets]),
      'tgt_labels': rows(targets),
      'tgt_segments': rows([[1] * len(target) for target in targets]),
      'tgt_positions': rows([list(range(len(target))) for target in targets]),
    }
    return self.model.score(self.theta, batch).numpy()


def assert_same(found, expected):
  assert [ids for ids, *_ in found] == [ids for ids, *_ in expected]
  np.testing.assert_allclose([f[1:] for f in found], [e[1:] for e in expected], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('seed', [1, 2])
def test_a_translation_depends_on_its_source_alone_and_has_the_log_probability_of_teacher_forcing(seed):
  search = Search(CONFIG, seed, n_best=3)
  sentences = random_sentences(np.random.default_rng(seed), [2, 5, 7, 7, 12, 3])
  together = search(sentences, 12)
  padded = search(sentences[::-1], 20, empty_rows=3)
  for sentence, in_batch, in_padded in zip(sentences, together, padded[5::-1], strict=True):
    alone = search([sentence], len(sentence))[0]
    assert_same(in_batch, alone)
    assert_same(in_padded, alone)
    targets, log_probs, _ = zip(*alone, strict=True)
    assert log_probs == pytest.approx(search.teacher_forced(sentence, *targets), abs=1e-4)
  best = {tuple(found[0][0]) for found in together}
  assert len(best) > 3 and max(map(len, best)) > 6  # or the test would say nothing
  assert padded[6:] == [[], [], []]


@pytest.mark.parametrize('rows', [1, 6, 10])  # and an empty one: a part of 2 rows, 2 of 4 and 3 of 4
def test_parts_of_a_batch_that_are_searched_side_by_side_are_translated_alike(rows, monkeypatch):
  plain = Search(CONFIG, 1, n_best=2)
  sentences = random_sentences(np.random.default_rng(rows), [2 + i for i in range(rows)])
  expected = plain(sentences, 12, empty_rows=1)
  monkeypatch.setattr(cpu.sub_batches, '_MIN_ROWS', 3)
  found = Search(CONFIG, 1, n_best=2, parallel_calls=3)(sentences, 12, empty_rows=1)
  for got, hypotheses in zip(found, expected, strict=True):
    assert_same(got, hypotheses)


# Of einsum dispatch, test_parity.py compiles decoding too.
@pytest.mark.compiled
@pytest.mark.parametrize('dispatch', ['gather', pytest.param('einsum', marks=pytest.mark.slow)])
def test_a_batch_of_static_shape_is_translated_by_xla_alike(dispatch):
  small = dataclasses.replace(CONFIG, encoder_layers=1, decoder_layers=1, moe_every=1, dispatch=dispatch)
  search = Search(small, 1, n_best=3)
  sentences = random_sentences(np.random.default_rng(1), [2, 5, 7, 12])
  expected = search(sentences, 12, empty_rows=4)

  def by_xla(batch):
    with backend.use(xla.BACKEND):
      return inference.search(search.model, search.theta, batch, search.config, 3)

  compiled = tf.function(by_xla, autograph=False, jit_compile=True)
  h = compiled(source_batch(sentences, 12, empty_rows=4))
  assert h.ids_BWT.shape == (8, 3, CONFIG.max_length)
  for got, hypotheses in zip(search.read(h), expected, strict=True):
    assert_same(got, hypotheses)
  assert len({tuple(row[0][0]) for row in expected[:4]}) > 1 and max(len(row[0][0]) for row in expected[:4]) > 4


def test_a_translation_is_no_longer_than_its_source_allows():
  config = dataclasses.replace(CONFIG, decode_ratio=1.5, decode_extra=4, max_length=20)
  lengths = [0, 1, 3, 10, 11]
  segments = tf.constant([[1] * n + [0] * (11 - n) for n in lengths])
  assert config.answer_lengths(segments).numpy().tolist() == [0, 5, 8, 19, 20]
  no_room = dataclasses.replace(config, decode_ratio=0.0, decode_extra=0)
  assert no_room.answer_lengths(segments).numpy().tolist() == [0, 1, 1, 1, 1]
  short = Search(dataclasses.replace(CONFIG, decode_ratio=0.0, decode_extra=2), 1, n_best=2)
  assert all(len(ids) <= 2 for row in short([[4, 5, 6, 2]], 4) for ids, *_ in row)


@pytest.fixture(scope='module')
def vocab_file(tmp_path_factory):
  """A vocabulary of digits that has the tags of de and fr."""
  folder = tmp_path_factory.mktemp('vocab')
  for pair in ('en-de', 'en-fr'):
    (folder / pair).mkdir()
    for side in pair.split('-'):
      (folder / pair / f'train.{side}').write_text(''.join(f'{i} {i * i}\n' for i in range(200)))
  return train_vocab(parallel.find_pairs(str(folder)), str(folder / 'v'), 290)


@pytest.fixture(scope='module')
def vocab(vocab_file):
  return TaggedVocab(vocab_file)


@pytest.fixture(scope='module')
def config(vocab):
  return dataclasses.replace(
    CONFIG,
    source_vocab=vocab.path,
    target_vocab=vocab.path,
    tag_target=True,
    source_vocab_size=vocab.size,
    target_vocab_size=vocab.size,
  )


@pytest.fixture(scope='module')
def translator(config, vocab):
  """It is traced once for all tests."""
  return make_translator(config, vocab)


def make_translator(config, vocab):
  return decoding.SentenceTranslator(config, (vocab, vocab), runtime_of(config, 3), n_best=2, batch_tokens=64)


LINES = ['12 144', '', '7', '3 9 ' * 20, '100 10000 5', '  ', '8 64'] + [f'{i} {i}' for i in range(30, 50)]


def test_lines_are_translated_in_order_empty_ones_to_nothing_and_long_ones_in_part(translator):
  done = []
  translated = translator.translate(LINES, 'de', done.append)
  assert translated.truncated == [3]
  assert sum(done) == len(LINES) == len(translated.hypotheses)
  assert translated.hypotheses[1] == translated.hypotheses[5] == [Hypothesis('', 0.0, 0.0)]
  for line, hypotheses in zip(LINES, translated.hypotheses, strict=True):
    if line.strip():
      assert len(hypotheses) == 2 and hypotheses[0].score >= hypotheses[1].score
      alone = translator.translate([line], 'de').hypotheses[0]
      assert [h.text for h in hypotheses] == [h.text for h in alone]
      assert [h.score for h in hypotheses] == pytest.approx([h.score for h in alone], abs=1e-5)
  assert len({h[0].text for h in translated.hypotheses}) > 5


def test_known_translations_are_not_made_again_and_the_others_are_as_before(translator, monkeypatch):
  kept = {}
  everything = translator.translate(LINES, 'de', keep=kept.__setitem__).hypotheses
  assert [kept.get(i, everything[1]) for i in range(len(LINES))] == everything and not {1, 5} & kept.keys()
  searched, search = [], translator._searches['beam', False]
  monkeypatch.setitem(translator._searches, ('beam', False), lambda batch: searched.append(batch) or search(batch))
  for known in (set(), set(list(kept)[:9]), {20}, set(kept)):
    searched.clear()
    done, new = [], {}
    again = translator.translate(LINES, 'de', done.append, known, new.__setitem__)
    assert new == {i: kept[i] for i in kept if i not in known}  # to the last bit: batches are as they were
    assert again.hypotheses == [new.get(i, everything[1]) for i in range(len(LINES))]
    assert sum(done) == len(LINES) - len(known)
    assert bool(searched) == (len(known) < len(kept))
  assert translator.translate(LINES, 'de', known=kept).truncated == [3]


def test_one_trace_serves_all_shapes(config, vocab):
  translator = make_translator(dataclasses.replace(config, beam_size=3), vocab)  # as no other test has it
  for lines in (['1'], LINES, ['1 2 3 4 5 6 7 8'] * 9):
    translator.translate(lines, 'de')
    translator.score(lines, lines, 'de')
  assert TRACED.count('search') == TRACED.count('score') == 1


def test_the_tag_changes_the_translation(translator):
  german, french = (translator.translate(['12 144', '7'], language).hypotheses for language in ('de', 'fr'))
  assert [h[0].score for h in german] != pytest.approx([h[0].score for h in french], abs=1e-3)


def test_the_weights_of_the_moment_are_used(config, vocab):
  runtime = runtime_of(config, 3)
  translator = decoding.SentenceTranslator(config, (vocab, vocab), runtime)
  before = translator.translate(['12 144'], 'de').hypotheses
  runtime.load({'step': np.int64(0), 'weights': variables(config, 4)})
  assert translator.translate(['12 144'], 'de').hypotheses != before


def test_a_model_that_trains_in_micro_batches_translates_alike(translator, config, vocab):
  in_parts = dataclasses.replace(config, num_groups=2, micro_batches=2)
  of_parts = make_translator(in_parts, vocab)
  assert of_parts.translate(['12 144'], 'de') == translator.translate(['12 144'], 'de')


def test_a_line_may_have_fewer_translations_than_are_asked_for(config, vocab):
  none = float('-inf')
  found = beam_search.Hypotheses(
    ids_BWT=np.array([[[8, 9, 2], [9, 2, 0], [0, 0, 0]]] * 4),
    lengths_BW=np.array([[3, 2, 0]] * 4),
    log_probs_BW=np.array([[-1.0, -2.0, none]] * 4),
    scores_BW=np.array([[-0.5, -1.5, none]] * 4),
    steps=3,
  )
  runner = types.SimpleNamespace(row_multiple=1, function=lambda f: lambda batch: found)
  translator = decoding.SentenceTranslator(config, (vocab, vocab), runner, n_best=3)
  texts = vocab.detokenize([[8, 9, 2], [9, 2]])
  assert translator.translate(['12 144'], 'de').hypotheses == [
    [Hypothesis(texts[0], -0.5, -1.0), Hypothesis(texts[1], -1.5, -2.0)]
  ]


def test_weights_that_are_not_finite_are_told(config, vocab):
  weights = variables(config, 3)
  weights['target_embedding/table'] = weights['target_embedding/table'] * np.nan
  runtime = runtime_of(config, 3)
  runtime.load({'step': np.int64(0), 'weights': weights})
  with pytest.raises(UserError, match='weights must be finite'):
    decoding.SentenceTranslator(config, (vocab, vocab), runtime).translate(['1'], 'de')


def test_scores_are_those_of_the_model(translator, config, vocab):
  sources, targets = ['12 144', '', '7', '', '5 25'], ['1 2', '', '9', '8', '']
  scored = translator.score(sources, targets, 'fr')
  assert scored.log_probs[1] == 0 and scored.log_probs[3] == -np.inf
  search = Search.__new__(Search)
  search.model = config.model()
  search.theta = weights_lib.unflatten({k: v.read_value() for k, v in variables(config, 3).items()})
  for i in (0, 2, 4):
    source, target = ([*vocab.encode([text])[0], 2] for text in (sources[i], targets[i]))
    (expected,) = search.teacher_forced([vocab.tag_id('fr'), *source], target)
    assert scored.log_probs[i] == pytest.approx(expected, abs=1e-4)
    assert scored.target_tokens[i] == len(target)
  assert scored.target_tokens[[1, 3]].tolist() == [0, 0]


def test_what_was_found_scores_what_the_search_said(translator, vocab, monkeypatch):
  """The flat cache against teacher forcing, through text: for translations that survive detokenising."""
  lines = [f'{i} {i * i}' for i in range(40)]
  ids, decoded = {}, inference.decoded

  def noted(*args):
    hypotheses = decoded(*args)
    ids.update({h.log_prob: h.ids for h in hypotheses})
    return hypotheses

  monkeypatch.setattr(inference, 'decoded', noted)
  found = [h[0] for h in translator.translate(lines, 'de').hypotheses]
  again = vocab.encode([h.text for h in found])
  kept = [i for i, h in enumerate(found) if [*again[i], 2] == ids[h.log_prob]]
  assert kept
  scored = translator.score([lines[i] for i in kept], [found[i].text for i in kept], 'de')
  np.testing.assert_allclose(scored.log_probs, [found[i].log_prob for i in kept], atol=1e-4)


def test_a_cut_side_is_told(translator):
  scored = translator.score(['1', '1 2 ' * 40, '3'], ['1 2 ' * 40, '1', '3'], 'de')
  assert scored.truncated == [0, 1]
  assert scored.target_tokens[0] == CONFIG.max_length


def task_with(config, vocab):
  task = task_of(config)
  task.vocabs = vocab, vocab
  return task


def test_the_target_language_is_asked_for_where_there_are_several(config, vocab):
  assert vocab.tags() == ['de', 'fr']
  task = task_with(config, vocab)
  assert task.choose_target('fr') == 'fr'
  with pytest.raises(UserError, match=r'several languages and must be told which: target=, one of de, fr'):
    task.choose_target(None)
  with pytest.raises(UserError, match=r"does not translate into 'dee'; closest: de"):
    task.choose_target('dee')


def test_a_model_of_one_language_takes_no_tag(config, vocab):
  task = task_with(dataclasses.replace(config, tag_target=False), vocab)
  assert task.choose_target(None) is None
  with pytest.raises(UserError, match='one target language and takes no tag; saw target=.de.: leave it out'):
    task.choose_target('de')
