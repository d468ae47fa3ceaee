"""A run of several processes: the numbers of one device, and what happens when a process is lost."""

from __future__ import annotations

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from lingvo_moe import launcher

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
  folder = tmp_path_factory.mktemp('corpus') / 'xx-en'
  folder.mkdir()
  rng = random.Random(0)
  for split, lines in (('train', 300), ('dev', 8)):
    target = [' '.join(rng.choices(['one', 'two', 'three', 'four', 'five'], k=rng.randint(1, 7))) for _ in range(lines)]
    (folder / f'{split}.en').write_text('\n'.join(target) + '\n')
    (folder / f'{split}.xx').write_text('\n'.join(line[::-1] for line in target) + '\n')
  return folder.parent


def command(corpus, logdir, *more):
  bindings = [f'--gin_bindings=Tiny.{binding}' for binding in BINDINGS]
  trainer = [PYTHON, '-m', 'lingvo_moe.trainer', '--model=mt.cldr.Tiny', f'--data_dir={corpus}', f'--logdir={logdir}']
  return [*trainer, f'--max_steps={STEPS}', *bindings, *more]


def losses(logdir):
  lines = [json.loads(line) for line in (logdir / 'train.jsonl').read_text().splitlines()]
  return {line['step']: line['loss'] for line in lines if 'loss' in line}


def children(pid):
  return [int(p) for p in pathlib.Path(f'/proc/{pid}/task/{pid}/children').read_text().split()]


@pytest.mark.slow
def test_a_lost_process_ends_the_others_and_any_devices_go_on_to_the_same_numbers(corpus, tmp_path):
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  subprocess.run(command(corpus, whole), check=True, timeout=600)

  mesh = ('--runtime=spmd', '--mesh=data:2,expert:2')
  launch = subprocess.Popen(
    [PYTHON, ROOT / 'tools' / 'launch.py', '2', '--', *command(corpus, broken, *mesh)],
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


def test_the_launcher_tells_who_was_lost_and_ends_the_rest(capfd):
  script = 'import sys, time; i = int(sys.argv[-1][-1]); time.sleep(0.2); sys.exit(3) if i == 1 else None'
  assert launcher.launch([PYTHON, '-c', script], 3) == 3
  # By then process 0 and 2 had ended by themselves or were ended.
  assert 'process 1 of 3 was lost (exit status 3)' in capfd.readouterr().err


def test_the_launcher_hands_sigterm_on(tmp_path):
  script = (
    'import pathlib, signal, sys, time\n'
    f'folder = pathlib.Path({str(tmp_path)!r}); i = sys.argv[-1][-1]\n'
    'signal.signal(signal.SIGTERM, lambda *_: ((folder / f"ended{i}").write_text(""), sys.exit(0)))\n'
    '(folder / f"up{i}").write_text("")\n'
    'time.sleep(60)\n'
  )
  launch = subprocess.Popen([PYTHON, ROOT / 'tools' / 'launch.py', '2', '--', PYTHON, '-c', script])
  deadline = time.monotonic() + 30
  while len(os.listdir(tmp_path)) < 2:
    assert time.monotonic() < deadline
    time.sleep(0.05)
  launch.terminate()
  assert launch.wait(timeout=30) == 0
  assert sorted(os.listdir(tmp_path)) == ['ended0', 'ended1', 'up0', 'up1']


def test_a_wrong_form_is_told():
  done = subprocess.run([PYTHON, ROOT / 'tools' / 'launch.py', 'python'], capture_output=True, text=True)
  assert done.returncode == 1 and 'the form is N -- COMMAND' in done.stderr
