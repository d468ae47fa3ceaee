"""The jobs with a denoising model: trained, resumed to the same numbers, evaluated, and asked to fill in."""

import io
import json

import pytest
from text_lines import records

import lingvo_moe
from lingvo_moe import decoder, trainer, translate
from lingvo_moe.core.errors import UserError

pytestmark = pytest.mark.usefixtures('one_trace')

NAME = 'switch.shakespeare.Tiny'


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
  root = tmp_path_factory.mktemp('corpus')
  for split, count in (('train-0', 30), ('train-1', 30), ('dev', 6)):
    (root / f'{split}.txt').write_text(''.join(f'{i} and {i + 1} make {2 * i + 1}.\n' for i in range(count)))
  return str(root)


def train(path, corpus, steps):
  bindings = ['Tiny.encoder_layers = 1', 'Tiny.decoder_layers = 2', 'Tiny.eval_every = 6', 'Tiny.warmup_steps = 5']
  trainer.train(trainer.Options(model=NAME, logdir=path, data_dir=corpus, max_steps=steps, gin_bindings=bindings))
  return records(f'{path}/train.jsonl')


@pytest.fixture(scope='module')
def run(corpus, tmp_path_factory):
  path = str(tmp_path_factory.mktemp('run') / 'log')
  return path, train(path, corpus, 12)


def test_the_loss_falls(run):
  losses = [line['dev_loss'] for line in run[1] if 'dev_loss' in line]
  assert len(losses) == 2 and losses[1] < losses[0] < 5.6  # log(268) = 5.59
  assert run[1][-1]['dev_loss_by_file'] == {'dev': pytest.approx(losses[1])}


@pytest.mark.slow
def test_a_run_that_stopped_goes_on_to_the_same_numbers(run, corpus, tmp_path):
  path = str(tmp_path / 'log')
  train(path, corpus, 6)
  lines = train(path, corpus, 12)
  losses = lambda lines: [(line['step'], line.get('loss'), line.get('dev_loss')) for line in lines if line['step'] > 6]
  assert losses(lines) == losses(run[1])


def test_the_decoder_gives_perplexity_and_windows_filled_in(run, capsys):
  path, lines = run
  decoder.decode(decoder.Options(path, once=True, split='dev', num_samples=2))
  with open(f'{path}/decode/dev/step_12/perplexity.json', encoding='utf-8') as f:
    summary = json.load(f)
  assert summary['files']['dev']['cross_entropy'] == pytest.approx(lines[-1]['dev_loss'], rel=1e-5)
  samples = records(f'{path}/decode/dev/step_12/samples.jsonl')
  assert len(samples) == 2 and samples == summary['samples']
  assert all(s['inputs'].count('<extra_id_0>') == s['targets'].count('<extra_id_0>') == 1 for s in samples)
  assert 'nats a target' in capsys.readouterr().out


def answers(run, lines, **options):
  output = io.StringIO()
  source = io.BytesIO(''.join(line + '\n' for line in lines).encode())
  translate.translate(translate.Options(run[0], **options), source, output)
  return output.getvalue().split('\n')[:-1]


def test_translate_fills_in_the_sentinels_of_lines(run):
  lines = ['12 and <extra_id_0> make 25.', 'nothing to fill in', '', '<extra_id_0> and 3 make <extra_id_1>.']
  filled = answers(run, lines, batch_lines=4)
  assert filled[1:3] == lines[1:3] and len(filled) == 4
  assert filled[0].startswith('12 and ') and filled[0].endswith(' make 25.')
  (broken,) = answers(run, [r'1 and\n<extra_id_0> make \\ 2.'])
  assert broken.startswith(r'1 and\n') and broken.endswith(r' make \\ 2.')
  (text,) = lingvo_moe.load(run[0]).translate(['1 and\n<extra_id_0> make \\ 2.'])  # of Python, without escapes
  assert text.startswith('1 and\n') and text.endswith(' make \\ 2.')
  best = [line.split('\t') for line in answers(run, lines[:1], n_best=2)]
  assert [number for number, *_ in best] == ['1', '1'] and float(best[0][1]) >= float(best[1][1])
  with pytest.raises(UserError, match='<extra_id_0> to <extra_id_7>; saw <extra_id_8>'):
    answers(run, ['<extra_id_8>'])
  with pytest.raises(UserError, match='this model has no target language; saw target=.de.'):
    answers(run, ['x'], target='de')
  with pytest.raises(UserError, match='a beam of 4 has no 5 hypotheses'):
    answers(run, ['x'], n_best=5)
