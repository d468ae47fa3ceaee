"""A run of several processes: the numbers of one device, and what happens when a process is lost."""

import contextlib
import io
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import reversed_corpus
import tensorflow as tf
import untrained_run
from text_lines import records, write

from lingvo_moe import decoder, translate
from lingvo_moe.cli.commands import launch as launcher
from lingvo_moe.run import results
from lingvo_moe.run.rundir import RunDir

ROOT = pathlib.Path(__file__).resolve().parent.parent
BINDINGS = (
  'source_vocab_size = 282',
  'target_vocab_size = 280',
  'eval_every = 4',
  'encoder_layers = 1',
  'decoder_layers = 1',
  'moe_every = 1',
  'boundaries = (64,)',
  'residual_dropout = 0.1',
)
STEPS = 24
PYTHON = sys.executable


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
  folder, rng = tmp_path_factory.mktemp('corpus'), random.Random(0)
  for split, lines in (('train', 300), ('dev', 8)):
    targets = reversed_corpus.draw(rng, lines, ['one', 'two', 'three', 'four', 'five'])
    reversed_corpus.write_lines(folder / 'xx-en', split, targets)
  return folder


def command(corpus, logdir, *more):
  bindings = [f'--gin_bindings=Tiny.{binding}' for binding in BINDINGS]
  trainer = [PYTHON, '-m', 'lingvo_moe.trainer', '--model=mt.cldr.Tiny', f'--data_dir={corpus}', f'--logdir={logdir}']
  return [*trainer, f'--max_steps={STEPS}', *bindings, *more]


def losses(logdir):
  lines = records(logdir / 'train.jsonl')
  return {line['step']: line['loss'] for line in lines if 'loss' in line}


def children(pid):
  return [int(p) for p in pathlib.Path(f'/proc/{pid}/task/{pid}/children').read_text().split()]


