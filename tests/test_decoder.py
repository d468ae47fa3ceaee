"""The decoding job: what it leaves for every pair, how it waits, and what it answers to mistakes."""

import contextlib
import dataclasses
import io
import json
import math
import os
import random
import shutil
import threading
import time

import forks
import numpy as np
import pytest
import reversed_corpus
import sacrebleu
import tensorflow as tf
import untrained_run
from text_lines import write

from lingvo_moe import decoder
from lingvo_moe.addons.analysis import translations
from lingvo_moe.core.errors import UserError
from lingvo_moe.run import results
from lingvo_moe.run.checkpoints import Checkpoints
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.runtime.local import LocalRuntime
from lingvo_moe.storage.log_directory import LogDirectory
from lingvo_moe.tasks.mt import decoding
from lingvo_moe.tasks.task import task_of

pytestmark = pytest.mark.usefixtures('one_trace')

PAIRS = ('xx-en', 'yy-en')
LONG = 'nine ' * 60
TEST_SOURCES = ['eno', '', 'owt eno', LONG, 'xis', 'net eno owt', '   ']
TEST_TARGETS = ['one', '', 'two one', LONG, 'six', 'ten one two', 'one']


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
  root = tmp_path_factory.mktemp('corpus')
  rng = random.Random(0)
  for pair in PAIRS:
    reversed_corpus.write_lines(root / pair, 'train', reversed_corpus.draw(rng, 200))
    write(root / pair / 'test.en', TEST_TARGETS)
    write(root / pair / f'test.{pair[:2]}', TEST_SOURCES if pair == 'xx-en' else TEST_SOURCES[::-1])
  return root


@pytest.fixture(scope='module')
def begun(corpus, tmp_path_factory):
  """A run that nobody trained, with checkpoints of steps 1 and 2 of which 1 is the best; treat it as read-only."""
  fields = {'source_vocab_size': 282, 'length_norm_alpha': 2.0, 'max_length': 16, 'beam_size': 2}
  run = untrained_run.begin(tmp_path_factory.mktemp('run'), corpus, {1: 2.0, 2: 3.0}, **fields)
  run.finish(2, 'max_steps')
  return run


@pytest.fixture
def run(begun, tmp_path):
  """A copy of that run to work on."""
  shutil.copytree(begun.path, tmp_path / 'log')
  return RunDir(str(tmp_path / 'log'))


@pytest.fixture(scope='module')
def made(begun, tmp_path_factory):
  """(A copy of that run with results of step 2, what decoding it printed, what it told); treat it as read-only."""
  path = tmp_path_factory.mktemp('made') / 'log'
  shutil.copytree(begun.path, path)
  with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
    decode(RunDir(str(path)), once=True)
  return RunDir(str(path)), out.getvalue(), err.getvalue()


@pytest.fixture
def decoded(made, tmp_path):
  """A copy of the run with results."""
  shutil.copytree(made[0].path, tmp_path / 'log')
  return RunDir(str(tmp_path / 'log'))


def decode(run, **options):
  decoder.decode(decoder.Options(logdir=run.path, **{'poll_seconds': 0.02, **options}))


def read(run, step, name, split='test'):
  with open(run.file('decode', split, f'step_{step}', name), encoding='utf-8') as f:
    return f.read()


def summary(run, step, name='scores.json'):
  return json.loads(read(run, step, name))


def translator_of(run, step, **overrides):
  config = run.load_config(**overrides)
  runtime = LocalRuntime(config.program())
  run.checkpoints().load_weights(runtime, step)
  return task_of(config).translator(runtime)


def scalars(run):
  folder, found = run.file('decode', 'test'), {}
  for name in sorted(os.listdir(folder)):
    if 'tfevents' in name:
      for record in tf.data.TFRecordDataset(os.path.join(folder, name)):
        event = tf.compat.v1.Event.FromString(record.numpy())
        found.update({(event.step, v.tag): v.simple_value for v in event.summary.value})
  return found


