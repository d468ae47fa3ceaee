"""Runs with a gate by target language or pair: begun, refused what they were not trained with, exported by language."""

import dataclasses
import json
import random

import numpy as np
import pytest
import reversed_corpus
import tensorflow as tf
import tiny_config
import untrained_run
from whole_state import WholeState

import lingvo_moe
from lingvo_moe.cli.commands import export
from lingvo_moe.core.errors import UserError
from lingvo_moe.run import warm_start
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.runtime.local import LocalRuntime
from lingvo_moe.tasks.mt import held_out
from lingvo_moe.tasks.task import task_of

LINES = ['eno owt', 'eerht', 'net enin thgie', '', 'ruof evif xis neves', 'neves eno']
WORDS = {'aa': ['one', 'two', 'three', 'four'], 'bb': ['five', 'six', 'seven'], 'cc': ['eight', 'nine', 'ten']}
STEPS = 3
SIZES = {'pairs': '', 'source_vocab_size': 290, 'num_experts': 4, 'gate': 'by_target', 'expert': 'swiglu'}
SIZES |= {'max_length': 24, 'beam_size': 2}


def write_corpus(folder, pairs):
  rng = random.Random(0)
  for name in pairs:
    for split, lines in (('train', 60), ('dev', 3), ('test', 3)):
      words = WORDS.get(name.partition('-')[2], WORDS['aa'])
      reversed_corpus.write_lines(folder / name, split, reversed_corpus.draw(rng, lines, words))
  return folder


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A run from English into three languages that nobody trained; experts are larger than usual, so that they tell."""
  root = tmp_path_factory.mktemp('by_language')
  corpus = write_corpus(root / 'corpus', ['en-aa', 'en-bb', 'en-cc'])
  begun = untrained_run.begin(root, corpus, {}, **SIZES)
  state = untrained_run.state_of(begun.load()[1], STEPS, seed=2).state
  weights = {name: 4.0 * w if 'moe/w' in name else w for name, w in state['weights'].items()}
  begun.checkpoints().save(WholeState({**state, 'weights': weights}))
  begun.checkpoints().note_dev_loss(STEPS, 1.0)
  return begun


@pytest.fixture(scope='module')
def texts(run):
  """Translations and scores of the run by language."""
  model = lingvo_moe.load(run.path)
  return {language: model.translate(LINES, target=language, scores=True) for language in WORDS}


def test_a_run_records_its_languages_and_the_ids_of_their_tags(run):
  _, config = run.load()
  assert [name for name, _ in config.gate_tasks] == ['aa', 'bb', 'cc']
  tags = task_of(config).vocabs[0]
  assert [ids for _, ids in config.gate_tasks] == [(tags.tag_id(language),) for language in WORDS]
  assert config.program().weight_specs['encoder/layer_00/moe/gate'].shape == (3, 4)
  assert config.capacity_factor is None


def test_a_corpus_of_one_language_uses_the_experts_of_one_task_and_it_is_said_once(tmp_path, capsys):
  corpus = write_corpus(tmp_path / 'corpus', ['en-aa'])
  message = "gate='by_target' sees one task, aa: it uses 2 of 4 experts in each MoE layer\n"
  one = untrained_run.begin(tmp_path, corpus, {3: 1.0}, **SIZES)
  assert capsys.readouterr().err.count(message) == 1
  name, config = one.load()
  assert config.gate_tasks == (('aa', ()),) and config.task_tags is None
  one.begin(name, config)
  assert message not in capsys.readouterr().err
  small = tmp_path / 'small'
  export.export(export.Options(one.path, out=str(small), format='litert', weights='float32', keep_languages=['aa']))
  assert lingvo_moe.load(str(small)).translate(LINES) == lingvo_moe.load(one.path).translate(LINES)


@pytest.mark.parametrize(
  ('gate', 'pairs', 'message'),
  [
    ({'tag_target': False}, ['en-aa', 'en-bb'], "gate='by_target'; saw False: only tags tell aa, bb apart"),
    ({'gate': 'by_pair'}, ['aa-en', 'bb-en'], "gate='by_pair'; saw False: only tags tell aa-en, bb-en apart"),
  ],
)
def test_tasks_that_no_tag_tells_apart_are_refused(tmp_path, gate, pairs, message):
  with pytest.raises(UserError, match=f'tag_target must be True with {message}'):
    untrained_run.begin(tmp_path, write_corpus(tmp_path / 'corpus', pairs), {}, **{**SIZES, **gate})


def test_held_out_text_of_an_untrained_language_is_refused(run, tmp_path):
  corpus = write_corpus(tmp_path / 'corpus', ['en-aa', 'aa-en'])
  _, config = run.load()
  vocab = task_of(config).vocabs[0]
  known = dataclasses.replace(config, data_dir=str(corpus), gate_tasks=config.gate_tasks[1:])
  with pytest.raises(UserError, match="gate='by_target' was trained with bb, cc; saw en-aa: leave it out of pairs"):
    held_out.read(dataclasses.replace(known, pairs='en-aa'), 'test', 0, vocab)
  assert len(held_out.read(dataclasses.replace(config, data_dir=str(corpus), pairs='en-aa'), 'test', 0, vocab)) == 1


def test_an_ensemble_has_the_tasks_of_its_first_run(run):
  config = run.load()[1]
  fewer = dataclasses.replace(config, gate_tasks=config.gate_tasks[1:])
  without = dataclasses.replace(config, gate='top2', gate_tasks=())
  of = lambda first, *others: task_of(first).ensemble([(f'run {i}', task_of(x)) for i, x in enumerate(others)])
  for members in ((config, fewer), (without, config), (without, config, fewer)):
    with pytest.raises(UserError, match='list of tasks of its first run; run 0 has another: give it first'):
      of(*members)
  assert of(config, without, config).gate_tasks == config.gate_tasks


def test_experts_are_not_left_out_of_groups():
  config = tiny_config.make(gate='top_k', num_experts=8, groups_of_experts=2)
  for count in (4, 7):
    with pytest.raises(UserError, match='experts cannot be left out of groups; .* groups_of_experts=2: keep all'):
      config.with_share_of_experts(count / 8)
  assert config.with_share_of_experts(1.0).num_experts == 8


def test_texts_differ_by_language_and_by_line(texts):
  of_languages = [tuple(h.text for h in of_language) for of_language in texts.values()]
  assert len({*of_languages}) == 3 and all(len({*of_language}) > 3 for of_language in of_languages)


TWO = pytest.param(['aa', 'cc'], marks=pytest.mark.slow)


@pytest.mark.parametrize('kept', [[], ['bb'], TWO])
def test_an_export_for_the_engine_gives_the_texts_of_the_run(run, texts, tmp_path, capsys, kept):
  out = str(tmp_path / 'out')
  export.export(export.Options(run.path, out=out, format='litert', weights='float32', keep_languages=kept))
  model = lingvo_moe.load(out)
  for language in kept or WORDS:
    got = model.translate(LINES, target=language, scores=True)
    assert [h.text for h in got] == [h.text for h in texts[language]]
    np.testing.assert_allclose([h.score for h in got], [h.score for h in texts[language]], atol=2e-5)
  assert json.loads((tmp_path / 'out' / 'manifest.json').read_text())['tags'].keys() == {*(kept or WORDS)}
  for language in WORDS.keys() - {*(kept or [*WORDS, 'dd'])} | {'en'}:
    with pytest.raises(UserError, match=f"this model does not translate into '{language}'"):
      model.translate(LINES, target=language)
  said = capsys.readouterr().out
  if kept == ['bb']:
    assert f'language: {json.dumps(["bb", "en"])}' in (tmp_path / 'out' / 'README.md').read_text()
    assert said.count(' of 4\n') == 2 and not list((tmp_path / 'out').glob('*experts*'))  # it is dense


def test_a_saved_model_of_one_language_gives_its_texts(run, texts, tmp_path):
  export.export(export.Options(run.path, out=str(tmp_path / 'out'), keep_languages=['cc']))
  model = tf.saved_model.load(str(tmp_path / 'out'))
  found = model.translate(tf.constant(LINES))  # no language is asked: there is one
  assert [text.decode() for text in found['text'].numpy()] == [h.text for h in texts['cc']]
  np.testing.assert_allclose(found['score'], [h.score for h in texts['cc']], atol=2e-5)
  about = json.loads((tmp_path / 'out' / 'assets.extra' / 'about.json').read_text())
  assert about['languages'] == ['cc'] and list(about['inputs']) == ['lines'] and about['num_experts'] == 0


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'keep_languages': ['dd']}, "this run has no language 'dd'; known: aa, bb, cc"),
    ({'keep_languages': ['aa'], 'format': 'safetensors'}, 'is for --format=saved_model and --format=litert, '),
    ({'keep_languages': ['aa'], 'keep_experts': 0.5}, 'without --keep_experts; saw --format=saved_model'),
  ],
)
def test_what_cannot_be_kept_is_refused_and_leaves_nothing(run, tmp_path, options, message):
  with pytest.raises(UserError, match=message):
    export.export(export.Options(run.path, out=str(tmp_path / 'out'), **options))
  assert not (tmp_path / 'out').exists()


def test_other_gates_keep_no_languages(toy_run, tmp_path):
  with pytest.raises(UserError, match="--keep_languages is for .*; saw gate='top2' with num_experts=4: use --keep_exp"):
    export.export(export.Options(toy_run.path, out=str(tmp_path / 'out'), keep_languages=['en']))


def test_a_run_that_begins_with_another_takes_the_gates_of_the_languages_they_share(run, tmp_path):
  corpus = write_corpus(tmp_path / 'corpus', ['en-bb', 'en-dd', 'en-ee'])
  config = untrained_run.begin(tmp_path, corpus, {}, **SIZES).load()[1]
  runtime = LocalRuntime(config.program())
  runtime.init()
  name = 'decoder/layer_00/moe/gate'
  before = runtime.state()['weights'][name].numpy()
  said = warm_start.take_weights(runtime, run.path, task_of(config))
  after, there = runtime.state()['weights'][name].numpy(), run.checkpoints().merged(STEPS, run.load()[1])[name][...]
  np.testing.assert_array_equal(after, [there[1], *before[1:]])  # bb, and those that are new
  assert f'not taken: {name} is of other tasks, but 1 of its 3 rows are: those of tasks that both gates have' in said


def test_a_run_that_begins_with_a_dense_one_is_told_that_it_has_no_gate(run, tmp_path):
  config = run.load()[1]
  dense = untrained_run.begin(tmp_path, config.data_dir, {3: 1.0}, num_experts=0, pairs='', source_vocab_size=290)
  runtime = LocalRuntime(config.program())
  runtime.init()
  said = warm_start.take_weights(runtime, dense.path, task_of(config))
  assert 'not taken: decoder/layer_00/moe/gate is not there\n' in said


@pytest.fixture(scope='module')
def of_pairs(tmp_path_factory):
  """An untrained run by pair."""
  root = tmp_path_factory.mktemp('by_pair')
  tags = {'tag_sides': 'both', 'tag_target': True, 'shared_vocab': True}
  corpus = write_corpus(root / 'corpus', ['aa-bb', 'bb-aa', 'aa-cc'])
  return untrained_run.begin(root, corpus, {3: 1.0}, **{**SIZES, 'gate': 'by_pair', 'source_vocab_size': 300}, **tags)


def test_one_pair_is_taken_out_and_no_other_is_translated(of_pairs, tmp_path):
  ours = RunDir(of_pairs.path)
  model, out = lingvo_moe.load(ours.path), str(tmp_path / 'out')
  expected = model.translate(LINES, source='aa', target='cc')
  with pytest.raises(UserError, match='this model translates aa-bb, aa-cc, bb-aa; saw cc-aa'):
    model.translate(LINES, source='cc', target='aa')
  with pytest.raises(UserError, match='does not see the language of a target.*or export one pair by --keep_languages'):
    export.export(export.Options(ours.path, out=out, format='litert'))
  export.export(export.Options(ours.path, out=out, format='litert', weights='float32', keep_languages=['cc']))
  small = lingvo_moe.load(out)
  assert small.translate(LINES, source='aa', target='cc') == expected
  with pytest.raises(UserError, match='this model translates aa-cc; saw cc-aa'):
    small.translate(LINES, source='cc', target='aa')


@pytest.mark.slow
def test_a_saved_model_by_pair_refuses_others(of_pairs, tmp_path):
  export.export(export.Options(of_pairs.path, out=str(tmp_path / 'out')))
  model = tf.saved_model.load(str(tmp_path / 'out'))
  translate = lambda source, target: model.translate(tf.constant(LINES), tf.constant(target), tf.constant(source))
  expected = lingvo_moe.load(of_pairs.path).translate(LINES, source='bb', target='aa')
  assert [text.decode() for text in translate('bb', 'aa')['text'].numpy()] == expected
  with pytest.raises(tf.errors.InvalidArgumentError, match='pairs must be of aa-bb, aa-cc, bb-aa; saw'):
    translate('bb', 'cc')
