"""The verdict of a report: each rule on numbers made by hand, and the findings on a run."""

import json

import written_run
from text_lines import write

from lingvo_moe.addons.report import reading, verdict, verdict_section

FALLING = [(100, 4.0), (200, 3.0), (300, 2.5), (400, 2.4)]


def test_one_evaluation_is_too_early():
  assert verdict.improving([]).said == 'The dev loss is not known yet; two evaluations show a change.'
  found = verdict.improving([(100, 4.0)])
  assert (found.kind, found.headline) == ('open', 'Too early to say') and '4 at step 100' in found.said


def test_a_run_whose_last_evaluation_is_the_best_by_far_still_improves():
  found = verdict.improving(FALLING)
  assert found.headline == 'Still improving' and 'max_steps' in found.advice
  assert found.said == 'The dev loss went from 2.5 at step 300 to 2.4 at step 400.'  # the last fifth begins at 320
  assert verdict.improving([(1, 4.0), (2, 3.9)]).headline == 'Still improving'


def test_a_gain_of_less_than_half_a_per_cent_is_none():
  levelled = [*FALLING[:3], (400, 2.4876)]
  assert verdict.improving(levelled).headline == 'Levelled off'
  assert verdict.improving([*FALLING[:3], (400, 2.4874)]).headline == 'Still improving'


def test_a_run_that_was_better_before_names_the_step():
  found = verdict.improving([*FALLING, (500, 2.41), (600, 2.6)])
  assert found.headline == 'No better since step 400' and 'learning_rate' in found.advice
  assert found.said == 'The best dev loss is 2.4, at step 400; after 2 evaluations more it is 2.6.'
  assert 'after 1 evaluation more' in verdict.improving([*FALLING, (500, 2.4)]).said  # the earliest of equals


def test_of_a_score_the_larger_is_better():
  found = verdict.improving([(1, 10.0), (2, 12.0), (3, 11.0)], 'BLEU of dev text', larger=True)
  assert found.headline == 'No better since step 2' and found.said.startswith('The best BLEU of dev text is 12')
  assert verdict.improving([(1, 10.0), (2, 12.0)], larger=True).headline == 'Still improving'


def test_over_fitting_is_a_dev_loss_that_rises_while_the_training_loss_falls():
  train = [(step, 5 - step / 100) for step in range(1, 401)]
  dev = [(100, 3.0), (200, 2.8), (300, 2.9), (400, 3.1)]
  found = verdict.over_fitting(dev, train)
  assert found.headline == 'Over-fitting' and 'residual_dropout' in found.advice
  # Means of 40 steps each, up to 200 and up to 400.
  assert found.said == (
    'Since step 200 the training loss fell from 3.195 to 1.195, and the dev loss rose from 2.8 to 3.1.'
  )
  assert verdict.over_fitting(dev[:3], train) is None  # one evaluation may be chance
  assert verdict.over_fitting([*dev[:3], (400, 2.82)], train) is None  # less than 1%
  assert verdict.over_fitting(dev, [(step, 3.0) for step, _ in train]) is None
  assert verdict.over_fitting([], train) is None and verdict.over_fitting(dev, []) is None


def test_experts_without_a_token_are_named_by_layer():
  found = verdict.experts({'encoder/layer_01': [0, 5, 0, 3], 'decoder/layer_01': [1, 1]}, 20)
  assert found.kind == 'bad' and 'aux_loss_weight' in found.advice and 'num_experts' in found.advice
  assert found.said == (
    'In the last 20 steps these had no token: 2 of 4 in encoder/layer_01 (0, 2); '
    'the fullest expert has 2.5 times the mean load, in encoder/layer_01.'
  )
  assert verdict.experts({'a': [0, 0]}, 1).kind == 'bad'


def test_an_expert_with_three_times_the_mean_load_is_uneven():
  even, uneven = ([3, 2, 1, 2], [9, 1, 1, 1])
  assert verdict.experts({'a': even}, 1) == (
    'good', 'Every expert is used', 'In the last 1 step the fullest expert has 1.5 times the mean load, in a.', ''
  )  # fmt: skip
  found = verdict.experts({'a': even, 'b': uneven}, 5)
  assert found.headline == 'Experts are used unevenly' and '3 times the mean load, in b' in found.said