def test_another_metric_is_that_of_a_command_and_lines_are_split_where_that_is_asked(decoded, capsys, tmp_path):
  run = decoded
  decode(run, once=True, metric_command="awk -F'\\t' '{ print NF }'")
  out = capsys.readouterr().out
  assert f"awk -F'\\t' '{{ print NF }}', {PAIRS[0]}: 3.0000" in out
  decode(run, once=True, split_sentences='auto', pairs=PAIRS[0], out=str(tmp_path / 'split'))
  assert 'warning: 1 line with a sentence over max_length=16 tokens, cut where a clause ends' in capsys.readouterr().err
  made = json.loads((tmp_path / 'split' / 'step_2' / 'scores.json').read_text())
  assert made['settings']['split_sentences'] == 'auto' and made['pairs'][PAIRS[0]]['truncated'] == 0
  with pytest.raises(UserError, match='--score gives the probability of whole lines, and --split_sentences splits'):
    decode(run, once=True, split_sentences='auto', score=True)


def test_constrained_results_count_as_made_and_other_ones_do_not_replace_them(run, tmp_path, capsys):
  asked = dict(once=True, pairs=PAIRS[0], max_sentences=1, out=str(tmp_path / 'out'))
  decode(run, ban=['bad'], terms=['a=b'], **asked)
  capsys.readouterr()
  decode(run, ban=['bad'], terms=['a=b'], **asked)
  assert 'replacing' not in capsys.readouterr().err
  with pytest.raises(UserError, match=r"results made with ban=\['bad'\], now None; terms=.*give --overwrite"):
    decode(run, **asked)


def test_every_line_has_its_translation_in_source_order(made):
  run, _, err = made
  xx, yy = (read(run, 2, f'{pair}.hyp').split('\n') for pair in PAIRS)
  assert xx[-1] == yy[-1] == ''  # each line is ended
  xx, yy = xx[:-1], yy[:-1]
  assert len(xx) == len(yy) == len(TEST_SOURCES)
  assert xx == yy[::-1]  # one source is the other upside down, in the same batches
  assert xx[1] == xx[6] == ''
  expected = translator_of(run, 2).translate(TEST_SOURCES).hypotheses
  assert xx == [h[0].text for h in expected] and len(set(xx)) > 3
  warnings = [line for line in err.splitlines() if 'warning' in line]
  assert warnings == ['warning: 2 lines over max_length=16 tokens, translated in part (xx-en 1, yy-en 1)']


def test_scores_are_written_and_told(made):
  run, out, _ = made
  written = summary(run, 2)
  assert written['step'] == 2 and set(written['pairs']) == set(PAIRS)
  hypotheses = read(run, 2, 'xx-en.hyp').split('\n')[:-1]
  xx = written['pairs']['xx-en']
  assert xx['bleu'] == sacrebleu.corpus_bleu(hypotheses, [TEST_TARGETS]).score
  assert xx['chrf'] == sacrebleu.corpus_chrf(hypotheses, [TEST_TARGETS]).score
  assert xx['copy_bleu'] == sacrebleu.corpus_bleu(TEST_SOURCES, [TEST_TARGETS]).score > 0
  assert (xx['best_bleu'], xx['best_chrf']) == pytest.approx((100, 100))  # the vocabulary can write the references
  assert (xx['sentences'], xx['truncated']) == (7, 1) and 'tok:13a' in xx['bleu_signature']
  mean = {k: sum(written['pairs'][p][k] for p in PAIRS) / 2 for k in ('bleu', 'chrf', 'copy_bleu', 'copy_chrf')}
  assert written['mean'] == pytest.approx(mean)
  out = out.splitlines()
  assert out[0] == 'step 2, test' and [line[:5] for line in out if ' 7 ' in line] == list(PAIRS)
  assert out[-1] == f'mean BLEU {mean["bleu"]:.1f} over 2 pairs (copying the source: {mean["copy_bleu"]:.1f})'
  events = scalars(run)
  assert events[2, 'bleu/mean'] == pytest.approx(mean['bleu'])
  assert events[2, 'chrf/yy-en'] == pytest.approx(written['pairs']['yy-en']['chrf'])


