"""Task of another kind, in this file alone: a bigram model of bytes, trained and evaluated by the jobs."""

import dataclasses
import io
import json
import math
import os

import numpy as np
import pytest
import tensorflow as tf
from text_lines import records

from lingvo_moe import decoder, trainer, translate
from lingvo_moe.core import registry
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.weights import Constant, WeightSpec
from lingvo_moe.optim import schedule
from lingvo_moe.optim.adam import Adam
from lingvo_moe.program import Program
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.tasks import task as task_lib

NAME = 'toy.Bytes'
BOS = 0


class Bigram:
  """Scores of the next byte are a row of a table."""

  def weights(self):
    return {'table': WeightSpec((256, 256), 'VM', Constant(0.0))}

  def totals(self, batch):
    return {'target_tokens': tf.cast(tf.size(batch['ids']), tf.float32)}

  def loss(self, theta, batch, key=None, totals=None):
    ids_BT = batch['ids']
    before_BT = tf.pad(ids_BT[:, :-1], [[0, 0], [1, 0]], constant_values=BOS)
    logits_BTV = tf.gather(theta['table'], before_BT)
    xent_BT = tf.nn.sparse_softmax_cross_entropy_with_logits(ids_BT, logits_BTV)
    tokens = tf.cast(tf.size(ids_BT), tf.float32)
    loss = tf.reduce_sum(xent_BT) / tokens
    metrics = {'loss': loss, 'xent': tf.reduce_sum(xent_BT), 'target_tokens': tokens}
    if 'files' in batch:
      by_file = lambda x_BT: tf.einsum('BT,BP->P', x_BT, tf.cast(batch['files'], tf.float32))
      metrics |= {'xent_by_file': by_file(xent_BT), 'target_tokens_by_file': by_file(tf.ones_like(xent_BT))}
    return loss, metrics


class Lines(task_lib.TrainInput, task_lib.DevInput):
  """Batches of one line each, as bytes."""

  def __init__(self, path):
    with open(path, 'rb') as f:
      self.lines = [np.frombuffer(line, np.uint8).astype(np.int32)[None] for line in f.read().splitlines()]
    self.stats = f'{len(self.lines)} lines'
    self.subsets = [os.path.basename(path)]
    self.content_hash = str(hash(tuple(map(bytes, self.lines))))

  def dataset(self, start_step=0):
    return ({'ids': self.lines[step % len(self.lines)]} for step in range(start_step, 10**9))

  def __iter__(self):
    return ({'ids': line, 'files': np.ones([1, 1], np.int32)} for line in self.lines)


class Perplexity(task_lib.HeldOutJob):
  """Perplexity of a file: bytes.nats has that of each line."""

  summary_file = 'perplexity.json'
  suffix = '.nats'

  def __init__(self, model, path, runner):
    self._lines = Lines(path)
    self._loss = runner.function(lambda weights, batch: model.loss(weights, batch)[1]['xent'])
    self.settings = {'lines': len(self._lines.lines)}
    self.texts = {}

  def run(self, label, quiet=False, unfinished=None):
    return [float(self._loss({'ids': line})) for line in self._lines.lines]

  def finish(self, computed):
    perplexity = math.exp(sum(computed) / sum(line.size for line in self._lines.lines))
    return task_lib.Outcome({'bytes': map(str, computed)}, {'perplexity': perplexity}, {'perplexity': perplexity})

  def report(self, summary):
    return f'perplexity {summary["perplexity"]:.2f}'


@dataclasses.dataclass(frozen=True)
class BytesConfig:
  """Values that jobs read, and no more."""

  task_class = f'{__name__}.BytesTask'

  data_dir: str = ''
  max_steps: int = 12
  log_every: int = 2
  eval_every: int = 4
  save_every: int = 0
  keep_checkpoints: int = 2
  keep_every: int = 0
  patience: int = 0
  lines_seen: int = 0

  def program(self):
    return Program(Bigram(), Adam(), schedule.Constant(0.1))


