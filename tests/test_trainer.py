"""The training job from the outside: what it leaves in its log directory, and how it goes on after an interruption."""

import contextlib
import functools
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import reversed_corpus
import shared_traces
import tensorflow as tf
from text_lines import records

from lingvo_moe import trainer
from lingvo_moe.addons.report import page, reading
from lingvo_moe.core.errors import UserError
from lingvo_moe.run import averaging, reporting, training, warm_start
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.run.signals import Signals
from lingvo_moe.runtime.local import LocalRuntime
from lingvo_moe.storage import json_files

pytestmark = pytest.mark.usefixtures('one_trace')

MODEL = 'mt.cldr.Tiny'
BINDINGS = [
  'Tiny.source_vocab_size = 282',
  'Tiny.target_vocab_size = 280',
  'Tiny.eval_every = 4',
  'Tiny.encoder_layers = 1',
  'Tiny.decoder_layers = 1',
  'Tiny.moe_every = 1',
  'Tiny.num_experts = 4',
  'Tiny.max_length = 32',
]


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
  return reversed_corpus.write(tmp_path_factory.mktemp('corpus'), held_out=20)


def train(corpus, logdir, max_steps, bindings=(), signals=None, **values):
  given = {'model': MODEL, 'data_dir': str(corpus), 'gin_bindings': [*BINDINGS, *bindings], **values}
  return trainer.train(trainer.Options(logdir=str(logdir), max_steps=max_steps, **given), signals=signals)


SO_FAR = ('seconds_so_far', 'source_tokens_so_far', 'target_tokens_so_far')


def lines_of(logdir):
  return [json_files.parse(line) for line in (logdir / 'train.jsonl').read_text().splitlines()]


def losses(logdir):
  lines = records(logdir / 'train.jsonl')
  return [(line['step'], line['loss']) for line in lines if 'loss' in line]


def tensors(logdir, step):
  reader = tf.train.load_checkpoint(str(logdir / 'checkpoints' / f'step_{step:08d}' / 'state'))
  return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def assert_same_state(a, b):
  assert a.keys() == b.keys()
  for name in a:
    np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.fixture(scope='module')
def whole(corpus, tmp_path_factory):
  """A run of 8 steps that nobody interrupted."""
  logdir = tmp_path_factory.mktemp('whole')
  assert train(corpus, logdir, 8) is None
  return logdir


@pytest.fixture(scope='module')
def parts(corpus, tmp_path_factory):
  """The same run in two parts, with traces of their own, so that equal bits do not come from those of the whole."""
  logdir = tmp_path_factory.mktemp('parts')
  with shared_traces.shared():
    train(corpus, logdir, 4)
    train(corpus, logdir, 8)
  return logdir


def test_a_run_leaves_everything_that_decoding_needs(whole):
  config = json.loads((whole / 'config.json').read_text())
  assert config['model'] == MODEL and config['values']['eval_every'] == 4
  assert sorted(os.listdir(whole / 'checkpoints')) == ['step_00000004', 'step_00000008']
  assert {'source.model', 'target.model'} <= set(os.listdir(whole / 'vocab'))
  assert json_files.parse((whole / 'finished.json').read_text()) == {'step': 8, 'reason': 'max_steps'}


def test_every_step_is_logged_with_its_routing_and_pace(whole):
  lines = lines_of(whole)
  assert [line['step'] for line in lines] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
  assert {'loss', 'grad_norm', 'learning_rate', 'tokens_per_second', 'input_wait_share'} <= lines[0].keys()
  parts = [lines[0][f'objective/{name}'] for name in ('smoothed_cross_entropy', 'balance')]
  assert lines[0]['objective'] == pytest.approx(sum(parts), rel=1e-6)
  assert parts[1] == pytest.approx(0.01 * lines[0]['aux_loss'], rel=1e-6)
  assert {
    f'moe/{stack}/layer_00/{what}'
    for stack in ('encoder', 'decoder')
    for what in ('aux_loss', 'second_dropped', 'entropy')
  } <= lines[0].keys()
  assert lines[4].keys() == {'step', 'time', *SO_FAR, 'dev_loss', 'dev_perplexity', 'dev_loss_by_pair', 'dev_text'}