def test_a_few_translations_are_printed_beside_source_and_reference(made):
  run, out, _ = made
  blocks = out.partition('\n')[2].split('\n\n')[:-1]
  # Each pair has five lines that are not empty: of ten lines, those at one sixth, the half and five sixths.
  places = [('xx-en', 3), ('yy-en', 2), ('yy-en', 5)]
  assert [block.splitlines()[0] for block in blocks] == [f'{pair}, line {line}' for pair, line in places]
  hypotheses = read(run, 2, 'xx-en.hyp').split('\n')
  assert blocks[0].splitlines()[1:] == [
    '  source      owt eno',
    '  reference   two one',
    f'  translation {hypotheses[2]}',
  ]
  for block in blocks:
    assert max(map(len, block.splitlines())) <= 214


def test_the_checkpoint_can_be_chosen(run):
  decode(run, step=1, pairs='xx-en')
  decode(run, best=True, pairs='yy-en', split='train', max_sentences=5)
  for options, step in (
    ({'best': True}, 1),
    ({'checkpoint': 'best'}, 1),
    ({'checkpoint': 'last'}, 2),
    ({'once': True}, 2),
  ):
    options = decoder.Options(run.path, **options)
    assert options.choose_step(run) == step and not options.waits
  assert not os.path.exists(run.file('decode', 'test', 'step_2'))
  assert summary(run, 1)['pairs']['xx-en']['sentences'] == 7
  assert read(run, 1, 'yy-en.hyp', 'train').count('\n') == 5
  assert not os.path.exists(run.file('decode', 'train', 'step_1', 'xx-en.hyp'))


def test_what_is_done_is_shown_and_not_done_again(made, decoded, capsys, monkeypatch):
  _, first, _ = made
  with monkeypatch.context() as m:
    m.setattr(Checkpoints, 'load_weights', lambda *a: 1 / 0)
    decode(decoded, once=True)
  again = capsys.readouterr()
  assert again.out == first and '--overwrite makes it again' in again.err
  os.remove(decoded.file('decode', 'test', 'step_2', 'scores.json'))  # killed before its last file
  decode(decoded, once=True)
  assert capsys.readouterr().out == first
  decode(decoded, once=True, pairs='xx-en', overwrite=True)
  assert 'replacing' in capsys.readouterr().err


def test_a_checkpoint_that_was_replaced_under_the_same_step_is_decoded_again(decoded, capsys):
  run = decoded
  before, checkpoints = read(run, 2, 'xx-en.hyp'), run.checkpoints()
  shutil.rmtree(os.path.dirname(checkpoints.path(2)))
  checkpoints.save(untrained_run.state_of(run.load()[1], 2, seed=7))
  decode(run, once=True)
  assert 'replacing' in capsys.readouterr().err
  expected = [h[0].text for h in translator_of(run, 2).translate(TEST_SOURCES).hypotheses]
  assert read(run, 2, 'xx-en.hyp').splitlines() == expected != before.splitlines()


