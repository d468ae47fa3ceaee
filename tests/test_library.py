"""lingvo_moe.load: a run from Python, with the bytes of the command line, also from several threads."""

import dataclasses
import doctest
import io
import os
import pathlib
import re
import subprocess
import sys
import warnings
from concurrent import futures

import numpy as np
import pytest
import shared_traces
import toy_run as toy
from whole_state import WholeState

import lingvo_moe
from lingvo_moe import translate
from lingvo_moe.core.errors import UserError
from lingvo_moe.run import loaded as loaded_lib
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.runtime.local import LocalRuntime
from lingvo_moe.storage import log_directory
from lingvo_moe.tasks.task import task_of

pytestmark = pytest.mark.usefixtures('one_trace')

SENTENCES = [source for source, _ in toy.sentences()]
LONG = 'Hund ' * 60


@pytest.fixture(scope='module')
def run(toy_run):
  return lingvo_moe.load(toy_run.path)


def test_examples_of_docstrings_run(toy_run, run, monkeypatch):
  monkeypatch.chdir(os.path.dirname(os.path.dirname(toy_run.path)))
  monkeypatch.setattr(loaded_lib, 'load', lambda *options: run)  # compiled already
  (test,) = doctest.DocTestFinder(recurse=False).find(lingvo_moe.load, globs={'lingvo_moe': lingvo_moe})
  assert doctest.DocTestRunner().run(test).failed == 0
  assert len(test.examples) >= 4


@pytest.mark.parametrize('page', ['serving.md', 'controlled_translation.md'])
def test_examples_of_a_page_run(toy_run, run, monkeypatch, page):
  text = (pathlib.Path(__file__).parent.parent / 'docs' / page).read_text(encoding='utf-8')
  blocks = re.findall(r'^```pycon\n(.*?)^```$', text, flags=re.DOTALL | re.MULTILINE)
  dev_loss = f'{toy_run.checkpoints().best().dev_loss:.4g}'
  blocks = [re.sub(r'(?<=dev loss \()[\d.]+', dev_loss, block) for block in blocks]  # to rounding
  monkeypatch.setattr(loaded_lib, 'load', lambda *options: run)
  test = doctest.DocTestParser().get_doctest('\n'.join(blocks), {}, page, None, 0)
  assert len(test.examples) >= 10 and doctest.DocTestRunner().run(test).failed == 0


def test_import_is_light():
  light = "import sys, lingvo_moe; assert callable(lingvo_moe.load); sys.exit('tensorflow' in sys.modules)"
  assert subprocess.run([sys.executable, '-c', light]).returncode == 0


def test_what_the_library_returns_is_what_the_command_writes(toy_run, run):
  lines = [*SENTENCES[:5], '', 'Eine Katze und zwei Hunde\ufeff singen\x00.', '   ', '日本']
  output = io.StringIO()
  source = io.BytesIO(''.join(line + '\n' for line in lines).encode())
  translate.translate(translate.Options(toy_run.path, n_best=2, batch_lines=4), source, output)
  best = run.translate(lines, n_best=2, scores=True)
  expected = [(str(i), h.text, h.score, h.log_prob) for i, of_line in enumerate(best, 1) for h in of_line]
  written = [line.split('\t') for line in output.getvalue().splitlines()]
  assert [(i, text) for i, _, _, text in written] == [(i, text) for i, text, *_ in expected]
  numbers = [(float(score), float(log_prob)) for _, score, log_prob, _ in written]
  # Half a unit of the last decimal written, and the rounding of other batches.
  np.testing.assert_allclose(numbers, [values for _, _, *values in expected], rtol=0, atol=6e-5)


def test_translations_come_in_order_and_in_the_shape_asked_for(run):
  alone = [run.translate([sentence])[0] for sentence in (SENTENCES[3], SENTENCES[20])]
  together = run.translate([SENTENCES[3], '', SENTENCES[20], LONG[:20]])
  assert [together[0], together[2]] == alone and together[1] == '' and len(together) == 4
  assert run.translate([]) == []
  assert run.translate(iter([SENTENCES[3], SENTENCES[20]])) == alone
  assert run.score(zip(SENTENCES[:1], ['a'])) == run.score([(SENTENCES[0], 'a')])
  first, second = run.translate(SENTENCES[:2], n_best=2)
  assert first[0] == run.translate(SENTENCES[:1])[0] and len(first) == len(second) == 2
  (scored,) = run.translate(SENTENCES[:1], scores=True)
  assert scored.text == first[0] and scored.log_prob < 0 and scored.score < 0
  assert sum(text == target for text, (_, target) in zip(run.translate(SENTENCES), toy.sentences())) > 18