@pytest.mark.slow
def test_a_lost_process_ends_the_others_and_any_devices_go_on_to_the_same_numbers(corpus, tmp_path):
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  subprocess.run(command(corpus, whole), check=True, timeout=600)

  mesh = ('--runtime=spmd', '--mesh=data:2,expert:2')
  launch = subprocess.Popen(
    [PYTHON, '-m', 'lingvo_moe.cli.commands.main', 'launch', '2', '--', *command(corpus, broken, *mesh)],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  deadline = time.monotonic() + 600
  while not (broken / 'checkpoints' / 'step_00000008').exists():
    assert launch.poll() is None and time.monotonic() < deadline
    time.sleep(0.05)
  os.kill(children(launch.pid)[1], signal.SIGKILL)
  killed = time.monotonic()
  said, _ = launch.communicate(timeout=180)
  print(f'ended {time.monotonic() - killed:.1f} s after the kill:\n{said}')
  assert time.monotonic() - killed < 120
  assert launch.returncode != 0
  assert 'process 1 of 2 was lost (killed by SIGKILL): the others cannot go on without it' in said
  assert sorted(os.listdir(broken / 'checkpoints'))[-1] <= f'step_{STEPS - 1:08d}'

  for name, flags in (('one', ()), ('four', ('--runtime=spmd', '--mesh=expert:4'))):
    logdir = tmp_path / name
    shutil.copytree(broken, logdir)
    subprocess.run(command(corpus, logdir, *flags), check=True, timeout=600)
    expected, got = losses(whole), losses(logdir)
    assert got.keys() == expected.keys() == set(range(1, STEPS + 1))
    np.testing.assert_allclose([got[s] for s in expected], list(expected.values()), rtol=1e-4)


def slurm(count, command, **options):
  """Starts a command as srun does, with nothing but its variables; returns the processes."""
  node = {'SLURM_STEP_NODELIST': 'localhost', 'SLURM_NTASKS': str(count), 'SLURM_JOB_ID': str(_free_job())}
  return [
    subprocess.Popen(
      [*command, '--distributed=auto'],
      env={**os.environ, **node, 'SLURM_PROCID': str(i), 'SLURM_LOCALID': str(i)},
      stderr=subprocess.PIPE,
      text=True,
      **options,
    )
    for i in range(count)
  ]


def _free_job():
  """Number of a job whose port, as JAX chooses it, is free."""
  while True:
    job = random.randrange(10**6)
    with contextlib.suppress(OSError), socket.create_server(('', job % 2**12 + 2**16 - 2**12)):
      return job


MESH_OF_TWO = ('--runtime=spmd', '--mesh=data:2')


@pytest.mark.slow
def test_processes_that_slurm_started_train_to_the_losses_of_launched_ones(corpus, tmp_path):
  subprocess.run(
    [
      PYTHON,
      '-m',
      'lingvo_moe.cli.commands.main',
      'launch',
      '2',
      '--',
      *command(corpus, tmp_path / 'launched', *MESH_OF_TWO),
    ],
    check=True,
    timeout=300,
  )
  started = slurm(2, command(corpus, tmp_path / 'slurm', *MESH_OF_TWO))
  said = [process.communicate(timeout=300)[1] for process in started]
  assert [process.returncode for process in started] == [0, 0], said
  assert f'trained to step {STEPS}' in said[0] and 'trained to' not in said[1]
  expected, got = losses(tmp_path / 'launched'), losses(tmp_path / 'slurm')
  print('launched', expected, 'slurm', got, sep='\n')
  assert got == expected and set(got) == set(range(1, STEPS + 1))


@pytest.mark.slow
def test_a_signal_to_one_process_saves_the_same_step_of_all_and_ends_them(corpus, tmp_path):
  logdir = tmp_path / 'log'
  endless = ('--max_steps=100000', '--gin_bindings=Tiny.eval_every = 1000', '--gin_bindings=Tiny.save_every = 5')
  started = slurm(2, command(corpus, logdir, *MESH_OF_TWO, *endless))
  deadline = time.monotonic() + 200
  while not (logdir / 'checkpoints' / 'step_00000010').exists():
    assert all(process.poll() is None for process in started) and time.monotonic() < deadline
    time.sleep(0.05)
  started[1].terminate()
  signalled = time.monotonic()
  said = [process.communicate(timeout=100)[1] for process in started]
  print(f'ended {time.monotonic() - signalled:.1f} s after the signal')
  assert [process.returncode for process in started] == [143, 143], said
  last = max(losses(logdir))
  assert f'SIGTERM: saved step {last}; the same command goes on from there' in said[0]
  run = RunDir(str(logdir))
  assert run.checkpoints().latest() == last and not list((logdir / 'checkpoints').glob('.partial*'))
  assert tf.train.load_checkpoint(run.checkpoints().path(last)).get_tensor('step') == last


@pytest.mark.slow
@pytest.mark.parametrize('index, whom', [(0, 'process 1'), (1, 'process 0')])
def test_a_process_whose_peer_is_absent_says_so_and_ends_in_one_line_or_on_a_signal(corpus, tmp_path, index, whom):
  address = f'127.0.0.1:{launcher.free_port()}'
  alone = (f'--coordinator={address}', '--num_processes=2', f'--process_id={index}')
  late = subprocess.run(
    [*command(corpus, tmp_path / 'log', *MESH_OF_TWO, *alone), '--connect_seconds=1'],
    stderr=subprocess.PIPE,
    text=True,
    timeout=100,
  )
  assert late.returncode == 1
  assert late.stderr.startswith(f'error: process {index} of 2 waited 1 s for {whom}, at {address}: start all')
  assert late.stderr.count('\n') == 1

  waiting = subprocess.Popen(command(corpus, tmp_path / 'log', *MESH_OF_TWO, *alone), stderr=subprocess.PIPE, text=True)
  assert waiting.stderr.readline().startswith(f'process {index} of 2 waits for {whom}, at {address}')
  waiting.terminate()
  signalled = time.monotonic()
  assert waiting.wait(timeout=60) == 143 and waiting.stderr.read() == ''
  assert time.monotonic() - signalled < 20
  assert not (tmp_path / 'log').exists()


def launched(count, *command, **options):
  """A command in several processes, run to its end."""
  command = [PYTHON, '-m', 'lingvo_moe.cli.commands.main', 'launch', str(count), '--', PYTHON, *command]
  return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


SHARING = """
import sys
from lingvo_moe.cli import app, machine
from lingvo_moe.core.errors import UserError
from lingvo_moe.cli.machine import RuntimeOptions

@app.command(RuntimeOptions)
def main(options):
  group = machine.connect(options).group
  here = group.index
  values = None, '', 'naïve ✓' * 9, [1, {'a': 0.1}]
  found = [group.on_leader(lambda: value if group.is_leader else 1 / 0) for value in values]
  found.append(group.on_all(lambda: here))
  group.say(f'said by {here}')
  sys.stderr.write(f'<{here}: {found}>')
  group.on_all(lambda: fail() if here == 1 else None)
  sys.stderr.write('not reached')

def fail():
  raise UserError('process 1 has no room')

main()
"""


@pytest.mark.long('two processes trace the same step')
def test_what_one_process_knows_or_suffers_all_do(tmp_path):
  (tmp_path / 'sharing.py').write_text(SHARING)
  done = launched(2, str(tmp_path / 'sharing.py'), '--runtime=spmd', '--mesh=data:2')
  for process in range(2):
    assert f"<{process}: [None, '', {'naïve ✓' * 9!r}, [1, {{'a': 0.1}}], {process}]>" in done.stderr
  assert done.stderr.count('said by') == done.stderr.count('said by 0') == 1
  assert done.returncode == 1 and done.stderr.count('error: process 1 has no room') == 1
  assert all(word not in done.stderr for word in ('not reached', 'Traceback', 'was lost'))


SOURCES = ['eno', '', 'owt eno', 'nine ' * 60, 'eerht ruof evif', 'net xis']


@pytest.fixture(scope='module')
def begun(corpus, tmp_path_factory):
  """A run that nobody trained, with a checkpoint of step 1."""
  for side in ('xx', 'en'):
    write(corpus / 'xx-en' / f'test.{side}', SOURCES)
  run = untrained_run.begin(tmp_path_factory.mktemp('run'), corpus, {1: 2.0}, source_vocab_size=282)
  run.finish(1, 'max_steps')
  return run


@pytest.fixture
def run(begun, tmp_path):
  """A copy of that run to work on."""
  shutil.copytree(begun.path, tmp_path / 'log')
  return RunDir(str(tmp_path / 'log'))


MESH = ('--runtime=spmd', '--mesh=expert:2')


@pytest.mark.slow
def test_two_processes_decode_to_the_bytes_of_one_and_end_together(run, tmp_path, monkeypatch):
  shutil.copytree(run.path, tmp_path / 'two')
  decoder.decode(decoder.Options(run.path, poll_seconds=0.1))
  command = ['-m', 'lingvo_moe.decoder', f'--logdir={tmp_path}/two', *MESH]
  done = launched(2, *command)
  assert done.returncode == 0, done.stderr
  files = [folder / 'decode' / 'test' / 'step_1' / 'xx-en.hyp' for folder in (pathlib.Path(run.path), tmp_path / 'two')]
  one, two = (path.read_bytes() for path in files)
  assert one == two and len(set(one.splitlines())) > 3
  assert done.stdout.startswith('step 1, test\n') and done.stdout.count('mean BLEU') == 1
  assert done.stderr.count('warning: 1 line over max_length=32 tokens') == 1
  events = [name for name in os.listdir(files[1].parent.parent) if 'tfevents' in name]
  assert len(events) == 1  # the process that leads wrote, and no other

  again = launched(2, *command, '--once')
  assert again.returncode == 0 and again.stdout == done.stdout
  assert again.stderr.count('was made with the same settings; --overwrite makes it again') == 1

  summary = files[1].with_name('scores.json')
  settings = json.loads(summary.read_text())['settings']
  summary.unlink()  # as if it had been interrupted after two lines
  monkeypatch.setattr(results, '_UNFINISHED_SECONDS', 0.0)
  results.UnfinishedTexts(str(files[1].with_name('scores.unfinished.jsonl')), 1, settings).update(
    {'xx-en:1': 'kept one', 'xx-en:3': 'kept three'}
  )
  resumed = launched(2, *command, '--once')
  assert resumed.returncode == 0, resumed.stderr
  assert resumed.stderr.count('going on after 2 lines in') == 1
  kept = [b'kept one', *one.splitlines()[1:2], b'kept three', *one.splitlines()[3:]]
  assert files[1].read_bytes().splitlines() == kept

  refused = launched(2, *command, '--once', '--beam_size=1')
  assert refused.returncode == 1 and refused.stdout == '' and 'Traceback' not in refused.stderr
  assert refused.stderr.count('holds results made with beam_size=4, now 1') == 1


@pytest.mark.slow
def test_two_processes_translate_to_the_bytes_of_one(run):
  text = ''.join(f'{line}\n' for line in SOURCES)
  output = io.StringIO()
  translate.translate(translate.Options(run.path, batch_lines=4), io.BytesIO(text.encode()), output)
  command = ('-m', 'lingvo_moe.translate', f'--logdir={run.path}', '--batch_lines=4', *MESH)
  done = launched(2, *command, input=text)
  assert done.returncode == 0, done.stderr
  assert done.stdout == output.getvalue() and len(set(done.stdout.splitlines())) > 3
  assert done.stderr.count('warning: line 4 has a sentence over max_length=32') == 1
  missing = launched(2, *command, '--step=7', input=text)
  assert missing.returncode == 1 and missing.stderr.count('has no checkpoint of step 7; there: 1') == 1


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_read_ends_all(run):
  (data,) = (pathlib.Path(run.path) / 'checkpoints' / 'step_00000001').glob('*data*')
  os.truncate(data, data.stat().st_size // 2)
  done = launched(2, '-m', 'lingvo_moe.decoder', f'--logdir={run.path}', *MESH)
  assert done.returncode == 1 and 'Traceback' not in done.stderr
  assert done.stderr.count('damaged or cut short') == 1


@pytest.mark.slow
def test_a_decoder_that_waits_ends_when_another_process_is_lost(tmp_path):
  command = [PYTHON, '-m', 'lingvo_moe.cli.commands.main', 'launch', '2', '--', PYTHON, '-m', 'lingvo_moe.decoder']
  with open(tmp_path / 'said', 'w') as said:
    launch = subprocess.Popen([*command, f'--logdir={tmp_path}/nothing', '--poll_seconds=0.2', *MESH], stderr=said)
  deadline = time.monotonic() + 120
  while 'waiting for a trainer to begin a run' not in (tmp_path / 'said').read_text():
    assert launch.poll() is None and time.monotonic() < deadline
    time.sleep(0.1)
  os.kill(children(launch.pid)[1], signal.SIGKILL)
  assert launch.wait(timeout=120) != 0
  told = (tmp_path / 'said').read_text()
  assert 'process 1 of 2 was lost (killed by SIGKILL)' in told
  assert told.count('error: another process of this run was lost') == 1 and told.count('waiting for') == 1


def test_the_launcher_tells_who_was_lost_and_ends_the_rest(capfd):
  script = 'import sys, time; i = int(sys.argv[-1][-1]); time.sleep(0.2); sys.exit(3) if i == 1 else None'
  assert launcher.launch([PYTHON, '-c', script], 3) == 3
  # By then process 0 and 2 had ended by themselves or were ended.
  assert 'process 1 of 3 was lost (exit status 3)' in capfd.readouterr().err


def test_a_command_that_cannot_be_started_gets_one_line(tmp_path):
  (tmp_path / 'script').write_text('')  # which may not be executed
  for command, answer in (('nosuchcommand', 'No such file'), (str(tmp_path / 'script'), 'Permission denied')):
    done = subprocess.run(
      [PYTHON, '-m', 'lingvo_moe.cli.commands.main', 'launch', '2', '--', command], capture_output=True, text=True
    )
    assert done.returncode == 1 and f"process 0 of 2 could not be started by '{command}' ({answer}" in done.stderr
    assert done.stderr.count('\n') == 1
  for count in ('0', '9' * 5000, '2.0'):
    done = subprocess.run(
      [PYTHON, '-m', 'lingvo_moe.cli.commands.main', 'launch', count, '--', 'true'], capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr.startswith('error: the form is N -- COMMAND')
    assert len(done.stderr) < 300


def test_a_signal_without_a_name_is_told_by_its_number():
  assert launcher._how(-35) == 'killed by signal 35' and launcher._how(-9) == 'killed by SIGKILL'


def test_of_several_that_ended_the_one_that_a_signal_killed_is_blamed(capfd, monkeypatch):
  monkeypatch.setattr(launcher, '_SETTLE_SECONDS', 60)
  # Process 0 ends first, for a peer that it cannot reach.
  script = 'import os, sys, time; sys.exit(1) if sys.argv[-1][-1] == "0" else (time.sleep(1), os.kill(os.getpid(), 9))'
  assert launcher.launch([PYTHON, '-c', script], 2) == -signal.SIGKILL
  assert 'process 1 of 2 was lost (killed by SIGKILL)' in capfd.readouterr().err
  assert launcher._lost([1, None, -9]) == (2, -9)
  assert launcher._lost([-6, -9, 1]) == (1, -9)  # JAX aborts a process that has lost its leader
  assert launcher._lost([None, 1, -6]) == (2, -6)
  assert launcher._lost([0, None, 0]) is None


def test_a_mistake_is_no_loss(capfd, monkeypatch):
  monkeypatch.setattr(launcher, '_SETTLE_SECONDS', 60)
  assert launcher.launch([PYTHON, '-c', 'import sys; sys.exit(1)'], 2) == 1
  assert capfd.readouterr().err == ''
  script = 'import sys; sys.exit(int(sys.argv[-1][-1]))'  # process 1 alone
  assert launcher.launch([PYTHON, '-c', script], 2) == 1
  assert 'process 1 of 2 was lost (exit status 1)' in capfd.readouterr().err


def test_processes_that_stopped_for_a_signal_are_no_loss(capfd):
  assert launcher.launch([PYTHON, '-c', 'import sys; sys.exit(143)'], 2) == 143
  assert capfd.readouterr().err == ''


def test_the_launcher_hands_sigterm_on(tmp_path):
  script = (
    'import pathlib, signal, sys, time\n'
    f'folder = pathlib.Path({str(tmp_path)!r}); i = sys.argv[-1][-1]\n'
    'signal.signal(signal.SIGTERM, lambda *_: ((folder / f"ended{i}").write_text(""), sys.exit(0)))\n'
    '(folder / f"up{i}").write_text("")\n'
    'time.sleep(60)\n'
  )
  launch = subprocess.Popen([PYTHON, '-m', 'lingvo_moe.cli.commands.main', 'launch', '2', '--', PYTHON, '-c', script])
  deadline = time.monotonic() + 120
  while len(os.listdir(tmp_path)) < 2:
    assert time.monotonic() < deadline
    time.sleep(0.05)
  launch.terminate()
  assert launch.wait(timeout=30) == 0
  assert sorted(os.listdir(tmp_path)) == ['ended0', 'ended1', 'up0', 'up1']


def test_a_wrong_form_is_told():
  done = subprocess.run(
    [PYTHON, '-m', 'lingvo_moe.cli.commands.main', 'launch', 'python'], capture_output=True, text=True
  )
  assert done.returncode == 1 and 'the form is N -- COMMAND' in done.stderr
