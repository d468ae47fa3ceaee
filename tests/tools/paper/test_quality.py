"""Quality beside cost from recorded results: numbers by hand, and the tool as typed."""

import json
import pathlib

import forks
import numpy as np
import pytest

pytest.importorskip('matplotlib')

from lingvo_moe.core.errors import UserError
from paper import quality

TOOL = pathlib.Path(__file__).resolve().parents[3] / 'tools' / 'paper_quality.py'
PAIRS = {'en-a': 400, 'en-b': 300, 'en-c': 200, 'en-d': 100}


def evaluation(run, step, loss):
  so_far = {'seconds': 2.0 * step, 'source_tokens': 10 * step, 'target_tokens': 100 * step}
  return {'kind': 'eval', 'run': run, 'step': step, 'dev_loss': loss, **so_far}


def test_of(run, step, pair, chrf):
  what = {'kind': 'test', 'run': run, 'step': step, 'split': 'test', 'pair': pair}
  return {**what, 'seconds': 1.5 * step, 'target_tokens': 90 * step, 'chrF2': chrf, 'BLEU': chrf / 2}


RECORDS = [
  *(evaluation('dense', step, loss) for step, loss in ((10, 6.0), (20, 5.0), (40, 4.0))),
  *(evaluation('experts', step, loss) for step, loss in ((20, 4.0), (10, 5.0), (40, 3.0))),
  *(test_of('dense', 40, pair, 20.0) for pair in PAIRS),
  *(test_of('experts', 20, pair, 99.0) for pair in PAIRS),  # an earlier step, which does not count
  *(test_of('experts', 40, pair, 20.0 + gain) for pair, gain in zip(PAIRS, (3.0, 2.0, -1.0, 0.0))),
]
test_of.__test__ = False


def test_tokens_to_a_loss_are_interpolated_at_its_first_crossing():
  run = quality.by_run(RECORDS, 'test')['dense']
  assert run.tokens_to(5.5) == 1500 and run.tokens_to(5.0) == 2000 and run.tokens_to(4.25) == 3500
  assert run.tokens_to(7.0) == 1000  # from the first evaluation on
  assert run.tokens_to(3.9) is None
  rising = run._replace(curve=[*run.curve, quality.Evaluation(80, 8000, 160.0, 9.0)])
  assert rising.tokens_to(5.0) == 2000
  points = (quality.Evaluation(n, 1000 * n, 2.0 * n, loss) for n, loss in enumerate((5.0, 3.0, 4.0, 2.0), start=1))
  assert run._replace(curve=[*points]).tokens_to(2.5) == 3500  # from the minimum so far, 3 at 3000, not from 4


def test_moving_average_is_of_whole_windows_at_their_middles():
  at, means = quality.moving_average([1.0, 2.0, 6.0, 3.0], window=3)
  np.testing.assert_allclose(at, [1, 2])
  np.testing.assert_allclose(means, [3, 11 / 3])
  at, means = quality.moving_average([1.0, 3.0], window=10)
  assert at.tolist() == [0.5] and means.tolist() == [2.0]


def test_tables_by_hand(tmp_path):
  blocks = '\n\n'.join(quality.Quality(quality.by_run(RECORDS, 'test'), 'dense', str(tmp_path), PAIRS).make())
  # dense has seen 1000 tokens at a quarter of its 4000, at loss 6; 2000 at a half, at loss 5.
  assert '| run | to 6.000 | to 5.000 | to 4.000 |' in blocks
  assert '| experts | 0.0M (1.00) | 0.0M (0.50) | 0.0M (0.50) |' in blocks
  assert '| experts | 40 | 0.0M | 0.02 | 16666.7 | 3.0000 | 21.00 (4 pairs, step 40) |' in blocks
  assert 'experts: +1.00 (median +1.00) in the mean of 4 pairs, 2 gain.' in blocks
  assert 'Of the larger half of the training sets +2.50 (median +2.50), of the smaller -0.50 (median -0.50).' in blocks
  assert '| MoE(2048E, 36L) | 82 | 175 | 542 | 44.3 | +13.5 | 22.4 |' in blocks  # the paper's
  assert '| 100 bilingual baselines | - | - | - | 30.8 | - | 29 |' in blocks
  rows = [line for line in blocks.splitlines() if line.startswith('| en-')]
  assert [row.split(' | ')[0] for row in rows] == ['| en-a', '| en-b', '| en-c', '| en-d']  # the largest first
  assert rows[2] == '| en-c | 200 | 20.00 | -1.00 |'
  assert {path.name for path in tmp_path.iterdir()} == {'curves.png', 'figure1.png', 'figure6.png'}