def test_a_run_leaves_the_load_of_every_expert_and_a_report_shows_it(whole):
  steps = [line for line in lines_of(whole) if 'loss' in line]
  loads = records(whole / 'routing.jsonl')
  assert [(line['step'], line['steps']) for line in loads] == [(step, 1) for step in range(1, 9)]
  for line, load in zip(steps, loads, strict=True):
    for layer, load_E in load['choices'].items():
      assert len(load_E) == 4 and max(load_E) / np.mean(load_E) == pytest.approx(line[f'moe/{layer}/largest_load'])
  dev = json.loads((whole / 'dev_routing.json').read_text())
  assert dev['step'] == 8 and dev['subsets'] == ['xx-en']
  by_pair = np.array(dev['choices']['encoder/layer_00'])
  assert by_pair.shape == (1, 4) and by_pair.sum() % 2 == 0 < by_pair.sum()  # two experts a token
  (environment,) = [json_files.parse(line) for line in (whole / 'environment.jsonl').read_text().splitlines()]
  assert environment['step'] == 0 and environment['software']['tensorflow'] == tf.__version__
  assert environment['examples'] == {'xx-en': (steps and environment['examples']['xx-en']) or 0}

  text = page.page(reading.read([str(whole)], 'test'))
  assert text.count('<strong>Load by expert</strong>') == text.count('<strong>Dead experts</strong>') == 2
  assert 'has no' not in text.partition('id="samples"')[0].partition('id="experts"')[2]


def test_every_line_has_the_seconds_and_tokens_since_the_run_began_over_its_restarts(whole, parts):
  lines = lines_of(parts)
  seconds = [line['seconds_so_far'] for line in lines]
  assert seconds == sorted(seconds) and seconds[0] > 0
  steps = [line for line in lines if 'loss' in line]
  assert [line['target_tokens_so_far'] for line in steps] == np.cumsum([s['target_tokens'] for s in steps]).tolist()
  for name in SO_FAR[1:]:
    assert [line[name] for line in lines] == [line[name] for line in lines_of(whole)]


def test_the_dev_loss_of_the_only_pair_is_the_dev_loss(whole):
  line = lines_of(whole)[4]
  assert line['dev_loss_by_pair'] == {'xx-en': pytest.approx(line['dev_loss'])}


@pytest.mark.compiled
def test_a_run_goes_on_scanned_in_micro_batches_to_the_same_losses(tmp_path):
  for name in ('train', 'dev'):  # of a language model, which has one stack to trace
    (tmp_path / f'{name}.txt').write_text(''.join(f'{i} and {i + 1} make {2 * i + 1}.\n' for i in range(30)))
  sizes = ['Tiny.num_layers = 2', 'Tiny.num_experts = 4', 'Tiny.eval_every = 100']
  run = functools.partial(train, tmp_path, model='lm.shakespeare.Tiny', gin_bindings=sizes)
  assert run(tmp_path / 'whole', 2) is None
  shutil.copytree(tmp_path / 'whole', tmp_path / 'scanned')
  assert run(tmp_path / 'whole', 4) is None
  assert run(tmp_path / 'scanned', 4, set=['scan_layers=True', 'remat=block', 'micro_batches=2']) is None
  (steps, got), (expected_steps, expected) = (zip(*losses(tmp_path / name)) for name in ('scanned', 'whole'))
  assert steps == expected_steps == (1, 2, 3, 4)
  np.testing.assert_allclose(got, expected, rtol=1e-4)
  assert tensors(tmp_path / 'scanned', 4).keys() == tensors(tmp_path / 'whole', 4).keys()


def test_the_event_file_holds_the_same_scalars(whole):
  events = [f for f in os.listdir(whole) if f.startswith('events.')]
  found = [
    (e.step, v.simple_value)
    for e in tf.compat.v1.train.summary_iterator(str(whole / events[0]))
    for v in e.summary.value
    if v.tag == 'loss'
  ]
  assert [step for step, _ in found] == list(range(1, 9))
  assert dict(found) == pytest.approx(dict(losses(whole)))


def test_a_run_in_two_parts_equals_one_in_one_bit_for_bit(whole, parts):
  assert losses(parts) == losses(whole)
  assert_same_state(tensors(parts, 8), tensors(whole, 8))