def test_a_decoder_that_was_interrupted_goes_on_after_what_it_has_translated(run, capsys, monkeypatch):
  monkeypatch.setattr(results, '_UNFINISHED_SECONDS', 0.0)
  searched = []
  search = decoding.SentenceTranslator._read

  def until(most):
    def read(self, hypotheses, row):
      if len(searched) == most:
        raise KeyboardInterrupt
      searched.append(row)
      return search(self, hypotheses, row)

    searched.clear()
    monkeypatch.setattr(decoding.SentenceTranslator, '_read', read)

  options = {'once': True, 'batch_tokens': 32}  # the long lines fill a batch each
  decode(run, **options)
  expected = {name: read(run, 2, name) for name in (*(f'{pair}.hyp' for pair in PAIRS), 'scores.json')}
  path = run.file('decode', 'test', 'step_2', 'scores.unfinished.jsonl')
  assert not os.path.exists(path)
  for most in (3, 4):
    until(most)
    with pytest.raises(KeyboardInterrupt):
      decode(run, **options, overwrite=most == 3)
    assert os.path.exists(path) and not os.path.exists(run.file('decode', 'test', 'step_2', 'scores.json'))
  capsys.readouterr()
  until(99)
  decode(run, **options)
  assert len(searched) == 10 - 3 - 4  # of 14 lines 4 are empty
  assert f'going on after 7 lines in {path}' in capsys.readouterr().err
  assert {name: read(run, 2, name) for name in expected} == expected and not os.path.exists(path)
  until(3)
  with pytest.raises(KeyboardInterrupt):
    decode(run, **options, overwrite=True)
  until(99)
  decode(run, **options, beam_size=1)
  assert len(searched) == 10 and 'of no use: its settings are others' in capsys.readouterr().err
  until(3)
  with pytest.raises(KeyboardInterrupt):
    decode(run, **options, overwrite=True)
  until(0)
  with pytest.raises(KeyboardInterrupt):
    decode(run, **options, overwrite=True)
  until(99)
  decode(run, **options)  # --overwrite has put away what was kept before
  assert len(searched) == 10 and {name: read(run, 2, name) for name in expected} == expected


def test_other_settings_replace_what_was_there_only_if_told(decoded, capsys):
  run = decoded
  before = read(run, 2, 'scores.json')
  with pytest.raises(UserError, match='holds results made with beam_size=2, now 1; .*give --overwrite'):
    decode(run, once=True, beam_size=1, length_norm_alpha=0.0, pairs='yy-en')
  assert read(run, 2, 'scores.json') == before
  decode(run, once=True, beam_size=1, length_norm_alpha=0.0, pairs='yy-en', overwrite=True)
  assert 'beam_size=2, now 1; length_norm_alpha=2.0, now 0.0' in capsys.readouterr().err
  assert summary(run, 2)['settings']['beam_size'] == 1
  assert not os.path.exists(run.file('decode', 'test', 'step_2', 'xx-en.hyp'))
  greedy = translator_of(run, 2, beam_size=1, length_norm_alpha=0.0).translate(TEST_SOURCES[::-1]).hypotheses
  assert read(run, 2, 'yy-en.hyp').split('\n')[:-1] == [h[0].text for h in greedy]


def test_results_of_another_pair_need_a_folder_of_their_own_and_lie_beside_their_text(run, tmp_path):
  decode(run, once=True, pairs='xx-en')
  assert read(run, 2, 'xx-en.src').splitlines() == TEST_SOURCES
  assert read(run, 2, 'xx-en.ref').splitlines() == TEST_TARGETS
  with pytest.raises(UserError, match='holds results made with text of xx-en, now yy-en: give .*--out=FOLDER'):
    decode(run, once=True, pairs='yy-en')
  with pytest.raises(UserError, match='made with other lines of xx-en: give'):
    decode(run, once=True, pairs='xx-en', max_sentences=3)
  decode(run, once=True, pairs='yy-en', out=str(tmp_path / 'own'))
  assert sorted(os.listdir(tmp_path / 'own' / 'step_2')) == ['scores.json', 'yy-en.hyp', 'yy-en.ref', 'yy-en.src']
  decode(run, once=True, pairs='yy-en', overwrite=True)
  assert not os.path.exists(run.file('decode', 'test', 'step_2', 'xx-en.src'))


