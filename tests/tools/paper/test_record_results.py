"""tools/record_results.py, as typed: what a run reached, as lines that are added once."""

import concurrent.futures
import json
import math
import pathlib

import forks
import pytest
from sacrebleu.metrics import BLEU, CHRF
from text_lines import records, write

from lingvo_moe.core.errors import UserError
from paper import recording

TOOL = pathlib.Path(__file__).resolve().parents[3] / 'tools' / 'record_results.py'
REFERENCES = {'en-deu': ['der hund schläft im haus .', 'das haus'], 'en-mya': ['သူသည်အိမ်သို့သွားသည်', 'အိမ်']}
TRANSLATIONS = {'en-deu': ['der hund schläft im garten .', 'ein haus'], 'en-mya': ['သူသည်အိမ်မှသွားသည်', 'အိမ်']}


def decode(run, step, translations=TRANSLATIONS):
  """Leaves what the decoder leaves."""
  scores = {}
  for pair, lines in translations.items():
    write(run / 'decode' / 'test' / f'step_{step}' / f'{pair}.hyp', lines)
    chrf = CHRF().corpus_score(lines, [REFERENCES[pair]]).score
    scores[pair] = {'sentences': 2, 'bleu': 0.0, 'chrf': chrf}
  (run / 'decode' / 'test' / f'step_{step}' / 'scores.json').write_text(json.dumps({'pairs': scores, 'settings': {}}))


def log_line(step, **values):
  so_far = {'seconds_so_far': 2.04 * step, 'source_tokens_so_far': 100.0 * step, 'target_tokens_so_far': 90.0 * step}
  return json.dumps({'step': step, **so_far, **values})


def evaluation(step, loss):
  by_pair = {'en-deu': loss - 0.25, 'en-mya': loss + 0.25}
  return log_line(step, seconds_so_far=2.04 * step + 9, dev_loss=loss, dev_loss_by_pair=by_pair)


@pytest.fixture
def run(tmp_path):
  """A run with evaluations at steps 2 and 4, of which 4 was kept and decoded."""
  for pair, lines in REFERENCES.items():
    folder = tmp_path / 'corpus' / f'{pair[3:]}-en'
    write(folder / f'test.{pair[3:]}', lines)
    write(folder / 'test.en', ['the dog sleeps in the house.', 'the house'])
  run = tmp_path / 'mine'
  lines = [log_line(1), log_line(2), evaluation(2, 5.0), log_line(3), log_line(4), evaluation(4, 4.123456789)]
  write(run / 'train.jsonl', lines)
  values = {'data_dir': str(tmp_path / 'corpus'), 'pairs': 'en-*', 'keep_every': 4}
  (run / 'config.json').write_text(json.dumps({'model': 'mt.x.M', 'values': values}))
  decode(run, 4)
  return run


def tool(*args):
  return forks.run([TOOL, *map(str, args)], timeout=120)


def test_evaluations_and_scores_become_lines(run, tmp_path):
  out = tmp_path / 'results' / 'mine.jsonl'
  done = tool(run, f'--out={out}', '--commit=abc', '--steps_per_epoch=8')
  assert done.stdout == f'{out}: 2 evaluations and 2 scores added to 0 lines\n', done.stderr
  first, second, deu, mya = records(out)
  common = {'run': 'mine', 'model': 'mt.x.M', 'direction': 'from_english', 'commit': 'abc'}
  at_2 = {'step': 2, 'epochs': 0.25, 'seconds': 4.1, 'source_tokens': 200, 'target_tokens': 180}
  at_4 = {'step': 4, 'epochs': 0.5, 'seconds': 8.2, 'source_tokens': 400, 'target_tokens': 360}
  by_pair = {'en-deu': 3.87346, 'en-mya': 4.37346}
  assert first == {'kind': 'eval', **common, **at_2, 'dev_loss': 5.0}  # no multiple of keep_every
  assert second == {'kind': 'eval', **common, **at_4, 'dev_loss': 4.12346, 'dev_loss_by_pair': by_pair}
  for found, pair, tokenizer in ((deu, 'en-deu', '13a'), (mya, 'en-mya', 'char')):
    metrics = {'BLEU': BLEU(tokenize=tokenizer), 'chrF2': CHRF(), 'chrF++': CHRF(word_order=2)}
    texts = (TRANSLATIONS[pair], [REFERENCES[pair]])
    scores = {name: round(metric.corpus_score(*texts).score, 4) for name, metric in metrics.items()}
    what = {'split': 'test', 'pair': pair, 'lines': 2, 'dev_loss': by_pair[pair], 'tokenizer': tokenizer}
    assert found == {'kind': 'test', **common, **at_4, **what, **scores}