BIASED = {'gate': 'top_k', 'router_score': 'sigmoid', 'router_bias_update_rate': 0.01, 'optimizer': 'adamw'}
BIASED |= {'capacity_factor': 0.1, 'log_every': 3}


@pytest.fixture(scope='module')
def biased(corpus, tmp_path_factory):
  """(Function that trains with biases of experts, AdamW and few slots; a run of four such steps; what it said)."""
  bindings = [f'Tiny.{name} = {value!r}' for name, value in BIASED.items()]
  run = functools.partial(train, corpus, bindings=bindings)
  logdir = tmp_path_factory.mktemp('biased')
  with contextlib.redirect_stderr(io.StringIO()) as said:
    run(logdir, 4)
  return run, logdir, said.getvalue()


def test_biases_of_experts_and_adamw_resume_bit_for_bit(biased, tmp_path):
  run, logdir, _ = biased
  run(tmp_path, 2)
  run(tmp_path, 4)
  state = tensors(logdir, 4)
  assert any(np.any(value) for name, value in state.items() if name.endswith('gate_bias'))
  assert losses(tmp_path)[1:] == losses(logdir)
  assert_same_state(tensors(tmp_path, 4), state)


def test_the_last_step_is_logged_and_dropped_choices_are_said_once(biased):
  _, logdir, said = biased
  assert [step for step, _ in losses(logdir)] == [3, 4]
  said = [line for line in said.splitlines() if 'of the choices of experts' in line]
  assert len(said) == 1 and said[0].startswith('step 3 dropped ')


def test_several_steps_in_a_call_change_nothing(corpus, whole, tmp_path, monkeypatch):
  calls, train_steps = [], LocalRuntime.train_steps

  def counted(self, batches):
    calls.append((self.step, len(batches)))
    return train_steps(self, batches)

  monkeypatch.setattr(LocalRuntime, 'train_steps', counted)
  bindings = ['Tiny.log_every = 100', 'Tiny.save_every = 3', 'Tiny.boundaries = (32,)']
  train(corpus, tmp_path / 'one', 6, bindings)
  assert calls == [(step, 1) for step in range(6)]
  calls.clear()
  train(corpus, tmp_path / 'loops', 6, bindings, steps_per_loop=100)
  assert calls == [(0, 3), (3, 1), (4, 2)]  # saved at 3, evaluated at 4 and 6
  assert_same_state(tensors(tmp_path / 'loops', 6), tensors(tmp_path / 'one', 6))
  assert losses(tmp_path / 'loops') == losses(tmp_path / 'one')
  with pytest.raises(UserError, match='saw --steps_per_loop=200 and log_every=100: bind log_every = 200'):
    train(corpus, tmp_path / 'more', 6, bindings, steps_per_loop=200)
  saved = [sorted(os.listdir(tmp_path / name / 'checkpoints')) for name in ('one', 'loops')]
  assert saved[0] == saved[1]


def test_a_call_has_one_shape_and_ends_where_there_is_something_to_do():
  batch = lambda length: {'x': np.zeros([2, length])}
  lengths = [5, 5, 5, 9, 9, 9, 9, 5, 5, 5]

  def sizes(step, size, stops):
    loops = training.batches_by_call(map(batch, lengths), step, size, stops)
    return [[x['x'].shape[1] for x in loop] for loop in loops]

  assert sizes(0, 1, {4}) == [[length] for length in lengths]
  assert sizes(0, 3, {100}) == [[5, 5, 5], [9, 9, 9], [9], [5, 5, 5]]
  assert sizes(0, 9, {2, 10}) == [[5, 5], [5], [9], [9, 9], [9], [5], [5, 5]]
  assert sizes(1, 9, {5}) == [[5, 5, 5], [9], [9, 9, 9], [5, 5]]


def test_steps_after_the_last_checkpoint_are_run_and_logged_again(corpus, whole, tmp_path):
  logdir = tmp_path / 'run'
  shutil.copytree(whole, logdir)
  shutil.rmtree(logdir / 'checkpoints' / 'step_00000008')
  (logdir / 'finished.json').unlink()
  with open(logdir / 'train.jsonl', 'a') as f:
    f.write('{"step": 9, "lo')  # cut short, as a crash leaves it
  train(corpus, logdir, 8)
  assert losses(logdir) == losses(whole)
  assert_same_state(tensors(logdir, 8), tensors(whole, 8))