def test_results_are_read_with_the_text_that_was_translated(decoded, tmp_path):
  run = decoded
  ours = LogDirectory.read(run.path)
  other = tmp_path / 'other'
  shutil.copytree(ours.values['data_dir'], other)
  write(other / 'xx-en' / 'test.en', TEST_TARGETS[::-1])
  with pytest.raises(UserError, match='xx-en was decoded from other text than .*other has: give the corpus'):
    translations.read(ours, 'test', 2, str(other))
  moved = dataclasses.replace(ours, values={**ours.values, 'data_dir': str(tmp_path / 'nowhere')})
  for found in translations.read(moved, 'test', 2), translations.read(ours, 'test', 2, ours.values['data_dir']):
    assert found['xx-en'].sources == TEST_SOURCES and found['xx-en'].references == TEST_TARGETS
    assert (found['xx-en'].pair.source, found['xx-en'].pair.target) == ('xx', 'en')
  named = summary(run, 2)['languages']
  assert named == {'xx-en': ['xx', 'en'], 'yy-en': ['yy', 'en']}
  with open(run.file('decode', 'test', 'step_2', 'xx-en.ref'), 'a', encoding='utf-8') as f:
    f.write('more\n')
  with pytest.raises(UserError, match='xx-en.ref is not as the decoder wrote it: decode the step again'):
    translations.read(ours, 'test', 2)


def test_scores_against_a_language_that_the_model_does_not_write_are_warned_of(run, tmp_path, capsys):
  corpus = tmp_path / 'corpus'
  shutil.copytree(LogDirectory.read(run.path).values['data_dir'], corpus)
  shutil.copytree(corpus / 'xx-en', corpus / 'xx-fr')
  os.rename(corpus / 'xx-fr' / 'test.en', corpus / 'xx-fr' / 'test.fr')
  decode(run, once=True, data_dir=str(corpus), pairs='xx-fr', max_sentences=1, out=str(tmp_path / 'fr'))
  assert 'warning: the model writes en and takes no tag, so' in (told := capsys.readouterr().err)
  assert 'another language: fr' in told
  decode(run, once=True, pairs='xx-en', max_sentences=1, out=str(tmp_path / 'en'))
  assert 'warning: the model writes' not in capsys.readouterr().err


def test_score_gives_the_log_probability_of_every_target(run, capsys):
  decode(run, once=True, score=True)
  numbers = [float(x) for x in read(run, 2, 'xx-en.scores').splitlines()]
  scored = translator_of(run, 2).score(TEST_SOURCES, TEST_TARGETS)
  np.testing.assert_allclose(numbers, scored.log_probs, atol=2e-6)
  assert numbers[1] == 0 and numbers[6] == -math.inf
  written = summary(run, 2, 'perplexity.json')['pairs']['xx-en']
  assert written['target_tokens'] == scored.target_tokens.sum()
  real = [i for i in range(7) if i not in (1, 6)]
  cross_entropy = -sum(scored.log_probs[real]) / scored.target_tokens.sum()
  assert written['cross_entropy'] == pytest.approx(cross_entropy)
  assert written['perplexity'] == pytest.approx(math.exp(cross_entropy))
  captured = capsys.readouterr()
  assert captured.out.splitlines()[-1].startswith('cross-entropy ') and '2 lines' in captured.err
  assert scalars(run)[2, 'perplexity/xx-en'] == pytest.approx(written['perplexity'])
  decode(run, once=True)  # beside the translations
  assert os.path.exists(run.file('decode', 'test', 'step_2', 'xx-en.scores'))


def test_it_waits_for_a_run_and_its_checkpoints_and_ends_with_the_trainer(begun, tmp_path, capsys):
  run = RunDir(str(tmp_path / 'log'))
  job = threading.Thread(target=decode, args=(run,), kwargs={'pairs': 'xx-en', 'max_sentences': 2}, daemon=True)
  job.start()
  written = lambda step: os.path.exists(run.file('decode', 'test', f'step_{step}', 'scores.json'))
  err = ''

  def wait(condition):
    nonlocal err
    until = time.monotonic() + 120
    while not condition():
      assert time.monotonic() < until
      time.sleep(0.02)
      err += capsys.readouterr().err

  wait(lambda: 'waiting for a trainer to begin a run' in err)
  shutil.copytree(begun.file('vocab'), run.vocab_dir)
  shutil.copyfile(begun.config_file, run.file('config.partial'))
  os.rename(run.file('config.partial'), run.config_file)
  checkpoints = run.checkpoints()
  os.makedirs(checkpoints.directory)
  for step in (1, 2):
    shutil.copytree(begun.file('checkpoints', f'step_{step:08d}'), run.file('copy'))
    os.rename(run.file('copy'), os.path.dirname(checkpoints.path(step)))
    if step == 1:
      wait(lambda: written(1) and 'waiting for a new checkpoint' in err)
  run.finish(2, 'max_steps')
  job.join(120)
  assert not job.is_alive() and written(2)
  assert err.count('waiting for a trainer to begin a run') == 1


