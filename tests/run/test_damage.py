"""Damage to the files of a run: a UserError that names the file, or the same result; nothing else."""

import contextlib
import copy
import dataclasses
import json
import os
import pathlib
import shutil

import pytest
import reversed_corpus
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from whole_state import WholeState

import lingvo_moe
from lingvo_moe.config import configuration
from lingvo_moe.core.errors import UserError
from lingvo_moe.run import averaging, results, warm_start
from lingvo_moe.run.checkpoints import Checkpoints
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.runtime.local import LocalRuntime
from lingvo_moe.storage import json_files, log_directory
from lingvo_moe.storage.log_directory import LogDirectory
from lingvo_moe.tasks.lm.lm_config import LanguageConfig
from lingvo_moe.tasks.task import Outcome, task_of
from paper import recording

MODEL = 'mt.cldr.Tiny'
OLD = pathlib.Path(__file__).resolve().parent.parent / 'data' / 'run_of_3fe42dc' / 'log'
SIZES = dict(
  source_vocab_size=282, target_vocab_size=280, max_length=32, encoder_layers=1, decoder_layers=1, moe_every=1
)


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
  return reversed_corpus.write(tmp_path_factory.mktemp('corpus'), held_out=5)


@pytest.fixture(scope='module')
def begun(corpus, tmp_path_factory):
  """(run, runtime, state) of a run that was begun and not trained; its checkpoint is of step 1. Read-only."""
  run = RunDir(str(tmp_path_factory.mktemp('run') / 'log'))
  config = run.begin(MODEL, configuration.resolve(MODEL, data_dir=str(corpus), **SIZES))
  runtime = LocalRuntime(config.program())
  runtime.init()
  state = {**runtime.state(), 'step': tf.constant(1, tf.int64)}
  run.checkpoints().save(WholeState(state))
  run.checkpoints().note_dev_loss(1, 1.0)
  return run, runtime, state


@pytest.fixture
def run(begun, tmp_path):
  """A copy of that run to work on."""
  shutil.copytree(begun[0].path, tmp_path / 'log')
  return RunDir(str(tmp_path / 'log'))


def flip(path, at, bit=0):
  data = pathlib.Path(path).read_bytes()
  at %= len(data)
  pathlib.Path(path).write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])


# Vocabularies.


@pytest.mark.parametrize('side', ['source', 'target'])
@pytest.mark.parametrize('at', [100, 5000, -3])
def test_a_vocabulary_that_is_not_the_runs_is_refused_by_all_who_open_it(run, corpus, tmp_path, side, at):
  config = configuration.resolve(MODEL, data_dir=str(corpus), **SIZES)
  flip(run.file('vocab', f'{side}.model'), at)
  openers = (
    lambda: run.load(),  # decoder, translate and serve
    lambda: run.begin(MODEL, config),  # the trainer
    lambda: lingvo_moe.load(run.path, set_threads=False),
    lambda: averaging.average(run, [1], str(tmp_path / 'out')),
    lambda: warm_start._task_of(warm_start.find(run.path)),
  )
  for opened in openers:
    with pytest.raises(UserError, match=rf'{side}.model is not the file that the run began with .*: restore it from a'):
      opened()


def test_a_run_of_an_earlier_version_has_no_fingerprint_until_it_goes_on(run, corpus):
  path = pathlib.Path(run.config_file)
  read = json.loads(path.read_text())
  path.write_text(json.dumps({'model': read['model'], 'values': read['values']}))
  run.load()
  run.begin(MODEL, run.load()[1])
  assert json.loads(path.read_text())['files'] == read['files'] and len(read['files']) == 2


def test_settings_of_a_vocabulary_that_are_lost_do_not_stop_a_run(run, corpus, tmp_path, capsys):
  config = configuration.resolve(MODEL, data_dir=str(corpus), **SIZES)
  for text in ('', '[]', '{"pairs": ' * 5000):
    pathlib.Path(run.file('vocab', 'source.json')).write_text(text)
    assert run.begin(MODEL, config) == run.load()[1]
    assert 'source.json is not ' in capsys.readouterr().err
  first = RunDir(str(tmp_path / 'first'))  # one that was killed, or had no room, before it was begun
  shutil.copytree(run.vocab_dir, first.vocab_dir)
  flip(first.file('vocab', 'target.model'), 5000)
  assert configuration.differences(first.begin(MODEL, config), run.load()[1], ('source_vocab', 'target_vocab')) == []
  assert 'target.model is not as it was made; it is made again' in capsys.readouterr().err
  for name in ('source.model', 'target.model', 'source.json', 'target.json'):
    vocabs = [pathlib.Path(r.file('vocab', name)).read_bytes() for r in (first, RunDir(run.path))]
    assert vocabs[0] == vocabs[1] or name == 'source.json'


