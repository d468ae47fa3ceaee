"""mt.starter: what follows from the corpus when a run begins, and stays as it was chosen."""

import dataclasses
import json
import random
import shlex
import types

import forks
import pytest
import reversed_corpus

from lingvo_moe import trainer
from lingvo_moe.config import configuration
from lingvo_moe.core.errors import UserError
from lingvo_moe.run.rundir import RunDir

MODEL = 'mt.starter.Tiny'
WORDS = [''.join(random.Random(seed).choices('abcdefghij', k=5)) for seed in range(200)]


def write(folder, lines, seed=0):
  """Writes as many training lines, and 20 of dev."""
  rng = random.Random(seed)
  for split, number in (('train', lines), ('dev', 20)):
    reversed_corpus.write_lines(folder / 'xx-en', split, reversed_corpus.draw(rng, number, WORDS))
  return folder


def begin(logdir, corpus, said=None, **values):
  """Begins or resumes a run as the trainer does; returns its configuration."""
  options = trainer.Options(logdir=str(logdir), accept_changed_corpus=values.pop('accept', False))
  group = types.SimpleNamespace(say=(said if said is not None else []).append)
  config = configuration.resolve(MODEL, data_dir=str(corpus), **values)
  config, lock = trainer.begin(RunDir(str(logdir)), MODEL, config, options, group)
  lock.close()
  return config


def length(config):
  return config.max_steps, config.eval_every, config.warmup_steps


def test_what_is_chosen_is_written_said_and_kept_when_the_run_goes_on_with_another_corpus(tmp_path):
  corpus, said = write(tmp_path / 'corpus', 400), []
  begun = begin(tmp_path / 'run', corpus, said)
  steps, every, warmup = length(begun)
  assert steps == 20 * every and warmup == steps // 10 and f'max_steps={steps}, eval_every={every}' in said[0]
  values = json.loads((tmp_path / 'run' / 'config.json').read_text())['values']
  assert [values[name] for name in ('max_steps', 'eval_every', 'warmup_steps')] == [steps, every, warmup]

  write(corpus, 1600, seed=1)
  assert length(begin(tmp_path / 'new', corpus)) == pytest.approx((2 * steps, 2 * every, 2 * warmup), rel=0.1)
  with pytest.raises(UserError, match='is not the corpus that the run'):
    begin(tmp_path / 'run', corpus)
  said = []
  assert begin(tmp_path / 'run', corpus, said, accept=True) == begun
  assert all('chosen' not in line for line in said)


def test_steps_that_are_given_later_replace_those_that_were_chosen(tmp_path):
  corpus = write(tmp_path / 'corpus', 200)
  begun = begin(tmp_path / 'run', corpus)
  longer = begin(tmp_path / 'run', corpus, max_steps=begun.max_steps + 40)
  assert longer == dataclasses.replace(begun, max_steps=begun.max_steps + 40)
  assert begin(tmp_path / 'run', corpus) == longer


def test_a_corpus_that_is_too_small_is_refused_and_leaves_nothing(tmp_path):
  corpus = write(tmp_path / 'corpus', 99)
  options = trainer.Options(logdir=str(tmp_path / 'run'), model=MODEL, data_dir=str(corpus))
  with pytest.raises(UserError, match='at least 100 lines; saw 99, .* fine-tune a public model .* or give --max_steps'):
    trainer.train(options)
  assert not (tmp_path / 'run').exists()
  assert length(begin(tmp_path / 'run', corpus, max_steps=40)) == (40, 2, 4)


@pytest.mark.slow
def test_the_command_that_prepare_prints_trains_and_without_dev_takes_a_twentieth_of_train(tmp_path):
  targets = [f'{line} {i}' for i, line in enumerate(reversed_corpus.draw(random.Random(0), 200, WORDS))]
  (tmp_path / 'a.en').write_text(''.join(line + '\n' for line in targets))
  (tmp_path / 'a.de').write_text(''.join(line[::-1] + '\n' for line in targets))
  run = lambda *command: forks.run(['-m', 'lingvo_moe.cli.commands.main', *command], cwd=tmp_path, timeout=300)
  prepared = run('prepare', '--source=a.de', '--target=a.en', '--out=MY DATA', '--dev=0', '--test=5')
  program, *printed = shlex.split(prepared.stdout.splitlines()[-1])
  assert program == 'lingvo-moe' and '--set' not in printed
  smaller = 'model_dim=16 ff_dim=16 encoder_layers=2 decoder_layers=2 num_experts=4 batch_tokens=1024'.split()
  trained = run(*printed, '--max_steps=2', *(f'--set={setting}' for setting in smaller))
  assert trained.returncode == 0 and 'trained to step 2 (max_steps); best dev loss' in trained.stderr, trained.stderr
  lines = (tmp_path / 'MY DATA' / 'de-en' / 'train.de').read_text().count('\n')
  assert lines > 100 and f'dev: 1 pair, {lines // 20} examples' in trained.stderr
