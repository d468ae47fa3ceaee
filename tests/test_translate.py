"""Translating standard input: a line in, a line out, at once."""

import functools
import io
import os
import random
import re
import subprocess
import sys

import forks
import pytest
import reversed_corpus
import untrained_run

from lingvo_moe import translate
from lingvo_moe.core.errors import UserError
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.runtime.local import LocalRuntime
from lingvo_moe.tasks.task import task_of

pytestmark = pytest.mark.usefixtures('one_trace')

LINES = ['eno', '', 'owt eno', 'net xis', 'eerht']
LONG = 'nine ' * 60


def make_run(folder, pairs):
  """A run that nobody trained."""
  rng = random.Random(0)
  for pair in pairs:
    reversed_corpus.write_lines(folder / 'corpus' / pair, 'train', reversed_corpus.draw(rng, 200))
  fields = {'pairs': '', 'source_vocab_size': 286, 'length_norm_alpha': 2.0, 'max_length': 16, 'beam_size': 3}
  return untrained_run.begin(folder, folder / 'corpus', {1: 2.0, 2: 3.0}, **fields)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  return make_run(tmp_path_factory.mktemp('run'), ['xx-en'])


@pytest.fixture(scope='module')
def many(tmp_path_factory):
  return make_run(tmp_path_factory.mktemp('many'), ['en-xx', 'en-yy'])


class Output(io.StringIO):
  """Counts the lines each flush gives out."""

  def __init__(self):
    super().__init__()
    self.flushed = []

  def flush(self):
    self.flushed.append(self.getvalue().count('\n'))


def run_lines(run, lines, **options):
  source = io.BytesIO(lines if isinstance(lines, bytes) else ''.join(line + '\n' for line in lines).encode())
  output = Output()
  translate.translate(translate.Options(run.path, **options), source, output)
  return output


def expected(run, lines, **options):
  return _expected(run, tuple(lines), **options)


@functools.cache
def _expected(run, lines, step=1, target=None, n_best=1, **overrides):
  config = run.load_config(**overrides)
  runtime = LocalRuntime(config.program())
  run.checkpoints().load_weights(runtime, step)
  return task_of(config).translator(runtime, n_best=n_best).translate(lines, target).hypotheses


def texts(hypotheses):
  return [h[0].text for h in hypotheses]


def test_each_line_may_be_answered_before_the_next_is_read(run):
  output = run_lines(run, LINES, batch_lines=1)
  assert output.getvalue().split('\n') == [*texts(expected(run, LINES)), '']
  assert output.getvalue().split('\n')[1] == ''
  assert output.flushed == [1, 2, 3, 4, 5]
  assert len(set(texts(expected(run, LINES)))) > 2


def test_lines_can_be_gathered(run):
  assert run_lines(run, LINES).flushed == [5]  # all are there
  output = run_lines(run, LINES, batch_lines=3)
  assert output.flushed == [3, 5]
  assert output.getvalue().split('\n') == [*texts(expected(run, LINES)), '']


def test_the_last_line_needs_no_end_and_carriage_returns_are_dropped(run):
  assert run_lines(run, b'eno\r\nowt eno').getvalue().split('\n') == [*texts(expected(run, LINES))[0:3:2], '']
  assert run_lines(run, b'').getvalue() == ''


def test_checkpoint_and_search_can_be_chosen(run, capsys):
  lines = LINES[2:]
  first, second = (texts(expected(run, lines, step=step)) for step in (1, 2))
  assert first != second
  for options in {}, {'best': True}, {'checkpoint': 'best'}, {'step': 1}:
    assert run_lines(run, lines, **options).getvalue().split('\n')[:-1] == first
    said = 'using the checkpoint of step 1, the best by dev loss (2); the newest is of step 2\n'
    assert capsys.readouterr().err == said
  for options in {'checkpoint': 'last'}, {'step': 2}:
    assert run_lines(run, lines, **options).getvalue().split('\n')[:-1] == second
    said = 'using the checkpoint of step 2, the newest; the best by dev loss (2) is of step 1\n'
    assert capsys.readouterr().err == said
  greedy = texts(expected(run, lines, step=1, beam_size=1, length_norm_alpha=0.0))
  assert run_lines(run, lines, step=1, beam_size=1, length_norm_alpha=0.0).getvalue().split('\n')[:-1] == greedy


