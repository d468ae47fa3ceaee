"""Log directory: what a stranger's may hold, and what a run that cannot begin leaves."""

import contextlib
import dataclasses
import os
import types

import pytest

from lingvo_moe import decoder
from lingvo_moe.config import configuration
from lingvo_moe.core.errors import UserError
from lingvo_moe.run import environment, results
from lingvo_moe.run.reporting import EventFile, RoutingLog, TrainLog
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.storage import json_files
from lingvo_moe.storage.files import lock
from lingvo_moe.tasks.task import Task, task_of

MODEL = 'mt.cldr.Tiny'


@pytest.fixture
def victim(tmp_path):
  """A file that no link may make us change."""
  path = tmp_path / 'victim'
  path.write_text('precious')
  yield path
  assert path.read_text() == 'precious'


@pytest.fixture
def run(tmp_path):
  (tmp_path / 'log' / 'vocab').mkdir(parents=True)
  return RunDir(str(tmp_path / 'log'))


def save(run, **values):
  configuration.save(MODEL, dataclasses.replace(configuration.resolve(MODEL), **values), run.config_file)


WRITERS = {
  '.lock': lambda path: RunDir(path).lock(),
  'vocab/.lock': lambda path: lock(f'{path}/vocab').__enter__(),
  'train.jsonl': lambda path: TrainLog(path, task_of(configuration.resolve(MODEL)), 0),
  'environment.jsonl': lambda path: environment.record(path, 0),
  'routing.jsonl': lambda path: RoutingLog(path, max_steps=1, first_step=0).step(1, {'layer': [1.0]}),
}


@pytest.mark.parametrize('name', WRITERS)
def test_a_link_to_a_file_that_is_not_there_is_refused(run, tmp_path, name):
  os.symlink(tmp_path / 'new', run.file(name))

  with pytest.raises(UserError, match=f'{name} must be a file of its own; saw a symbolic link to .*new: remove it'):
    WRITERS[name](run.path)

  assert not os.path.lexists(tmp_path / 'new')


@pytest.mark.parametrize('name', WRITERS)
def test_a_file_that_a_link_points_to_is_not_written(run, victim, name):
  os.symlink(victim, run.file(name))

  with contextlib.suppress(UserError):
    WRITERS[name](run.path)  # a log that is there is moved away, the link and not the file

  assert os.path.basename(name) != '.lock' or os.path.islink(run.file(name))


@pytest.mark.parametrize('name', ['.writable', 'config.json.partial'])
def test_a_link_under_a_temporary_name_is_not_followed(run, victim, name):
  os.symlink(victim, run.file(name))

  run.lock().close()
  save(run)

  assert run.load()[0] == MODEL


@pytest.mark.parametrize('name', ['vocab', 'cache', 'checkpoints', 'checkpoints/step_00000004'])
def test_a_trainer_does_not_write_through_a_link_in_place_of_a_folder(run, tmp_path, name):
  (tmp_path / 'mine').mkdir()
  os.rmdir(run.vocab_dir)
  os.makedirs(os.path.dirname(run.file(name)), exist_ok=True)
  os.symlink(tmp_path / 'mine', run.file(name))
  save(run)

  with pytest.raises(UserError, match=f'writes in its log directory alone; .*{name} is a link to .*mine: remove it'):
    run.begin(MODEL, configuration.resolve(MODEL))

  assert not os.listdir(tmp_path / 'mine')


@pytest.mark.parametrize('name', ['decode', 'decode/test', 'decode/test/step_6'])
def test_a_decoder_does_not_write_through_a_link_in_place_of_a_folder(run, tmp_path, name):
  (tmp_path / 'mine').mkdir()
  os.makedirs(os.path.dirname(run.file(name)), exist_ok=True)
  os.symlink(tmp_path / 'mine', run.file(name))
  home, fingerprint = run.path, run.checkpoints().fingerprint
  job = types.SimpleNamespace(suffix='.hyp', summary_file='scores.json', settings={}, texts={})

  with pytest.raises(UserError, match='a link leads from .*step_6 to .*mine.*: remove it, or give --out=FOLDER'):
    results.Results(run.file('decode', 'test'), job, home, fingerprint).clear(6, {})

  assert not os.listdir(tmp_path / 'mine')
  results.Results(str(tmp_path / 'mine'), job, home, fingerprint, given=True).clear(6, {})
  assert os.listdir(tmp_path / 'mine') == ['step_6']


def test_a_run_that_maps_a_split_to_other_files_is_decoded_only_where_their_folder_is_given(run):
  config = configuration.resolve(MODEL)
  mapped = dataclasses.replace(config, split_files=(('test', 'id_rsa'),), data_dir='/home/me/.ssh')
  check = lambda config, **given: decoder._check_split(run, config, decoder.Options(run.path, **given))
  with pytest.raises(
    UserError, match=r'maps test to the files id_rsa\.\* in /home/me/.ssh, .*: give --data_dir=/home/me'
  ):
    check(mapped)
  check(mapped, split='dev')
  check(mapped, data_dir='/home/me/.ssh')
  check(configuration.resolve('mt.multi30k.Dense'))  # as the model itself names them