def test_again_it_adds_nothing_and_later_only_what_is_new(run, tmp_path):
  out = tmp_path / 'out.jsonl'
  tool(run, f'--out={out}')
  before = out.read_text(encoding='utf-8')
  done = tool(run, f'--out={out}')
  assert (
    done.stdout.endswith(': 0 evaluations and 0 scores added to 4 lines\n')
    and out.read_text(encoding='utf-8') == before
  )
  with open(run / 'train.jsonl', 'a') as f:
    f.write(log_line(5) + '\n' + evaluation(5, 4.0) + '\n' + '{"step": 6, "sec')  # being written
  decode(run, 5, {'en-deu': TRANSLATIONS['en-deu']})
  done = tool(run, f'--out={out}')
  assert done.stdout.endswith(': 1 evaluation and 1 score added to 4 lines\n')
  assert out.read_text(encoding='utf-8').startswith(before)
  evaluated, scored = records(out)[4:]
  assert (evaluated['kind'], evaluated['step'], evaluated['epochs'], evaluated['commit']) == ('eval', 5, None, None)
  assert (scored['kind'], scored['step'], scored['pair'], scored['dev_loss']) == ('test', 5, 'en-deu', 3.75)


def test_a_split_that_is_named_twice_is_recorded_once(run, tmp_path):
  done = tool(run, f'--out={tmp_path / "out.jsonl"}', '--split=test,test')
  assert done.stdout.endswith(': 2 evaluations and 2 scores added to 0 lines\n'), done.stderr
  assert len(records(tmp_path / 'out.jsonl')) == 4


def test_runs_share_a_file_and_an_average_is_one_of_its_own(run, tmp_path):
  out, average = tmp_path / 'out.jsonl', tmp_path / 'mine_average'
  average.mkdir()
  (average / 'config.json').write_text((run / 'config.json').read_text())
  (average / 'averaged.json').write_text(json.dumps({'steps': [2, 4], 'of': '../mine'}))
  decode(average, 4)
  tool(run, f'--out={out}')
  done = tool(average, f'--out={out}')
  assert done.stdout.endswith(': 0 evaluations and 2 scores added to 4 lines\n'), done.stderr
  last = records(out)[-1]
  assert last['run'] == 'mine_average' and last['average_of'] == [2, 4]
  assert (last['seconds'], last['dev_loss']) == (8.2, None)  # the training is the other's; the loss is not
  assert not done.stderr
  run.rename(tmp_path / 'gone')
  done = tool(average, f'--out={tmp_path / "null.jsonl"}')
  assert done.returncode == 0 and done.stderr.count('\n') == 1 and 'mine/train.jsonl does not have' in done.stderr
  assert records(tmp_path / 'null.jsonl')[-1]['seconds'] is None


def test_a_recorded_score_does_not_change_in_silence(run, tmp_path):
  out = tmp_path / 'out.jsonl'
  tool(run, f'--out={out}')
  before = out.read_text(encoding='utf-8')
  decode(run, 4, {**TRANSLATIONS, 'en-deu': REFERENCES['en-deu']})
  done = tool(run, f'--out={out}')
  assert done.returncode == 1 and 'results do not change in silence' in done.stderr
  assert 'mine step 4, en-deu: chrF2' in done.stderr and out.read_text(encoding='utf-8') == before