def test_threads_get_the_results_of_serial_calls(toy_run):
  def work(run, i):
    part = SENTENCES[i : i + 7]
    return run.translate(part, scores=True), run.score([(s, 'A dog.') for s in part])

  numbers = list(range(0, 16, 2))
  run = lingvo_moe.load(toy_run.path)
  with shared_traces.shared(), futures.ThreadPoolExecutor(8) as pool:  # shared with no other test: none is made yet
    parallel = list(pool.map(lambda i: work(run, i), numbers))
  for i, (translations, scores) in zip(numbers, parallel):
    alone, alone_scores = work(run, i)
    assert [h.text for h in translations] == [h.text for h in alone]
    assert [h.log_prob for h in translations] == pytest.approx([h.log_prob for h in alone], abs=1e-5)
    assert [s.tokens for s in scores] == [s.tokens for s in alone_scores]
    assert [s.log_prob for s in scores] == pytest.approx([s.log_prob for s in alone_scores], abs=1e-5)


def test_scores_are_log_probabilities_of_pairs(run):
  (best,) = run.translate(SENTENCES[:1], scores=True)
  right, wrong, empty, nothing = run.score(
    [(SENTENCES[0], best.text), (SENTENCES[0], 'Two children.'), ('', 'A dog.'), ('', '')]
  )
  assert right.log_prob == pytest.approx(best.log_prob, abs=1e-3) and right.tokens > 5
  assert wrong.log_prob < right.log_prob - 1
  assert empty.log_prob == -np.inf and nothing.log_prob == 0 and nothing.tokens == 0


def test_routing_names_the_experts_of_every_token_and_their_weights(run):
  short, empty, long = run.routing([SENTENCES[0], '', 'Zwei Kinder und eine Katze schlafen und singen.'])
  assert empty.source == [] and empty.layers == {}
  assert ''.join(short.source).replace('▁', ' ').strip() == f'{SENTENCES[0]}</s>'
  assert short.target[0] == '<s>'
  assert ''.join(short.target[1:]).replace('▁', ' ').strip() == run.translate(SENTENCES[:1])[0]
  for found in short, long:
    assert list(found.layers) == ['encoder/layer_00', 'decoder/layer_00']
    for name, layer in found.layers.items():
      tokens = found.source if name.startswith('encoder') else found.target
      assert layer.experts.shape == layer.weights.shape == (len(tokens), 2)
      assert np.all((0 <= layer.experts) & (layer.experts < 4)) and np.all(layer.experts[:, 0] != layer.experts[:, 1])
      np.testing.assert_allclose(layer.weights.sum(axis=1), 1, atol=1e-5)
      assert np.all(layer.weights[:, 0] >= layer.weights[:, 1])
  # A sentence's routing depends on it alone, and the decoder's on the text that it is given.
  (alone,) = run.routing([SENTENCES[0]])
  (forced,) = run.routing([SENTENCES[0]], ['Two children.'])
  for name in alone.layers:
    np.testing.assert_array_equal(alone.layers[name].experts, short.layers[name].experts)
    np.testing.assert_allclose(alone.layers[name].weights, short.layers[name].weights, atol=1e-5)
  np.testing.assert_array_equal(forced.layers['encoder/layer_00'].experts, alone.layers['encoder/layer_00'].experts)
  assert len(forced.layers['decoder/layer_00'].experts) == len(forced.target) != len(alone.target)


def test_a_gate_of_zeros_chooses_the_first_two_experts_by_halves(toy_run):
  _, config = toy_run.load()
  runtime = LocalRuntime(config.program())
  weights = toy_run.checkpoints().restore(toy.STEPS, _shapes(config))
  weights = {name: np.zeros(w.shape, np.float32) if name.endswith('/gate') else w for name, w in weights.items()}
  runtime.load({'step': np.asarray(1), 'weights': weights})
  (found,) = task_of(config).router(runtime)(SENTENCES[:1], ['A dog.'], None)
  assert sorted(found.layers) == ['decoder/layer_00', 'encoder/layer_00']
  for layer in found.layers.values():
    assert layer.experts.tolist() == [[0, 1]] * len(layer.experts) and len(layer.experts) > 3
    np.testing.assert_allclose(layer.weights, 0.5)


def test_the_best_checkpoint_is_chosen_unless_another_is_named(toy_run, tmp_path):
  run = RunDir(str(tmp_path / 'log'))
  _, config = toy_run.load()
  config = run.begin(toy.MODEL, dataclasses.replace(config, encoder_layers=1))
  runtime = LocalRuntime(config.program())
  for step, dev_loss in ((1, None), (2, 2.0), (3, 3.0)):
    runtime.load({'step': np.asarray(step), 'weights': toy_run.checkpoints().restore(toy.STEPS, _shapes(config))})
    run.checkpoints().save(WholeState({**runtime.state(), 'slots': {}}))
    if dev_loss:
      run.checkpoints().note_dev_loss(step, dev_loss)
    if step == 1:
      assert (lingvo_moe.load(run.path).step, lingvo_moe.load(run.path).checkpoint) == (1, 'step 1, the newest')
      with pytest.raises(UserError, match='was evaluated on dev'):
        lingvo_moe.load(run.path, checkpoint='best')
  best = 'step 2, the best by dev loss (2); the newest is of step 3'
  for options, step in (({}, 2), ({'checkpoint': 'best'}, 2), ({'checkpoint': 'last'}, 3), ({'step': 1}, 1)):
    chosen = lingvo_moe.load(run.path, **options)
    assert chosen.step == step and (step != 2 or chosen.checkpoint == best in repr(chosen))
  with pytest.raises(UserError, match='no checkpoint of step 9; there: 1, 2, 3'):
    lingvo_moe.load(run.path, step=9)