def test_n_best_gives_number_score_log_probability_and_text(run):
  rows = [line.split('\t') for line in run_lines(run, LINES, n_best=3).getvalue().splitlines()]
  assert [int(row[0]) for row in rows] == [1, 1, 1, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5]
  best = [h for sentence in expected(run, LINES, n_best=3) for h in sentence]
  assert [row[3] for row in rows] == [h.text for h in best]
  assert [float(row[1]) for row in rows] == pytest.approx([h.score for h in best], abs=1e-3)
  assert [float(row[2]) for row in rows] == pytest.approx([h.log_prob for h in best], abs=1e-3)
  with pytest.raises(
    UserError, match='beam of 2 has no 3 hypotheses to choose from: use n_best=2, or a larger beam_size='
  ):
    run_lines(run, LINES, n_best=3, beam_size=2)
  done = forks.run(['-m', 'lingvo_moe.cli.commands.main', 'translate', run.path, '--n_best=9'], input='eno\n')
  assert done.returncode == 1 and re.search(r'^error: .*: use --n_best=\d, or a larger --beam_size$', done.stderr, re.M)


@pytest.mark.parametrize(
  'split, what',
  [
    ('never', 'is over max_length=16 tokens and was translated in part'),
    ('auto', 'has a sentence over max_length=16 tokens, which was cut where a clause ends'),
  ],
)
def test_a_line_over_the_limit_is_cut_or_translated_in_part_with_a_warning(run, capsys, split, what):
  output = run_lines(run, ['eno', LONG], batch_lines=2, split_sentences=split)
  assert output.getvalue().count('\n') == 2
  said, warning = capsys.readouterr().err.splitlines()
  assert said.startswith('using the checkpoint of step 1') and warning == f'warning: line 2 {what}'


def test_a_line_of_several_sentences_is_translated_by_sentence(run):
  [one], [two] = expected(run, ['Eno owt.', 'Eerht.'])
  assert run_lines(run, ['Eno owt. Eerht.']).getvalue() == f'{one.text} {two.text}\n'
  assert run_lines(run, ['Eno owt. Eerht.'], split_sentences='never').getvalue() != f'{one.text} {two.text}\n'


def test_placeholders_are_kept_from_the_model_unless_that_is_turned_off(run, capsys):
  lines = ['eno {{x}}', '{{x}}: %d', 'eno', 'owt %s eno %s']
  found = run_lines(run, lines).getvalue().split('\n')
  plain = texts(expected(run, ['eno', 'owt eno']))
  assert found[0].count('{{x}}') == 1 and ''.join(found[0].replace('{{x}}', '').split()) == ''.join(plain[0].split())
  assert found[1:3] == ['{{x}}: %d', plain[0]]
  assert found[3].count('%s') == 2 and ''.join(found[3].replace('%s', '').split()) == ''.join(plain[1].split())
  assert run_lines(run, lines, placeholders=False).getvalue().split('\n')[:-1] == texts(expected(run, lines))
  assert 'lost' not in capsys.readouterr().err


def test_bad_utf8_is_refused_by_line_after_answering_what_came_before(run):
  output = Output()
  with pytest.raises(UserError, match=r"line 3 of standard input is not \(byte 4: b'\\xe4t'\): convert it"):
    source = io.BytesIO(b'eno\nowt\nsp\xc3\xe4t\nnet\n'.replace(b'\xc3', b'a'))
    translate.translate(translate.Options(run.path, batch_lines=10), source, output)
  assert output.getvalue().split('\n') == [*texts(expected(run, ['eno', 'owt'])), '']