def test_nor_does_a_recorded_loss_where_another_run_takes_the_name(run, tmp_path):
  out = tmp_path / 'out.jsonl'
  tool(run, f'--out={out}')
  before = out.read_text(encoding='utf-8')
  write(run / 'train.jsonl', [log_line(2), evaluation(2, 9.0), log_line(4), evaluation(4, 8.0), evaluation(6, 7.0)])
  done = tool(run, f'--out={out}')
  assert done.returncode == 1 and 'mine step 2: dev_loss 5.0 is recorded, but the run has 9.00000' in done.stderr
  assert out.read_text(encoding='utf-8') == before


@pytest.mark.parametrize(
  ('flags', 'answer'),
  [
    (['more'], 'one run is recorded: tools/record_results.py RUN --out=FILE; saw'),
    (['--steps_per_epoch=0'], '--steps_per_epoch must be a positive number; saw 0.0'),
    (['--steps_per_epoch=inf'], '--steps_per_epoch must be a finite number; saw inf'),
    (['--split=test,tset'], "mine has no translations of 'tset': decode it, or leave it out"),
    (['--data_dir=/gone'], "'/gone' is not there: --data_dir=..."),
  ],
)
def test_a_mistake_gets_one_line_and_status_1(run, tmp_path, flags, answer):
  done = tool(run, f'--out={tmp_path}/out', *flags)
  assert done.returncode == 1 and answer in done.stderr and len(done.stderr.splitlines()) == 1
  assert not (tmp_path / 'out').exists()


def test_a_file_of_something_else_is_left_alone(run, tmp_path):
  (tmp_path / 'out').write_text('no JSON\n')
  done = tool(run, f'--out={tmp_path}/out')
  assert done.returncode == 1 and f'each line of {tmp_path}/out is a record' in done.stderr
  assert 'line 1 is not (' in done.stderr and (tmp_path / 'out').read_text() == 'no JSON\n'
  done = tool(run, f'--out={tmp_path}')
  assert done.returncode == 1 and f'{tmp_path} cannot be read (Is a directory)' in done.stderr


GOOD = {
  'eval': {'kind': 'eval', 'run': 'r', 'step': 1, 'dev_loss': 2.0, 'seconds': None, 'target_tokens': 3},
  'test': {'kind': 'test', 'run': 'r', 'step': 1, 'split': 'test', 'pair': 'a-b', 'chrF2': 1.0, 'BLEU': None},
}


@pytest.mark.parametrize(
  ('kind', 'name', 'value'),
  [
    *(('eval', name, None) for name in ('kind', 'run', 'step', 'dev_loss')),
    *(('eval', 'target_tokens', value) for value in (0, math.inf, math.nan, '3')),
    ('eval', 'kind', ['eval']),
    ('eval', 'seconds', '3'),
    *(('test', name, None) for name in ('split', 'pair', 'chrF2')),
    ('test', 'BLEU', '1'),
  ],
)
def test_a_line_that_lacks_what_a_record_has_is_named_by_its_number(tmp_path, kind, name, value):
  write(tmp_path / 'results', [json.dumps(record) for record in GOOD.values()])
  assert recording.read(str(tmp_path / 'results')) == list(GOOD.values())
  write(tmp_path / 'results', [json.dumps(record) for record in (*GOOD.values(), {**GOOD[kind], name: value})])
  with pytest.raises(UserError, match=f"results is a record .*line 3 is not \\('{name}' must be .*mend or remove it"):
    recording.read(str(tmp_path / 'results'))


def test_processes_that_add_to_one_file_lose_nothing(tmp_path):
  path = str(tmp_path / 'results')
  adding = lambda run: recording.append(path, [{**GOOD['eval'], 'run': str(run)}, GOOD['test']])
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    found = sorted((there, len(added)) for added, there in pool.map(adding, range(30)))
    assert found == [(0, 2), *((there, 1) for there in range(2, 31))]
  assert len(recording.read(path)) == 31  # the second record is there once