def test_dropped_choices_are_few_some_or_many_by_the_worst_layer():
  found = verdict.dropped({'a': 0.01, 'b': 0.03})
  assert found.kind == 'good' and found.said == '2.0% of the choices of experts found no slot; most in b, 3.0%.'
  for share, headline in ((0.05, 'Some'), (0.199, 'Some'), (0.2, 'Many')):
    found = verdict.dropped({'a': 0.0, 'b': share})
    assert found.headline == f'{headline} choices are dropped' and 'capacity_factor' in found.advice


def test_waiting_for_data_and_divergence_are_said_where_they_are():
  assert verdict.waiting(0.09) is None
  assert '23% of the time' in verdict.waiting(0.234).said and 'cache_dir' in verdict.waiting(0.234).advice
  assert verdict.diverged({}, 'odd') is None and verdict.diverged({'reason': 'max_steps', 'step': 1}, 'odd') is None
  found = verdict.diverged({'step': 70, 'reason': 'odd'}, 'odd')
  assert found.said == 'At step 70 odd.' and 'clip_norm' in found.advice


def test_runs_are_in_the_order_of_their_best_dev_losses():
  found = verdict.compared({'a': (2.0, 500), 'b': (1.5, 900)})
  assert found.headline == 'b has the lowest dev loss'
  assert found.said == 'Best dev losses: b 1.5 at step 900; a 2 at step 500.'


def findings(path):
  return {found.headline: found for found in verdict_section.findings(reading.read([str(path)], 'test')[0])}


def test_the_verdict_on_a_run_is_of_its_own_numbers(tmp_path):
  run = written_run.write_run(tmp_path / 'run', steps=40)
  found = findings(run)
  # Of every layer: a first choice dropped by 0.1 / 40, a second by 0.2, a ninth by 0.4.
  assert list(found) == ['Still improving', 'Some experts are not used', 'Many choices are dropped']
  assert found['Still improving'].said == 'The dev loss went from 0.2 at step 30 to 0.15 at step 40.'
  assert '1 of 4 in encoder/layer_01 (0)' in found['Some experts are not used'].said
  assert found['Many choices are dropped'].said.startswith('20.1% of')
  written_run.write_json(run / 'finished.json', {'step': 40, 'reason': 'the loss was not finite'})
  assert 'Diverged' in findings(run)


def test_a_dense_run_and_one_without_a_log_have_a_verdict(tmp_path):
  assert list(findings(written_run.write_run(tmp_path / 'dense', layers=()))) == ['Still improving']
  run = written_run.write_run(tmp_path / 'run')
  (run / 'train.jsonl').unlink()
  text = written_run.made(run)
  assert 'run has no training log' in text.partition('id="summary"')[0]


def test_checkpoints_that_a_score_ranks_are_judged_by_it(tmp_path):
  run = written_run.write_run(tmp_path / 'run', best_by='bleu', layers=())
  lines = [{'step': step, 'dev_loss': 1.0, 'dev_bleu': bleu} for step, bleu in ((10, 20.0), (20, 19.0))]
  write(run / 'train.jsonl', map(json.dumps, [written_run.step_line(1, ()), *lines]))
  assert 'BLEU of dev text is 20' in findings(run)['No better since step 10'].said


def test_runs_are_compared_on_the_same_dev_text_alone(tmp_path):
  paths = []
  for name, loss, dev_text in (('a', 2.0, 'x'), ('b', 1.5, 'x'), ('c', 1.0, 'y')):
    paths.append(written_run.write_run(tmp_path / name, steps=1, layers=()))
    lines = [written_run.step_line(1, ()), {'step': 9, 'dev_loss': loss, 'dev_text': dev_text}]
    write(paths[-1] / 'train.jsonl', map(json.dumps, lines))
  text = written_run.made(*paths)
  assert 'Best dev losses: b 1.5 at step 9; a 2 at step 9.' in text and text.count('has the lowest dev loss') == 1
  assert 'Report on a, b and c' in text
