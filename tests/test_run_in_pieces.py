"""A run in pieces: its values, rates and checkpoints are those of the whole, whether flags are typed again or not."""

import json
import os
import types

import pytest
import reversed_corpus

from lingvo_moe import trainer
from lingvo_moe.config import configuration, fields
from lingvo_moe.core.errors import UserError
from lingvo_moe.optim import schedule
from lingvo_moe.run import advice
from lingvo_moe.run.rundir import RunDir

pytestmark = pytest.mark.usefixtures('one_trace')

MODEL = 'mt.cldr.Tiny'
SIZES = ['source_vocab_size=282', 'target_vocab_size=280', 'encoder_layers=1', 'decoder_layers=1', 'moe_every=1']
SIZES += ['experts_in=decoder']
SCHEDULES = ('inverse_sqrt', 'warmup_inverse_sqrt', 'warmup_linear', 'cosine', 'wsd', 'constant')


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
  return str(reversed_corpus.write(tmp_path_factory.mktemp('corpus'), held_out=20))


def train(logdir, **values):
  return trainer.train(trainer.Options(logdir=str(logdir), **values))


def recorded(logdir):
  return json.loads((logdir / 'config.json').read_text())


@pytest.mark.parametrize('again', ['all', 'some', 'none'])
@pytest.mark.parametrize('name', SCHEDULES)
def test_values_and_rates_of_pieces_are_those_of_the_whole(tmp_path, name, again):
  """The kind: a value that a run was given, and that a restart takes back."""
  given = [f'schedule={name}', 'learning_rate=0.5', 'keep_checkpoints=10', 'patience=5', 'max_steps=40', 'save_every=3']
  given += [] if name == 'constant' else ['warmup_steps=8']
  whole = configuration.resolve(MODEL, settings=given)
  rates = [schedule.rate(whole.program().schedule, t) for t in range(1, 41)]
  path, piece, got = str(tmp_path / 'config.json'), whole, []
  for begin, end in ((0, 1), (1, 8), (8, 23), (23, 40)):  # within the warm-up, at its end, level, and falling
    got += [schedule.rate(piece.program().schedule, t) for t in range(begin + 1, end + 1)]
    configuration.save(MODEL, piece, path)
    typed = {'all': given, 'some': given[::2], 'none': []}[again]
    piece = configuration.resolve(MODEL, settings=typed, base=configuration.load(path)[1])
    assert piece == whole
  assert got == rates


def test_a_restart_keeps_what_the_run_was_given_and_says_what_changes(corpus, tmp_path, capsys):
  given = ['keep_checkpoints=10', 'patience=5', 'save_every=1', 'eval_every=50']
  (tmp_path / 'a.gin').write_text('Tiny.log_every = 2\n')
  gin = [str(tmp_path / 'a.gin')]
  begin = dict(model=MODEL, data_dir=corpus, max_steps=4)
  assert train(tmp_path / 'run', **begin, set=[*SIZES, 'num_experts=2', *given], gin_file=gin) is None
  values = recorded(tmp_path / 'run')['values']
  capsys.readouterr()
  assert train(tmp_path / 'run', model=MODEL, max_steps=5) is None
  assert recorded(tmp_path / 'run')['values'] == {**values, 'max_steps': 5}
  assert (values['keep_checkpoints'], values['patience'], values['log_every']) == (10, 5, 2)
  assert sorted(os.listdir(tmp_path / 'run' / 'checkpoints')) == [f'step_{step:08d}' for step in range(1, 6)]
  said = capsys.readouterr().err
  assert f'going on with {MODEL} as {tmp_path}/run/config.json has it' in said
  assert 'of the run change: max_steps=4, now 5\n' in said
  assert train(tmp_path / 'run', **begin, set=['keep_checkpoints=9', 'max_steps=5']) is None
  assert 'of the run change: max_steps=5, now 4; keep_checkpoints=10, now 9\n' in capsys.readouterr().err
  with pytest.raises(UserError, match='holds a run with batch_tokens=512, now 256: a run goes on as it began'):
    train(tmp_path / 'run', model=MODEL, set=['batch_tokens=256'])
  with pytest.raises(UserError, match=f'holds a run of {MODEL}, not of --model=mt.m4mini.Tiny: leave'):
    train(tmp_path / 'run', model='mt.m4mini.Tiny')