def test_a_lock_that_is_there_is_taken_as_it_is(run):
  run.lock().close()
  held = run.lock()

  with pytest.raises(UserError, match='one trainer at a time'):
    run.lock()
  held.close()


@pytest.mark.parametrize(
  'given', ['/etc/hostname', '../elsewhere.model', 'vocab/../../elsewhere.model', 'vocab/linked']
)
@pytest.mark.parametrize('field', ['source_vocab', 'target_vocab'])
def test_a_vocabulary_outside_the_log_directory_is_refused_unless_told(run, given, field):
  os.symlink('/etc/hostname', run.file('vocab', 'linked'))
  save(run, **{'source_vocab': 'vocab/source.model', 'target_vocab': 'vocab/target.model', field: given})

  with pytest.raises(UserError, match='must name vocabularies in its own log directory; saw .* with --vocab_outside'):
    run.load()

  assert getattr(RunDir(run.path, vocab_outside=True).load()[1], field) == os.path.join(run.path, given)


def test_a_vocabulary_in_the_log_directory_is_found_wherever_it_is_linked_from(run, tmp_path):
  save(run, source_vocab='vocab/source.model', target_vocab='vocab/source.model')
  os.symlink(run.path, tmp_path / 'latest')

  _, config = RunDir(str(tmp_path / 'latest')).load()

  assert config.source_vocab == str(tmp_path / 'latest' / 'vocab' / 'source.model')


def test_a_log_directory_is_not_named_by_a_scheme(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)

  with pytest.raises(UserError, match="saw 's3://bucket/run': mount it"):
    RunDir('s3://bucket/run').lock()

  assert not os.listdir(tmp_path)


@dataclasses.dataclass(frozen=True)
class Unready:
  """Configuration whose preparation ends early."""

  error: BaseException
  task_class: str = f'{__name__}.UnreadyTask'


class UnreadyTask(Task):
  """Makes a folder, then ends."""

  def prepare(self, folder, begun):
    with lock(folder):
      raise self.config.error


@pytest.mark.parametrize(
  'error', [UserError('no'), OSError(28, 'No space left on device'), KeyboardInterrupt(), SystemExit(143)]
)
def test_a_first_run_that_cannot_begin_leaves_no_log_directory(tmp_path, error):
  new, existing = RunDir(str(tmp_path / 'new')), RunDir(str(tmp_path / 'existing'))
  os.mkdir(existing.path)

  for run in (new, existing):
    with pytest.raises(type(error)), run.locked():
      run.begin(MODEL, Unready(error))

  assert not os.path.exists(new.path) and os.path.exists(existing.path)


@pytest.mark.parametrize('name', ['lr[1e-3]', 'a\\b', 'x\udcff'])
def test_a_name_under_which_tensorflow_could_not_read_is_refused_before_anything_is_made(tmp_path, name):
  with pytest.raises(UserError, match='choose another name'):
    RunDir(str(tmp_path / name)).lock()
  assert not os.listdir(tmp_path)


def test_checkpoints_without_the_configuration_they_are_of_are_not_gone_on_from(run):
  os.makedirs(run.file('checkpoints', 'step_00000003'))
  with pytest.raises(UserError, match=r'has checkpoints and no config\.json'):
    run.begin(MODEL, configuration.resolve(MODEL))


def test_a_folder_of_checkpoints_that_is_not_mounted_is_not_taken_for_none(run, tmp_path):
  os.symlink(tmp_path / 'gone', run.file('checkpoints'))
  with pytest.raises(UserError, match='a link to what is not there: mount it'):
    run.checkpoints().latest()


def test_logs_of_lost_checkpoints_are_all_kept(run, capsys):
  for number in range(3):
    with open(run.file('train.jsonl'), 'w') as f:
      f.write(f'{{"step": {number + 1}}}\n')
    json_files.keep_lines_up_to(run.file('train.jsonl'), 0)
    assert 'train.jsonl is kept as ' in capsys.readouterr().err
  kept = sorted(name for name in os.listdir(run.path) if '.old' in name)
  assert kept == ['train.jsonl.old', 'train.jsonl.old.2', 'train.jsonl.old.3']


def test_an_event_file_that_cannot_be_written_is_an_error_of_the_system(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(OSError, match='.') as raised:
    EventFile(str(tmp_path / 'file' / 'events')).write(1, {'loss': 1.0})
  assert raised.value.filename == str(tmp_path / 'file' / 'events')
