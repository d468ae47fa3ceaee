"""Task of another kind, in a file of a user's: a bigram model of bytes, with its input, its job and its metrics."""

import dataclasses
import math
import os

import numpy as np
import tensorflow as tf

from lingvo_moe.config import registry
from lingvo_moe.config.fields import changeable, field
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.weights import Constant, WeightSpec
from lingvo_moe.inputs import feed as feed_lib
from lingvo_moe.optim import schedule
from lingvo_moe.optim.adam import Adam
from lingvo_moe.program import Program
from lingvo_moe.tasks import task as task_lib

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
    loss = tf.reduce_sum(xent_BT) / (totals or self.totals(batch))['target_tokens']
    metrics = {'loss': loss, 'xent': tf.reduce_sum(xent_BT), 'target_tokens': tokens}
    if 'files' in batch:
      by_file = lambda x_BT: tf.einsum('BT,BP->P', x_BT, tf.cast(batch['files'], tf.float32))
      metrics |= {'xent_by_file': by_file(xent_BT), 'target_tokens_by_file': by_file(tf.ones_like(xent_BT))}
    return loss, metrics


class Lines(feed_lib.TrainInput, feed_lib.DevInput):
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


@registry.register
class Bytes:
  """Bigram model of bytes: values that jobs read, and no more."""

  task_class = f'{__name__}.BytesTask'

  data_dir: str = changeable('', 'Folder of train.txt and dev.txt.')
  max_steps: int = changeable(12, 'Step at which training ends.')
  log_every: int = changeable(2, 'Steps between lines of the log.')
  eval_every: int = changeable(4, 'Steps between evaluations.')
  save_every: int = changeable(0, 'Steps between checkpoints.')
  keep_checkpoints: int = changeable(2, 'Checkpoints that are kept.')
  keep_every: int = changeable(0, 'Steps of checkpoints that are kept forever.')
  patience: int = changeable(0, 'Evaluations without a gain.')
  lines_seen: int = field(0, 'Lines of train.txt.')

  def program(self):
    return Program(Bigram(), Adam(), schedule.ConstantRate(0.1))


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

  def held_out_job(self, runner, options):
    return Perplexity(Bigram(), self._path(options.split), runner)