@pytest.fixture
def signals():
  """Signals that are installed; their handlers are put back."""
  handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
  installed = Signals()
  installed.install()
  yield installed
  for number, handler in handlers.items():
    signal.signal(number, handler)


def test_sigterm_saves_and_exits_with_a_status_of_its_own(corpus, whole, tmp_path, monkeypatch, signals):
  log_step = reporting.TrainLog.step

  def step_then_terminate(self, step, *args, **kwargs):
    log_step(self, step, *args, **kwargs)
    if step == 3:
      os.kill(os.getpid(), signal.SIGTERM)

  monkeypatch.setattr(reporting.TrainLog, 'step', step_then_terminate)
  assert train(corpus, tmp_path, 8, signals=signals) == 143
  assert os.listdir(tmp_path / 'checkpoints') == ['step_00000003']
  assert not (tmp_path / 'finished.json').exists()
  monkeypatch.undo()
  train(corpus, tmp_path, 4)
  assert losses(tmp_path) == losses(whole)[:4]


def test_a_signal_in_an_evaluation_that_is_caught_up_with_stops_the_run(corpus, whole, tmp_path, capsys):
  shutil.copytree(whole, tmp_path / 'run')
  noted = tmp_path / 'run' / 'checkpoints' / 'step_00000008' / 'dev_loss.json'
  before = noted.read_text()
  noted.unlink()
  log = tmp_path / 'run' / 'train.jsonl'
  log.write_text(''.join(log.read_text().splitlines(keepends=True)[:-1]))  # without the loss of step 8
  signals = Signals()
  signals.received = signal.SIGTERM
  assert train(corpus, tmp_path / 'run', 8, signals=signals) == 143
  assert 'SIGTERM: saved step 8' in capsys.readouterr().err and not noted.exists()
  assert train(corpus, tmp_path / 'run', 8) is None
  assert noted.read_text() == before


def test_a_finished_run_has_nothing_left_to_do(corpus, whole, capsys, monkeypatch):
  restore, finished = warm_start.restore_or_init, []
  note = lambda *args: finished.append((whole / 'finished.json').exists()) or restore(*args)
  monkeypatch.setattr(warm_start, 'restore_or_init', note)
  assert train(corpus, whole, 8) is None
  assert 'step 8 of 8: nothing left to do' in capsys.readouterr().err
  # Meanwhile a decoder waits.
  assert finished == [False] and (whole / 'finished.json').exists()

  def fail(*args):
    raise UserError('a damaged checkpoint')

  monkeypatch.setattr(warm_start, 'restore_or_init', fail)
  with pytest.raises(UserError, match='a damaged checkpoint'):
    train(corpus, whole, 8)
  assert (whole / 'finished.json').exists()


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(corpus, tmp_path):
  bindings = ["Tiny.schedule = 'constant'", 'Tiny.learning_rate = 1e30']
  with pytest.raises(UserError, match=r'must stay finite; at step [23] .*no checkpoint had been saved yet.*lower lear'):
    train(corpus, tmp_path, 4, bindings)


def test_a_run_does_not_go_on_as_another_model(corpus, whole):
  with pytest.raises(UserError, match=r'holds a run with model_dim=32, now 64.*choose another --logdir') as refused:
    train(corpus, whole, 9, ['Tiny.model_dim = 64'])
  assert f'--init_from={whole}' in str(refused.value) and 'dispatch, ' in str(refused.value)


def test_a_run_goes_on_by_its_log_directory_alone_and_says_what_may_change(corpus, whole, tmp_path, capsys):
  shutil.copytree(whole, tmp_path / 'run')
  begun = json.loads((whole / 'config.json').read_text())
  assert trainer.train(trainer.Options(logdir=str(tmp_path / 'run'), max_steps=9, set=['log_every=1'])) is None
  said = capsys.readouterr().err
  may_change = re.search(rf'going on with {MODEL} as {tmp_path}/run/config.json has it; --set may change (.*)', said)[1]
  assert {'data_dir', 'max_steps', 'sample_seed'} < set(may_change.split(', '))
  assert 'going on from step 8' in said and losses(tmp_path / 'run')[-1][0] == 9
  values = json.loads((tmp_path / 'run' / 'config.json').read_text())['values']
  assert values == {**begun['values'], 'max_steps': 9}
  with pytest.raises(UserError, match='holds a run with model_dim=32, now 64'):
    trainer.train(trainer.Options(logdir=str(tmp_path / 'run'), set=['model_dim=64']))


