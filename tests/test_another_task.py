"""Task of another kind, in one file of a user's (data/own/toy.py), trained and evaluated by the jobs."""

import io
import json
import math
import pathlib
import sys

import pytest
from text_lines import records

from lingvo_moe import decoder, trainer, translate
from lingvo_moe.config import registry
from lingvo_moe.core.errors import UserError
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.tasks import task as task_lib

NAME = 'toy.Bytes'


@pytest.fixture(scope='module')
def toy():
  """The user's file."""
  registry.install([str(pathlib.Path(__file__).parent / 'data' / 'own' / 'toy.py')])
  return sys.modules['toy']


def test_what_a_task_leaves_out_is_refused_in_words(toy):
  task = task_lib.task_of(toy.Bytes())
  assert task.pairs_of(['ab']) == [] and task.choose_target(None) is None
  for call, words in (
    (lambda: task.choose_target('de'), 'this model has no target language; saw target=.de.: leave it out'),
    (lambda: task.router(None), 'Bytes has no routing by sentence'),
    (task.exports.text_function, 'Bytes is not exported: only models of translation are'),
    (task.random_batch, 'Bytes has no random batches to measure'),
    (lambda: task_lib.Translator().score([], []), 'this model scores no pairs: use lingvo-moe decode with --score'),
  ):
    with pytest.raises(UserError, match=words):
      call()


@pytest.mark.parametrize(
  'named, words',
  [
    ('toy.Missing', "saw 'toy.Missing': module 'toy' has no attribute 'Missing'; write it as f'{__name__}.NAME'"),
    ('gone.Task', "saw 'gone.Task': No module named 'gone'"),
    ('BytesTask', "saw 'BytesTask': Empty module name"),
    ('toy.Bigram', "saw 'toy.Bigram', which is not one: derive it from lingvo_moe.tasks.task.Task"),
  ],
)
def test_a_task_class_that_is_none_is_refused_in_a_line(toy, named, words, monkeypatch):
  monkeypatch.setattr(toy.Bytes, 'task_class', named)
  with pytest.raises(UserError) as error:
    task_lib.task_of(toy.Bytes())
  assert str(error.value).startswith('task_class must be the module and name of a subclass of Task; ' + words)


def test_jobs_train_and_evaluate_a_task_that_they_do_not_know(toy, tmp_path, capsys):
  (tmp_path / 'corpus').mkdir()
  for split, lines in (('train', ['abab', 'ababab', 'ab'] * 4), ('dev', ['abab', 'ab']), ('test', ['ab', 'abababab'])):
    (tmp_path / 'corpus' / f'{split}.txt').write_text('\n'.join(lines) + '\n')
  run = RunDir(str(tmp_path / 'log'))
  options = trainer.Options(model=NAME, logdir=run.path, data_dir=str(tmp_path / 'corpus'))
  assert trainer.train(options) is None
  lines = records(tmp_path / 'log' / 'train.jsonl')
  assert [line['step'] for line in lines] == [2, 4, 4, 6, 8, 8, 10, 12, 12]
  assert lines[-1]['target_tokens_so_far'] == 4 * (4 + 6 + 2) and 'source_tokens_so_far' not in lines[-1]
  assert all(math.isfinite(line['loss']) for line in lines if 'loss' in line)
  losses = [line['dev_loss'] for line in lines if 'dev_loss' in line]
  assert losses == sorted(losses, reverse=True) and losses[-1] < math.log(256) - 1
  assert lines[-1]['dev_loss_by_file'] == {'dev.txt': pytest.approx(losses[-1])}
  assert run.load()[1].lines_seen == 12 and run.finished

  decoder.decode(decoder.Options(run.path, once=True))
  summary = json.loads((tmp_path / 'log/decode/test/step_12/perplexity.json').read_text())
  nats = (tmp_path / 'log/decode/test/step_12/bytes.nats').read_text().splitlines()
  assert summary['perplexity'] == pytest.approx(math.exp(sum(map(float, nats)) / 10)) and summary['perplexity'] < 100
  assert capsys.readouterr().out == f'step 12, test\nperplexity {summary["perplexity"]:.2f}\n'

  with pytest.raises(UserError, match="toy.Bytes has no field 'beam_size', so that beam_size= has no meaning"):
    decoder.decode(decoder.Options(run.path, once=True, beam_size=2))
  with pytest.raises(UserError, match='Bytes does not translate: use the decoder'):
    translate.translate(translate.Options(run.path), io.BytesIO(b''), io.StringIO())