class BytesTask(task_lib.Task):
  """Training and held-out evaluation, and no more."""

  def _path(self, split):
    return os.path.join(self.config.data_dir, f'{split}.txt')

  def check_corpus(self):
    if not os.path.exists(self._path('train')):
      raise UserError(f'{self.config.data_dir} has no train.txt')

  def prepare(self, folder, begun):
    return dataclasses.replace(self.config, lines_seen=len(Lines(self._path('train')).lines))

  def train_input(self, cache_dir, feed):
    return Lines(self._path('train'))

  def dev_input(self, cache_dir, feed):
    return Lines(self._path('dev'))

  def scalars(self, metrics):
    return {'loss': float(metrics['loss'])}

  def held_out_job(self, runner, options):
    return Perplexity(Bigram(), self._path(options.split), runner)


def test_what_a_task_leaves_out_is_refused_in_words():
  task = task_lib.task_of(BytesConfig())
  assert task.pairs_of(['ab']) == [] and task.choose_target(None) is None
  for call, words in (
    (lambda: task.choose_target('de'), 'this model has no target language; saw --target=de: leave it out'),
    (lambda: task.router(None), 'BytesConfig has no routing by sentence'),
    (task.text_function, 'BytesConfig is not exported: only models of translation are'),
    (task.random_batch, 'BytesConfig has no random batches to measure'),
    (lambda: task_lib.Translator().score([], []), 'this model scores no pairs: use the decoder with --score'),
  ):
    with pytest.raises(UserError, match=words):
      call()


def test_jobs_train_and_evaluate_a_task_that_they_do_not_know(tmp_path, monkeypatch, capsys):
  monkeypatch.setitem(registry._models, NAME, BytesConfig)
  (tmp_path / 'corpus').mkdir()
  for split, lines in (('train', ['abab', 'ababab', 'ab'] * 4), ('dev', ['abab', 'ab']), ('test', ['ab', 'abababab'])):
    (tmp_path / 'corpus' / f'{split}.txt').write_text('\n'.join(lines) + '\n')
  run = RunDir(str(tmp_path / 'log'))
  options = trainer.Options(model=NAME, logdir=run.path, data_dir=str(tmp_path / 'corpus'))
  assert trainer.train(options) is None
  lines = records(tmp_path / 'log' / 'train.jsonl')
  assert [line['step'] for line in lines] == [2, 4, 4, 6, 8, 8, 10, 12, 12]
  assert lines[-1]['target_tokens_so_far'] == 4 * (4 + 6 + 2) and 'source_tokens_so_far' not in lines[-1]
  losses = [line['dev_loss'] for line in lines if 'dev_loss' in line]
  assert losses == sorted(losses, reverse=True) and losses[-1] < math.log(256) - 1
  assert lines[-1]['dev_loss_by_file'] == {'dev.txt': pytest.approx(losses[-1])}
  assert run.load()[1].lines_seen == 12 and run.finished

  decoder.decode(decoder.Options(run.path, once=True))
  summary = json.loads((tmp_path / 'log/decode/test/step_12/perplexity.json').read_text())
  nats = (tmp_path / 'log/decode/test/step_12/bytes.nats').read_text().splitlines()
  assert summary['perplexity'] == pytest.approx(math.exp(sum(map(float, nats)) / 10)) and summary['perplexity'] < 100
  assert capsys.readouterr().out == f'step 12, test\nperplexity {summary["perplexity"]:.2f}\n'

  with pytest.raises(UserError, match="toy.Bytes has no field 'beam_size', so that --beam_size has no meaning"):
    decoder.decode(decoder.Options(run.path, once=True, beam_size=2))
  with pytest.raises(UserError, match='BytesConfig does not translate: use the decoder'):
    translate.translate(translate.Options(run.path), io.BytesIO(b''), io.StringIO())