def test_a_corpus_that_has_changed_is_said_and_accepted_only_when_told_to(corpus, whole, tmp_path, capsys):
  shutil.copytree(whole, tmp_path / 'run')
  shutil.copytree(corpus, tmp_path / 'corpus')
  path = tmp_path / 'corpus' / 'xx-en' / 'train.en'
  path.write_text(''.join(reversed(path.read_text().splitlines(keepends=True))))
  before = (tmp_path / 'run' / 'config.json').read_text()
  with pytest.raises(
    UserError, match=r'xx-en/train.en \(train of xx-en\) has other text: put it back, or go on with it'
  ):
    train(tmp_path / 'corpus', tmp_path / 'run', 9)
  assert (tmp_path / 'run' / 'config.json').read_text() == before
  assert train(tmp_path / 'corpus', tmp_path / 'run', 8, accept_changed_corpus=True) is None
  said = capsys.readouterr().err
  assert 'going on with another corpus: xx-en/train.en (train of xx-en) has other text' in said
  assert train(tmp_path / 'corpus', tmp_path / 'run', 8) is None


def test_the_best_checkpoint_is_measured_again_where_dev_text_changes_and_patience_compares_like_with_like(
  corpus, tmp_path, capsys
):
  shutil.copytree(corpus, tmp_path / 'corpus')
  for language in ('xx', 'en'):
    path = tmp_path / 'corpus' / 'xx-en' / f'dev.{language}'
    lines = path.read_text().splitlines()
    lines[0] = lines[10] = 'six six six six six'  # the two that are taken are harder than the others
    path.write_text('\n'.join(lines) + '\n')
  logdir, patient = tmp_path / 'run', ['Tiny.patience = 1', 'Tiny.keep_checkpoints = 1']
  assert train(tmp_path / 'corpus', logdir, 8, patient) is None
  first, best = (line['dev_loss'] for line in lines_of(logdir) if 'dev_loss' in line)
  assert best < first
  capsys.readouterr()
  assert train(tmp_path / 'corpus', logdir, 12, [*patient, 'Tiny.eval_sentences = 2']) is None
  said = capsys.readouterr().err
  *_, again, last = [line for line in lines_of(logdir) if 'dev_text' in line]
  assert (again['step'], again['best_step']) == (8, 8) and again['dev_loss_of_best'] > best
  assert again['dev_text'] == last['dev_text'] != lines_of(logdir)[4]['dev_text']
  assert 'the dev text has changed: the best checkpoint, of step 8, is measured again' in said
  assert f'dev loss {again["dev_loss_of_best"]:.4f}, was {best:.4f}' in said
  assert last['step'] == 12 and last['dev_loss'] < again['dev_loss_of_best']
  assert RunDir(str(logdir)).checkpoints().best()[:2] == (12, last['dev_loss'])
  assert '(max_steps)' in said


def test_a_run_may_rank_checkpoints_by_a_score_of_greedy_translations_and_again_by_loss(
  corpus, whole, tmp_path, capsys
):
  logdir = tmp_path / 'run'
  shutil.copytree(whole, logdir)
  ranked = ['Tiny.best_by = "chrf"', 'Tiny.best_by_sentences = 5', 'Tiny.patience = 2']
  assert train(corpus, logdir, 12, ranked) is None
  said = capsys.readouterr().err
  assert said.count('greedy translations of dev text: BLEU ') == 2 and '; best dev chrF ' in said
  assert 'checkpoints are ranked by dev chrF from now on: the best checkpoint, of step 8' in said
  *_, again, last = [line for line in lines_of(logdir) if 'dev_text' in line]
  best = RunDir(str(logdir)).checkpoints().best()
  assert (best.metric, best.score) == ('chrF', max(again['dev_chrf_of_best'], last['dev_chrf']))
  assert best.dev_text.endswith(' chrF 5') and last.keys() >= {'dev_bleu', 'dev_perplexity'}
  assert f'the best by dev chrF ({best.score:.4g})' in RunDir(str(logdir)).checkpoints().describe(best.step)
  assert train(corpus, logdir, 13, ['Tiny.best_by = "loss"']) is None
  said = capsys.readouterr().err
  assert 'checkpoints are ranked by dev loss from now on: the best checkpoint, of step' in said
  assert RunDir(str(logdir)).checkpoints().best().metric is None