def test_another_vocabulary_does_not_take_the_place_of_a_lost_copy(run, corpus, tmp_path):
  other = shutil.copy(run.file('vocab', 'target.model'), tmp_path / 'other.model')
  os.remove(run.file('vocab', 'source.model'))
  config = configuration.resolve(MODEL, data_dir=str(corpus), source_vocab=str(other), **SIZES)
  with pytest.raises(UserError, match="source.model, the run's copy of source_vocab, is gone: restore it"):
    run.begin(MODEL, config)
  assert not os.path.exists(run.file('vocab', 'source.model'))


# Checkpoints.


@pytest.mark.parametrize('dtype', [tf.int32, tf.bool, tf.complex64, tf.float64, tf.string, tf.float16])
def test_a_tensor_of_another_type_is_refused_by_name(begun, tmp_path, dtype):
  run, runtime, state = begun
  name = (
    'encoder/layer_00/moe/gate' if 'encoder/layer_00/moe/gate' in state['weights'] else next(iter(state['weights']))
  )
  value = state['weights'][name]
  other = tf.strings.as_string(value) if dtype == tf.string else tf.cast(value, dtype)
  copied = RunDir(str(tmp_path / 'log'))
  shutil.copytree(run.path, copied.path, ignore=shutil.ignore_patterns('step_*'))
  checkpoints = copied.checkpoints()
  checkpoints.save(WholeState({**state, 'weights': {**state['weights'], name: other}}))
  config = copied.load()[1]
  takers = (
    lambda: checkpoints.load_weights(runtime, 1),  # decoder, translate, serve, load
    lambda: warm_start.resume(runtime, checkpoints, 1),  # trainer
    lambda: warm_start.take_weights(runtime, copied.path, task_of(config)),  # --init_from
    lambda: averaging.average(copied, [1], str(tmp_path / 'out')),
  )
  for take in takers:
    with pytest.raises(UserError, match=rf"'{name}' has type {dtype.name}, but a model has float32 there"):
      take()


def test_a_dev_loss_that_cannot_be_read_is_named_and_chooses_no_other_checkpoint(run):
  path = os.path.join(os.path.dirname(run.checkpoints().path(1)), 'dev_loss.json')
  good = pathlib.Path(path).read_text()
  for text in (good.replace('1.0', '9.0'), '', '{"dev_loss": "low"}', 'null', '[' * 9000):
    pathlib.Path(path).write_text(text)
    with pytest.raises(UserError, match='dev_loss.json is not .*: restore it from a copy, or remove it'):
      run.checkpoints().best()
  pathlib.Path(path).write_text('{"dev_loss": 2}')  # of an earlier version
  assert run.checkpoints().best()[:2] == (1, 2.0)


# Small files.

anything = st.recursive(
  st.none()
  | st.booleans()
  | st.integers(-(10**30), 10**30)
  | st.floats()
  | st.text(st.characters(exclude_categories=[]), max_size=8)
  | st.sampled_from([10_000_000, 0, -1, '/dev/zero', '../../etc/passwd', 'mt.cldr.Tiny', 'os.path', 'a\nb']),
  lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
  max_leaves=4,
)


def places(value, path=()):
  """Paths of all values within a value."""
  yield path
  items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
  for key, inner in items:
    yield from places(inner, (*path, key))


@st.composite
def mutated(draw, value):
  """JSON text of a value of which a part is another, or of which bytes were changed."""
  if draw(st.booleans()):
    path = draw(st.sampled_from(list(places(value))))
    new = draw(anything)
    value = copy.deepcopy(value)
    if path:
      at = value
      for key in path[:-1]:
        at = at[key]
      at[path[-1]] = new
    else:
      value = new
    return json.dumps(value).encode()
  data = bytearray(json.dumps(value).encode())
  for at, byte in draw(st.lists(st.tuples(st.integers(0, len(data) - 1), st.integers(0, 255)), min_size=1, max_size=3)):
    data[at] = byte
  return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


def one_line(read):
  """Runs a reader, which may raise UserError of one short line and nothing else."""
  try:
    read()
  except UserError as e:
    assert '\n' not in str(e) and len(str(e)) < 2000, str(e)


quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
CONFIG = json.loads((OLD / 'config.json').read_text())
LINE = {'step': 3, 'time': 'T', 'seconds_so_far': 1.5, 'target_tokens_so_far': 7, 'loss': 2.5, 'dev_loss': 2.0}
LINE['dev_loss_by_pair'] = {'xx-en': 2.0}
SCORES = {'step': 1, 'settings': {'beam_size': 4, 'text': 'ab', 'checkpoint': 'cd'}, 'texts': {'xx-en': 'ab'}}
SCORES |= {
  'beside': ['xx-en.src'],
  'pairs': {'xx-en': {'sentences': 2, 'bleu': 5.0, 'chrf': 10.0}},
  'mean': {'chrf': 10.0},
}


@given(mutated(CONFIG))
@quick
def test_any_configuration_is_read_or_refused(tmp_path_factory, text):
  run = RunDir(str(tmp_path_factory.mktemp('run')))
  pathlib.Path(run.config_file).write_bytes(text)
  one_line(run.load)
  one_line(lambda: LogDirectory.read(run.path).configured())