def test_a_new_run_with_the_values_of_another_chooses_again_what_that_one_chose(corpus, tmp_path):
  """The kind: a number that a run chose, taken for one that it was given."""
  sizes = [*SIZES, 'gate=top_k', 'choices=2', 'warmup_steps=None', 'eval_every=None']
  train(tmp_path / 'two', model=MODEL, data_dir=corpus, max_steps=0, set=sizes)
  two = recorded(tmp_path / 'two')
  assert two['values']['capacity_factor'] == 2.0
  assert two['left_open'] == {'capacity_factor': 'auto', 'warmup_steps': None, 'eval_every': None}
  train(tmp_path / 'eight', init_from=str(tmp_path / 'two'), max_steps=0, set=['choices=8'])
  train(tmp_path / 'back', init_from=str(tmp_path / 'eight'), max_steps=0, set=['choices=2', 'eval_every=7'])
  eight, back = (recorded(tmp_path / name) for name in ('eight', 'back'))
  assert [run['values']['capacity_factor'] for run in (eight, back)] == [8.0, 2.0]
  assert RunDir(str(tmp_path / 'eight')).load()[1].moe().capacity_factor == 8.0
  assert back['left_open'] == {'capacity_factor': 'auto', 'warmup_steps': None} and back['values']['eval_every'] == 7
  train(tmp_path / 'two', model=MODEL, max_steps=0, set=['capacity_factor=auto', 'warmup_steps=None'])
  assert recorded(tmp_path / 'two') == two


def test_a_run_of_an_earlier_version_keeps_the_number_that_it_recorded(corpus, tmp_path):
  train(tmp_path / 'run', model=MODEL, data_dir=corpus, max_steps=0, set=SIZES)
  written = recorded(tmp_path / 'run')
  written = {'model': MODEL, 'values': {**written['values'], 'capacity_factor': 2.5}, 'files': written['files']}
  (tmp_path / 'run' / 'config.json').write_text(json.dumps(written))
  train(tmp_path / 'run', model=MODEL, max_steps=0, set=SIZES)
  again = recorded(tmp_path / 'run')
  assert again['values'] == written['values'] and 'left_open' not in again
  assert RunDir(str(tmp_path / 'run')).load_open()[1].capacity_factor == 2.5


def test_what_a_run_left_open_is_read_where_this_version_leaves_it_open(tmp_path):
  """The kind: a file that another version wrote, or that was edited by hand."""
  path, config = str(tmp_path / 'config.json'), configuration.resolve(MODEL)
  odd = {'foo': 1, 'capacity_factor': -3, 'max_steps': [], 'warmup_steps': None}
  configuration.save(MODEL, config, path, left_open=odd)
  assert configuration.left_open(path, type(config)) == {'warmup_steps': None}


@pytest.mark.parametrize('name', SCHEDULES)
def test_another_max_steps_is_said_with_both_rates_where_the_schedule_ends_there(name):
  config = lambda steps: configuration.resolve(MODEL, settings=[f'schedule={name}', 'learning_rate=1'], max_steps=steps)
  said = []
  group = types.SimpleNamespace(say=said.append)
  trainer.say_changes(config(400), config(800), 400, group)
  assert said[0] == 'of the run change: max_steps=400, now 800'
  of_ends = {'warmup_linear': ('0.00990', 0.798, 0), 'cosine': ('0', 0.904, 0), 'wsd': ('0', 1, 0)}
  assert len(said) == 1 + (name in of_ends)
  if name in of_ends:
    now = schedule.rate(config(800).program().schedule, 401)
    then = schedule.rate(config(400).program().schedule, 400)
    assert said[1] == (
      f'schedule={name} ends at max_steps, 800 and no longer 400: the learning rate was {then:.3g} at step 400, and is '
      f'{now:.3g} at step 401, where it would have been 0'
    )
    assert now == pytest.approx(of_ends[name][1], abs=0.002) and then < 0.011
  assert 'run that goes on has other rates' in fields.specs(type(config(1)))['max_steps'].meaning
  said.clear()
  trainer.say_changes(config(400), config(400), 400, group)
  assert said == []


def test_a_warm_up_that_leaves_no_decay_is_said_before_the_first_step():
  config = configuration.resolve(MODEL, settings=['schedule=cosine', 'learning_rate=1'], max_steps=6)
  said = []
  of = lambda config: types.SimpleNamespace(
    config=config,
    runtime=types.SimpleNamespace(program=config.program()),
    train_input=types.SimpleNamespace(steps_per_epoch=None),
    log=types.SimpleNamespace(say=said.append),
    reason_to_end=lambda: '',
  )
  advice.Advice(of(config)).say_schedule()
  assert said == [
    'schedule=cosine with max_steps=6 and warmup_steps=300: the warm-up of 300 steps leaves none to fall: the rate '
    'rises to 0.02 at step 6, the last, 0.02 of its peak. Lower warmup_steps in a new run, or raise max_steps'
  ]
  advice.Advice(of(configuration.resolve(MODEL, max_steps=6))).say_schedule()
  assert len(said) == 1