def test_measuring_an_earlier_best_again_leaves_training_as_it_was(corpus, whole, tmp_path, capsys):
  logdir = tmp_path / 'run'
  shutil.copytree(whole, logdir)
  (logdir / 'train.jsonl').unlink()  # which has the dev loss of step 4 on this text
  for step, loss in ((4, 1.0), (8, 2.0)):  # as if step 4 were the best
    (logdir / 'checkpoints' / f'step_{step:08d}' / 'dev_loss.json').write_text(f'{{"dev_loss": {loss}}}')
  shutil.copytree(whole, tmp_path / 'whole')
  train(corpus, tmp_path / 'whole', 9)
  assert train(corpus, logdir, 9) is None
  assert (
    'an earlier version did not note the dev text of its losses: the best checkpoint, of step 4'
    in capsys.readouterr().err
  )
  assert_same_state(tensors(logdir, 9), tensors(tmp_path / 'whole', 9))
  (again,) = [line for line in lines_of(logdir) if 'best_step' in line]
  assert (again['step'], again['best_step']) == (8, 4)
  assert again['dev_loss_of_best'] == lines_of(whole)[4]['dev_loss']  # as it was then, on that text


def test_a_loss_that_was_logged_before_a_kill_is_logged_once(corpus, whole, tmp_path):
  shutil.copytree(whole, tmp_path / 'run')
  noted = tmp_path / 'run' / 'checkpoints' / 'step_00000008' / 'dev_loss.json'
  before = noted.read_text()
  noted.unlink()
  assert train(corpus, tmp_path / 'run', 8) is None
  assert lines_of(tmp_path / 'run') == lines_of(whole) and noted.read_text() == before


def test_a_log_directory_alone_needs_a_run(tmp_path):
  with pytest.raises(UserError, match='--model says what to train; saw none, and there is no run in --logdir='):
    trainer.train(trainer.Options(logdir=str(tmp_path)))


def test_a_value_is_set_without_quotes_and_checked(corpus, tmp_path):
  train(corpus, tmp_path / 'run', 0, set=['pairs=xx-en', 'batch_tokens = 512'])
  values = json.loads((tmp_path / 'run' / 'config.json').read_text())['values']
  assert (values['pairs'], values['batch_tokens']) == ('xx-en', 512)
  with pytest.raises(UserError, match="Tiny has no field 'batch_token'; closest: batch_tokens"):
    train(corpus, tmp_path / 'run', 0, set=['batch_token=512'])


def test_a_first_run_that_fails_leaves_no_log_directory(corpus, tmp_path):
  with pytest.raises(UserError, match='no vocabulary file'):
    train(corpus, tmp_path / 'run', 1, [f'Tiny.source_vocab = "{tmp_path}/nowhere.model"'])
  assert not (tmp_path / 'run').exists()
  for name in 'run', 'kept':
    with pytest.raises(UserError, match='vocabulary'):
      train(corpus, tmp_path / name, 1, ['Tiny.source_vocab_size = 5'])
    assert not (tmp_path / 'run').exists()
    (tmp_path / 'kept').mkdir(exist_ok=True)
  assert (tmp_path / 'kept').exists()


def test_a_warm_start_names_what_it_took_and_what_not(corpus, whole, tmp_path, capsys):
  train(
    corpus,
    tmp_path,
    0,
    [
      'Tiny.num_experts = 2',
      f'Tiny.source_vocab = "{whole}/vocab/source.model"',
      f'Tiny.target_vocab = "{whole}/vocab/target.model"',
    ],
    init_from=str(whole),
  )
  told = capsys.readouterr().err
  assert 'not taken: encoder/layer_00/moe/wi has shape (4, 32, 64) there, (2, 32, 64) here' in told
  assert f'weights taken from {whole}/checkpoints/step_' in told