@given(mutated(LINE), mutated({'step': 0, 'software': {'python': '3'}, 'examples': {'xx-en': 5}}), st.booleans())
@quick
def test_any_line_of_a_log_is_read_or_refused(tmp_path_factory, line, start, is_last):
  folder = tmp_path_factory.mktemp('run')
  (folder / 'config.json').write_text(json.dumps(CONFIG))
  (folder / 'train.jsonl').write_bytes(b'{"step": 1}\n' + line + (b'' if is_last else b'\n{"step": 4}\n'))
  (folder / 'environment.jsonl').write_bytes(start + b'\n')
  one_line(lambda: log_directory.dev_loss_parts(str(folder), 'pair'))
  one_line(lambda: recording.new_records(LogDirectory.read(str(folder)), []))
  one_line(lambda: json_files.keep_lines_up_to(str(folder / 'environment.jsonl'), 3))
  kind = json_files.optional(json_files.NUMBER)
  one_line(lambda: json_files.keep_lines_up_to(str(folder / 'train.jsonl'), 3, seconds_so_far=kind))


class Job:
  """A job of the decoder that shows chrF."""

  summary_file, suffix, settings, texts = 'scores.json', '.hyp', {'beam_size': 4, 'text': 'ab'}, {'xx-en': 'ab'}

  def report(self, summary):
    return ''.join(f'{name} {s["chrf"]:.1f}' for name, s in summary['pairs'].items())


def test_a_translation_that_was_changed_is_made_again(tmp_path, capsys):
  found = results.Results(str(tmp_path), Job(), str(tmp_path), Checkpoints(str(tmp_path)).fingerprint)
  summary = {'pairs': {'xx-en': {'sentences': 1, 'chrf': 1.0}}}
  os.mkdir(found.folder(1))
  found.write(1, found.settings(1), Outcome({'xx-en': ['one']}, {}, summary, {'xx-en.src': ['eno']}))
  assert found.done(1)['pairs'] == summary['pairs']
  for name in ('xx-en.hyp', 'xx-en.src'):
    flip(os.path.join(found.folder(1), name), 1)
    assert found.done(1) is None
    assert f'{name} is not as the decoder wrote it: the step is decoded again' in capsys.readouterr().err
    flip(os.path.join(found.folder(1), name), 1)
  assert found.done(1) is not None


def test_a_folder_that_a_user_named_keeps_other_files_and_results_of_other_checkpoints(tmp_path):
  of = lambda run: results.Results(str(tmp_path / 'out'), Job(), str(tmp_path / run), lambda step: run, given=True)
  (tmp_path / 'out' / 'step_1').mkdir(parents=True)
  (tmp_path / 'out' / 'step_1' / 'mine.hyp').write_text('mine')
  summary = {'pairs': {'xx-en': {'sentences': 1, 'chrf': 1.0}}}
  of('a').clear(1, of('a').settings(1))
  of('a').write(1, of('a').settings(1), Outcome({'xx-en': ['one']}, {}, summary))
  with pytest.raises(UserError, match="holds results made with checkpoint='a', now 'b': give --overwrite"):
    of('b').clear(1, of('b').settings(1))
  dataclasses.replace(of('b'), overwrite=True).clear(1, of('b').settings(1))
  assert os.listdir(tmp_path / 'out' / 'step_1') == ['mine.hyp']


@given(mutated(SCORES))
@quick
def test_any_summary_is_shown_or_made_again(tmp_path_factory, text):
  folder = tmp_path_factory.mktemp('run')
  found = results.Results(str(folder), Job(), str(folder), Checkpoints(str(folder)).fingerprint, overwrite=True)
  (folder / 'step_1').mkdir()
  (folder / 'keep').write_text('mine')
  (folder / 'step_1' / 'scores.json').write_bytes(text)
  with open(os.devnull, 'w') as null, contextlib.redirect_stderr(null):
    one_line(lambda: (summary := found.done(1)) and found.job.report(summary))
    one_line(lambda: found.clear(1, found.settings(1)))
  one_line(lambda: LogDirectory(str(folder), 'm', {}).summary('test', 1))
  assert (folder / 'keep').exists()


def test_a_vocabulary_of_characters_is_made_again_unless_the_run_has_begun_with_it(tmp_path, capsys):
  config = LanguageConfig(data_dir=str(tmp_path), vocab='char')
  for split in ('train', 'dev'):
    (tmp_path / f'{split}.txt').write_text('abcü\n', encoding='utf-8')
  folder = str(tmp_path / 'vocab')
  made = task_of(config).prepare(folder, resumed=False)
  path = pathlib.Path(made.vocab)
  good = path.read_bytes()
  for bad in (b'', b'[]', good.replace(b'b', b'd')):
    path.write_bytes(bad)
    with pytest.raises(UserError, match='characters.json is not .*: give one that the trainer wrote'):
      task_of(config).prepare(folder, resumed=True)
    assert task_of(config).prepare(folder, resumed=False) == made and path.read_bytes() == good
    assert 'it is made again' in capsys.readouterr().err