def _shapes(config):
  return {name: spec.shape for name, spec in config.program().weight_specs.items()}


def test_a_sentence_over_the_limit_is_cut_or_translated_in_part_with_a_warning(run, monkeypatch):
  with pytest.warns(UserWarning, match='sentence 1 has a sentence over max_length=32 tokens, which was cut where a'):
    assert len(run.translate([SENTENCES[0], LONG])) == 2
  monkeypatch.setattr(run, 'split_sentences', 'never')
  with pytest.warns(UserWarning, match='sentence 1 is over max_length=32 tokens and was translated in part'):
    assert len(run.translate([SENTENCES[0], LONG])) == 2
  with pytest.warns(UserWarning, match='pair 0 has a side over max_length=32 tokens'):
    run.score([(SENTENCES[0], LONG)])
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    run.translate(SENTENCES[:3])


def test_mistakes_are_answered(run, toy_run):
  wrong = {
    "sentences must be a list of str; saw 'Ein Hund.': put a single one in a list": lambda: run.translate('Ein Hund.'),
    r'sentences must be a list of str; saw \[3\]': lambda: run.translate([3]),
    'sentences must be a list of str; saw None': lambda: run.translate(None),
    "backend must be 'auto' or 'reference'; saw 'refrence'": lambda: lingvo_moe.load(toy_run.path, backend='refrence'),
    "step must be an int; saw '20'": lambda: lingvo_moe.load(toy_run.path, step='20'),
    r'text must be Unicode; sentences\[1\] holds half of a surrogate pair': lambda: run.translate(['a', 'b\ud800']),
    'a beam of 4 has no 5 hypotheses .*: use n_best=4, or a larger beam_size=$': lambda: run.translate(['a'], n_best=5),
    'n_best must be at least 1, or None .*; saw 0': lambda: run.translate(['a'], n_best=0),
    'n_best must be at least 1, or None .*; saw -1': lambda: run.translate(['a'], n_best=-1),
    'one target language and takes no tag; saw target=.fr.': lambda: run.translate(['a'], target='fr'),
    'xx is not a source language of this model; it has de': lambda: run.translate(['a'], source='xx'),
    'prefix, ban and terms must be Unicode; saw half of': lambda: run.translate(['a'], ban=['b\ud800']),
    r'pairs are \(source, target\) each': lambda: run.score(['a', 'b']),
    'which does not continue text: use translate': lambda: run.generate(['a']),
    'step=1 and checkpoint=.last. each choose a checkpoint': lambda: lingvo_moe.load('x', step=1, checkpoint='last'),
    "checkpoint must be 'best' or 'last'; saw 'newest'": lambda: lingvo_moe.load('x', checkpoint='newest'),
    'there is no such directory': lambda: lingvo_moe.load(f'{toy_run.path}/nothing'),
    "has no field 'beem'": lambda: lingvo_moe.load(toy_run.path, beem=1),
  }
  for message, call in wrong.items():
    with pytest.raises(UserError, match=message) as error:
      call()
    assert not re.search('--[a-z]', str(error.value))


def test_languages_are_those_of_the_dev_loss_and_of_the_corpus(run, toy_run, tmp_path):
  assert run.pairs() == [('de', 'en')]
  moved = dataclasses.replace(run.config, data_dir=str(tmp_path), pairs='*-en')
  assert task_of(moved).pairs_of([]) == []
  assert task_of(moved).pairs_of(['de-en', 'pt-br-en', 'en-zh-tw']) == [('de', 'en'), ('en', 'zh-tw'), ('pt-br', 'en')]
  assert task_of(dataclasses.replace(moved, pairs='fr-en,x*-en')).pairs_of(['de-en']) == [('de', 'en'), ('fr', 'en')]
  log = tmp_path / 'train.jsonl'
  log.write_text(
    '{"dev_loss_by_pair": {"aa-en": 1.0}}\n{"loss": 1}\n{"dev_loss_by_pair": {"bb-en": 1, "aa-en": 2}}\n{"l'
  )
  assert log_directory.dev_loss_parts(str(tmp_path), 'pair') == ['aa-en', 'bb-en']


@pytest.mark.slow
def test_nothing_is_written_to_stderr(toy_run):
  code = f'import lingvo_moe; run = lingvo_moe.load({toy_run.path!r}); print(run.translate(["Ein Hund läuft."])[0])'
  env = {name: value for name, value in os.environ.items() if not name.startswith('TF_')}
  done = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True)
  assert (done.returncode, done.stdout, done.stderr) == (0, 'A dog is running.\n', '')