def test_a_run_that_ended_before_its_first_checkpoint_begins_with_the_same_weights(corpus, whole, tmp_path, capsys):
  bindings = [f'Tiny.{side}_vocab = "{whole}/vocab/{side}.model"' for side in ('source', 'target')]
  train(corpus, tmp_path, 1, bindings, init_from=str(whole))
  begun = losses(tmp_path)
  shutil.rmtree(tmp_path / 'checkpoints')
  train(corpus, tmp_path, 1, bindings)
  told = capsys.readouterr().err
  assert f'has no checkpoint yet and was begun with --init_from={whole}/checkpoints/step_' in told
  assert losses(tmp_path) == begun


def test_an_average_is_not_trained(corpus, whole, tmp_path):
  out = str(tmp_path / 'average')
  averaging.average(RunDir(str(whole)), averaging.choose_steps(RunDir(str(whole)), 1), out)
  there = sorted(os.listdir(out))
  with pytest.raises(UserError, match=f'has no optimizer slots to go on from: .* --init_from={out} and another'):
    train(corpus, out, 9)
  assert sorted(os.listdir(out)) == there


def test_a_model_has_as_many_embeddings_as_the_vocabulary_that_is_given(corpus, whole, tmp_path, capsys):
  train(corpus, tmp_path, 0, [f'Tiny.source_vocab = "{whole}/vocab/target.model"'])
  assert 'target.model has; the configuration has 282' in capsys.readouterr().err
  assert json.loads((tmp_path / 'config.json').read_text())['values']['source_vocab_size'] == 280
  assert tensors(tmp_path, 0)['source_embedding/table'].shape == (280, 32)


def test_a_log_directory_must_be_writable(corpus, tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(UserError, match='--logdir=.*file must be a directory that can be written to'):
    train(corpus, tmp_path / 'file', 1)


def test_two_trainers_do_not_share_a_log_directory(corpus, whole):
  with RunDir(str(whole)).lock(), pytest.raises(UserError, match='one trainer at a time works in a log directory'):
    train(corpus, whole, 9)


def test_a_run_out_of_patience_stays_ended(corpus, whole, tmp_path, capsys):
  logdir = tmp_path / 'run'
  shutil.copytree(whole, logdir)
  noted = logdir / 'checkpoints' / 'step_00000008' / 'dev_loss.json'
  evaluation = {**json.loads(noted.read_text()), 'dev_loss': 1.0}  # which none comes below
  noted.write_text(json.dumps({name: value for name, value in evaluation.items() if name != 'crc32'}))
  bindings = ['Tiny.patience = 1', 'Tiny.eval_every = 1']
  train(corpus, logdir, 12, bindings)
  assert losses(logdir)[-1][0] == 9
  assert json.loads((logdir / 'finished.json').read_text())['reason'].startswith('no gain on dev')
  train(corpus, logdir, 12, bindings)
  assert losses(logdir)[-1][0] == 9
  assert 'step 9 of 12: nothing left to do (no gain on dev in 1 evaluation)' in capsys.readouterr().err


def test_embeddings_of_another_vocabulary_are_not_taken(corpus, whole, tmp_path, capsys):
  train(corpus, tmp_path, 0, ['Tiny.character_coverage = 0.98'], init_from=str(whole))
  assert 'not taken: source_embedding/table belongs to another vocabulary' in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_losses_bit_for_bit(corpus, tmp_path):
  def command(logdir):
    flags = [f'--gin_bindings={b}' for b in [*BINDINGS, 'Tiny.save_every = 3', 'Tiny.eval_every = 20']]
    return [
      sys.executable,
      '-m',
      'lingvo_moe.trainer',
      f'--model={MODEL}',
      f'--logdir={logdir}',
      f'--data_dir={corpus}',
      '--max_steps=40',
      *flags,
    ]

  subprocess.run(command(tmp_path / 'whole'), check=True, capture_output=True)
  killed = subprocess.Popen(command(tmp_path / 'killed'), stderr=subprocess.DEVNULL)
  while not (tmp_path / 'killed/checkpoints/step_00000006').exists():
    assert killed.poll() is None
    time.sleep(0.02)
  killed.kill()
  killed.wait()
  assert losses(tmp_path / 'killed')[-1][0] < 40
  subprocess.run(command(tmp_path / 'killed'), check=True, capture_output=True)
  assert losses(tmp_path / 'killed') == losses(tmp_path / 'whole')
  assert_same_state(tensors(tmp_path / 'killed', 40), tensors(tmp_path / 'whole', 40))