def test_lines_that_have_arrived_are_translated_together_and_none_waits_for_others(monkeypatch):
  monkeypatch.setattr(translate, '_MOST_LINES', 3)
  read, write = os.pipe()
  with open(read, 'rb') as source:
    batches = translate._batches(source, None, None)
    for text, answered in (
      (b'eno\n', [['eno']]),  # and the pipe stays open
      (b'owt\r\neerht\nru', [['owt', 'eerht']]),
      (b'of\n' + b'x\n' * 4 + b'y', [['ruof', 'x', 'x'], ['x', 'x']]),
    ):
      os.write(write, text)
      assert [next(batches) for _ in answered] == answered
    os.write(write, b'\nz')
    os.close(write)
    assert list(batches) == [['y', 'z']]


def test_of_several_processes_the_reader_gives_a_sign_when_no_line_comes():
  read, write = os.pipe()
  with open(read, 'rb') as source:
    batches = translate._batches(source, 2, 0.05)
    os.write(write, b'eno\nowt\r\nee')
    assert next(batches) == ['eno', 'owt']
    assert next(batches) == next(batches) == []
    os.write(write, 'rhté\n'.encode() * 2 + b'xis')
    assert next(batches) == ['eerhté', 'rhté']
    os.close(write)
    assert list(batches) == [['xis']]


def test_a_model_of_several_languages_must_be_told_which(many):
  with pytest.raises(UserError, match='target=, one of xx, yy'):
    run_lines(many, LINES)
  with pytest.raises(UserError, match="does not translate into 'zz'"):
    run_lines(many, LINES, target='zz')
  for target in ('xx', 'yy'):
    got = run_lines(many, LINES, target=target, batch_lines=9).getvalue().split('\n')[:-1]
    assert got == texts(expected(many, LINES, target=target))


def test_a_model_without_tags_may_be_asked_for_its_own_language(run):
  assert run_lines(run, LINES[:2], target='en').getvalue() == run_lines(run, LINES[:2]).getvalue()


def test_mistakes_are_answered(run, tmp_path):
  wrong = {
    'one target language and takes no tag; saw target=.fr.': {'target': 'fr'},
    'zz is not a source language of this model; it has xx': {'source': 'zz'},
    'holds a run of mt.cldr.Tiny, not of --model=mt.cldr.Dense': {'model': 'mt.cldr.Dense'},
    'has no checkpoint of step 7; there: 1, 2': {'step': 7},
    '--step and --best each choose a checkpoint': {'step': 1, 'best': True},
    '--best and --checkpoint each choose a checkpoint': {'checkpoint': 'last', 'best': True},
    'beam_size must be from 1 to 1024; saw 0': {'beam_size': 0},
  }
  for message, options in wrong.items():
    with pytest.raises(UserError, match=message):
      run_lines(run, LINES, **options)
  with pytest.raises(UserError, match='there is no such directory'):
    run_lines(RunDir(str(tmp_path / 'nowhere')), LINES)


@pytest.mark.slow
def test_the_command_answers_while_its_input_stays_open(run):
  env = {**os.environ, 'LC_ALL': 'C'}
  command = [sys.executable, '-m', 'lingvo_moe.translate', f'--logdir={run.path}']
  with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as p:
    for line in LINES:
      p.stdin.write(f'{line}\n'.encode())
      p.stdin.flush()
      assert p.stdout.readline().decode() == texts(expected(run, [line]))[0] + '\n'
    p.stdin.write('é'.encode('latin-1') + b'\n')
    out, err = p.communicate(timeout=60)
  assert (p.returncode, out) == (1, b'')
  assert err.decode().splitlines()[-1].startswith('error: text must be UTF-8; line 6 of standard input is not')


def test_a_byte_order_mark_before_the_first_line_is_no_text():
  source = io.BytesIO(b'\xef\xbb\xbfeins\n\xef\xbb\xbfzwei\n')
  assert list(translate._batches(source, 9, None)) == [['eins', '\ufeffzwei']]