def test_a_checkpoint_that_is_dropped_before_it_is_read_is_passed_over(run, monkeypatch, capsys):
  restore, checkpoints = Checkpoints.restore, run.checkpoints()

  def slow(self, step, specs):
    if step == 2:  # meanwhile, in the trainer
      shutil.copytree(os.path.dirname(checkpoints.path(2)), os.path.dirname(checkpoints.path(3)))
      shutil.rmtree(os.path.dirname(checkpoints.path(2)))
    return restore(self, step, specs)

  monkeypatch.setattr(Checkpoints, 'restore', slow)
  decode(run, pairs='xx-en', max_sentences=1)
  assert 'step 2 was dropped before it was read' in capsys.readouterr().err
  assert summary(run, 3)['step'] == 3 and not os.path.exists(run.file('decode', 'test', 'step_2'))


def test_a_damaged_checkpoint_is_refused(run):
  (data,) = [p for p in os.listdir(os.path.dirname(run.checkpoints().path(2))) if 'data' in p]
  path = os.path.join(os.path.dirname(run.checkpoints().path(2)), data)
  os.truncate(path, os.path.getsize(path) // 2)
  for options in ({'once': True}, {}):
    with pytest.raises(UserError, match='damaged or cut short'):
      decode(run, **options)


def test_mistakes_are_answered(run, tmp_path):
  wrong = {
    'holds a run of mt.cldr.Tiny, not of --model=mt.cldr.Dense: leave --model out': {'model': 'mt.cldr.Dense'},
    'has no checkpoint of step 7; there: 1, 2': {'step': 7},
    'each choose a checkpoint: give one of them': {'step': 1, 'best': True},
    'beam_size must be from 1 to 1024; saw 0': {'beam_size': 0},
    'length_norm_alpha must be at least 0; saw -1': {'length_norm_alpha': -1.0},
    "no pair of .* matches 'zz-en'": {'pairs': 'zz-en'},
    'no file nosuch.xx': {'split': 'nosuch'},
    'data_dir must be an existing folder; saw .*nowhere': {'data_dir': str(tmp_path / 'nowhere')},
  }
  for message, options in wrong.items():
    with pytest.raises(UserError, match=message):
      decode(run, **{'once': True, **options})
  with pytest.raises(UserError, match='there is no such directory'):
    decode(RunDir(str(tmp_path / 'nowhere')), once=True)
  (tmp_path / 'empty').mkdir()
  with pytest.raises(UserError, match='there is no run in'):
    decode(RunDir(str(tmp_path / 'empty')), once=True)
  shutil.rmtree(run.file('checkpoints'))
  for once in (True, False):  # the run is finished
    with pytest.raises(UserError, match='there is no checkpoint in'):
      decode(run, once=once)


@pytest.mark.slow
def test_the_command_answers_a_mistake_with_one_line(tmp_path):
  command = ['-m', 'lingvo_moe.decoder', f'--logdir={tmp_path}/nowhere', '--once']
  done = forks.run(command, timeout=120)
  assert done.returncode == 1 and done.stdout == ''
  assert done.stderr.splitlines()[-1] == (
    f'error: {tmp_path}/nowhere: there is no such directory; give the log directory of a run'
  )
  assert 'Traceback' not in done.stderr
