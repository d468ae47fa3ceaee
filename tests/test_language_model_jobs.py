"""The jobs with a language model: trained, resumed to the same numbers, evaluated, and asked to go on."""

import io
import json
import math
import re

import pytest
from text_lines import records

import lingvo_moe
from lingvo_moe import decoder, trainer, translate
from lingvo_moe.addons.report import page, reading
from lingvo_moe.core.errors import UserError

pytestmark = pytest.mark.usefixtures('one_trace')

NAME = 'lm.shakespeare.Tiny'


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
  root = tmp_path_factory.mktemp('corpus')
  for split, count in (('train-0', 30), ('train-1', 30), ('dev', 6), ('test', 6)):
    (root / f'{split}.txt').write_text(''.join(f'{i} and {i + 1} make {2 * i + 1}.\n' for i in range(count)))
  return str(root)


def train(
  path, corpus, steps, name=NAME, bindings=('Tiny.num_layers = 1', 'Tiny.num_experts = 4', 'Tiny.eval_every = 3')
):
  trainer.train(trainer.Options(model=name, logdir=path, data_dir=corpus, max_steps=steps, gin_bindings=bindings))
  return records(f'{path}/train.jsonl')


@pytest.fixture(scope='module')
def run(corpus, tmp_path_factory):
  path = str(tmp_path_factory.mktemp('run') / 'log')
  return path, train(path, corpus, 6)


def test_training_logs_perplexity_a_word_and_bits_a_byte(run):
  last = run[1][-1]
  nats = last['dev_loss'] * 98  # 97 bytes and the end
  assert last['dev_bits_per_byte'] == pytest.approx(nats / math.log(2) / 97)
  assert last['dev_perplexity_per_word'] == pytest.approx(math.exp(nats / 30), rel=1e-4)
  assert last['dev_loss_by_file'] == {'dev': pytest.approx(last['dev_loss'])}


@pytest.mark.slow
def test_a_run_that_stopped_goes_on_to_the_same_numbers(run, corpus, tmp_path):
  path = str(tmp_path / 'log')
  train(path, corpus, 3)
  lines = train(path, corpus, 6)
  losses = lambda lines: [(line['step'], line.get('loss'), line.get('dev_loss')) for line in lines if line['step'] > 3]
  assert losses(lines) == losses(run[1])


def test_the_decoder_gives_perplexity_and_samples(run, corpus, capsys):
  path, lines = run
  decode = lambda **options: decoder.decode(decoder.Options(path, once=True, **options))
  decode(split='dev', prompt='1 and', num_samples=2, max_new_tokens=5)
  summary = json.loads(open(f'{path}/decode/dev/step_6/perplexity.json', encoding='utf-8').read())
  assert summary['files']['dev']['cross_entropy'] == pytest.approx(lines[-1]['dev_loss'], rel=1e-5)
  assert summary['all']['bits_per_byte'] == pytest.approx(lines[-1]['dev_bits_per_byte'], rel=1e-5)
  samples = open(f'{path}/decode/dev/step_6/samples.jsonl', encoding='utf-8').read().splitlines()
  assert [json.loads(s)['prompt'] for s in samples] == ['1 and'] * 2 and summary['settings']['prompt'] == '1 and'
  assert 'nats a token' in capsys.readouterr().out
  text = page.page(reading.read([path], 'dev'))
  assert 'Perplexity of dev by log at step 6' in text and text.count('<blockquote dir="auto">') == 2
  assert 'Texts of log after &#x27;1 and&#x27;' in text
  assert 'log has no' not in text.partition('id="setup"')[0]
  with pytest.raises(UserError, match='1 and.*now .*give --overwrite'):
    decode(split='dev', prompt='2 and', num_samples=2, max_new_tokens=5)
  decode(split='test', score=True)
  assert not json.loads(open(f'{path}/decode/test/step_6/perplexity.json', encoding='utf-8').read())['samples']


def answers(run, lines, **options):
  output = io.StringIO()
  source = io.BytesIO(''.join(line + '\n' for line in lines).encode())
  translate.translate(translate.Options(run[0], max_new_tokens=6, **options), source, output)
  return output.getvalue().split('\n')[:-1]  # bytes that are drawn may be other ends of lines


def test_translate_continues_lines(run):
  lines = ['1 and', '', r'a\nb \\n']
  once = answers(run, lines)
  assert len(once) == 3 and once == answers(run, lines) != answers(run, lines, sample_seed=1)
  assert once == answers(run, lines, batch_lines=3)


def test_translate_continues_lines_by_another_search(run):
  assert len(answers(run, ['1 and', ''], search='greedy')) == 2
  best = [line.split('\t') for line in answers(run, ['1 and'], search='beam', n_best=2)]
  assert [number for number, *_ in best] == ['1', '1'] and float(best[0][1]) >= float(best[1][1])


def test_the_library_continues_prompts_as_translate_does(run):
  model = lingvo_moe.load(run[0], max_new_tokens=6)
  prompts = ['1 and', '', 'a\nb \\n']
  texts = model.generate(prompts)
  escaped = [text.replace('\\', '\\\\').replace('\n', '\\n').replace('\r', '\\r') for text in texts]
  assert escaped == answers(run, ['1 and', '', r'a\nb \\n'], batch_lines=3)
  assert model.generate(prompts) == texts  # the same call gives the same samples
  (scored,) = model.generate(prompts[:1], scores=True)
  assert scored.text == texts[0] and scored.log_prob < 0
  with pytest.raises(UserError, match='n_best must be at least 1, or None .*; saw 0'):
    model.generate(prompts, n_best=0)
  for call, message in (
    (lambda: model.translate(['1 and']), 'language model, which continues text: use generate'),
    (lambda: model.score([('a', 'b')]), 'this model scores no pairs: use lingvo-moe decode with --score'),
    (lambda: model.routing(['a']), 'has no routing by sentence'),
  ):
    with pytest.raises(UserError, match=f'^{re.escape(model.path)} holds .*{message}'):
      call()


def test_mistakes_are_answered(run):
  with pytest.raises(UserError, match='this model has no target language; saw target=.de.'):
    answers(run, ['x'], target='de')
  with pytest.raises(UserError, match='one greedy continuation; saw 2 wanted'):
    answers(run, ['x'], search='greedy', n_best=2)
  with pytest.raises(UserError, match='a beam of 4 has no 5 hypotheses'):
    answers(run, ['x'], search='beam', n_best=5)


def test_a_recurrent_model_learns_and_goes_on(corpus, tmp_path):
  path = str(tmp_path / 'log')
  lines = train(path, corpus, 16, 'lm.moe_lstm.Tiny', ['Tiny.eval_every = 8', 'Tiny.learning_rate = 0.01'])
  first, last = [line['dev_loss'] for line in lines if 'dev_loss' in line]
  assert last < first - 0.5
  decoder.decode(decoder.Options(path, once=True, split='dev', prompt='1 and', num_samples=2, max_new_tokens=5))
  summary = json.loads(open(f'{path}/decode/dev/step_16/perplexity.json', encoding='utf-8').read())
  assert summary['files']['dev']['cross_entropy'] == pytest.approx(last, rel=1e-5) and len(summary['samples']) == 2