def test_an_average_has_the_cost_of_its_run_and_no_curve(tmp_path):
  records = [*(test_of('average', 40, pair, 20.0) for pair in PAIRS), *RECORDS]
  blocks = '\n\n'.join(quality.Quality(quality.by_run(records, 'test'), 'average', str(tmp_path), PAIRS).make())
  assert '| average | 40 | 0.0M | 0.02 | 16666.7 | - | 20.00 (4 pairs, step 40) |' in blocks
  assert (tmp_path / 'figure1.png').exists()
  unknown = quality.by_run([{**record, 'seconds': None} for record in records], 'test')
  assert unknown['average'].cost is None


def test_cost_is_of_the_step_that_was_translated(tmp_path):
  curve = [record for record in RECORDS if record['kind'] == 'eval']
  cost_of = lambda *tests: quality.by_run([*curve, *tests], 'test')['dense'].cost
  at_30 = test_of('dense', 30, 'en-a', 20.0)
  assert cost_of() == (40, 4000, 80.0)
  assert cost_of(at_30) == (30, 2700, 45.0)  # as its score has it
  assert cost_of(at_30 | {'seconds': None}) == (30, 3000, 60.0)  # between evaluations
  assert cost_of(at_30 | {'seconds': None, 'step': 41}) is None
  blocks = quality.Quality(quality.by_run([*curve, at_30], 'test'), 'dense', str(tmp_path), PAIRS).table3()
  assert '| dense | 30 | 0.0M | 0.01 | 16666.7 | 5.0000 | 20.00 (1 pair, step 30) |' in blocks[1]


def test_a_share_before_the_first_evaluation_has_no_loss(tmp_path):
  records = [evaluation('late', step, loss) for step, loss in ((60, 5.0), (100, 3.0))]
  [_, about, table] = quality.Quality(quality.by_run(records, 'test'), 'late', str(tmp_path), {}).table2()
  assert about.startswith('Losses of late after all of its tokens;') and '| run | to 3.000 |' in table


def test_a_score_that_is_null_is_left_out(tmp_path):
  records = [record | {'BLEU': None} if record.get('pair') == 'en-a' else record for record in RECORDS]
  assert 'en-a' not in quality.by_run(records, 'test')['dense'].scores['BLEU']


def test_a_run_that_stopped_before_a_loss_says_where(tmp_path):
  records = [evaluation('short', 10, 6.5), *RECORDS]
  [_, _, table] = quality.Quality(quality.by_run(records, 'test'), 'dense', str(tmp_path), PAIRS).table2()
  assert '| short | not in 0.0M | not in 0.0M | not in 0.0M |' in table


def test_what_is_not_known_is_told(tmp_path):
  runs = quality.by_run(RECORDS, 'test')
  with pytest.raises(UserError, match="--base names a recorded run; saw 'dens'; closest: dense"):
    quality.chosen(runs, 'dens', [])
  assert [*quality.chosen(runs, 'experts', [])] == ['dense', 'experts']
  assert [*quality.chosen(runs, 'experts', ['dense', 'experts'])] == ['experts', 'dense']
  with pytest.raises(UserError, match='that of en-a, en-b, en-c, en-d is not known: --data_dir='):
    quality.Quality(runs, 'dense', str(tmp_path), {}).make()
  assert not list(tmp_path.iterdir())  # before anything is drawn
  nothing_translated = quality.Quality(quality.by_run(RECORDS, 'dev'), 'dense', str(tmp_path), {}).make()
  assert nothing_translated[-1] == 'No other run has translations of pairs that dense has.'


def test_the_tool_counts_examples_and_writes_a_page(tmp_path):
  results = tmp_path / 'results.jsonl'
  odd = '$\\frac$'  # a name that matplotlib might take for TeX
  records = [*RECORDS, *({**record, 'run': odd} for record in RECORDS if record['run'] == 'experts')]
  results.write_text(''.join(json.dumps(record) + '\n' for record in records))
  for pair, lines in PAIRS.items():
    folder = tmp_path / 'corpus' / f'{pair[3:]}-en'
    folder.mkdir(parents=True)
    for language in (pair[3:], 'en'):
      (folder / f'train.{language}').write_text('a\n' * lines)
  command = [TOOL, results, '--base=dense', f'--out={tmp_path / "out"}']
  done = forks.run([*command, f'--data_dir={tmp_path / "corpus"}'])
  assert done.returncode == 0, done.stderr
  assert '| en-b | 300 | 20.00 | +2.00 |' in done.stdout
  assert (tmp_path / 'out' / 'quality.md').read_text() == done.stdout
  for flag, answer in (('--runs=expert', "saw 'expert'; closest: experts"), ('--split=dev', "set, test; saw 'dev'")):
    done = forks.run([*command, flag])
    assert done.returncode == 1 and answer in done.stderr and done.stderr.count('\n') == 1
